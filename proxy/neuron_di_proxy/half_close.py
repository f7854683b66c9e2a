"""Whether a client that shut down its sending side is gone, or still listens to its answer.

Only writing tells: the first byte makes its host answer, and the next write fails.
"""

import asyncio

from neuron_di_proxy.request_head import RequestHead
from neuron_di_proxy.socket_reply import SocketReply

_DELAYS_S = (0.2, 1.0, 5.0)  # the last one again and again
_INFORMATION = b"HTTP/1.1 102 Processing\r\n\r\n"


def keeps_listening(
    transport: asyncio.Transport,
    head: RequestHead | None,
    reply: SocketReply | None,
    *,
    is_due: bool = False,
) -> bool:
    """Whether this answer may still be owed to who has shut down its side: if so, find out.

    Between two answers: whether what came before `is_due` to be looked at, which ends it then.
    With HTTP/1.0, or over TLS, nobody can be told from a client that has left.
    """
    if transport.get_extra_info("ssl_object") is not None:
        return False
    if head is None or reply is None:
        return is_due
    if head.version == "1.0":
        return False
    _probe(transport, reply)
    return True


def _probe(transport: asyncio.Transport, reply: SocketReply, step: int = 0) -> None:
    """Write now and then, for an HTTP/1.1 client, until the answer is over or the client gone."""
    if reply.is_over or transport.is_closing():
        return
    if reply.is_streaming:
        reply.ping()
    elif not reply.has_begun:
        transport.write(_INFORMATION)
    delay_s = _DELAYS_S[min(step, len(_DELAYS_S) - 1)]
    asyncio.get_running_loop().call_later(delay_s, _probe, transport, reply, step + 1)
