"""Whether a client that shut down its sending side is gone, or still listens to its answer.

Only writing tells: the first byte makes its host answer, and the next write fails.
"""

import asyncio

from neuron_di_proxy.socket_reply import SocketReply

_DELAYS_S = (0.2, 1.0, 5.0)  # the last one again and again
_INFORMATION = b"HTTP/1.1 102 Processing\r\n\r\n"


def probe_listener(transport: asyncio.Transport, reply: SocketReply, step: int = 0) -> None:
    """Write now and then, for an HTTP/1.1 client, until the answer is over or the client gone."""
    if reply.is_over or transport.is_closing():
        return
    if reply.is_streaming:
        reply.ping()
    elif not reply.has_begun:
        transport.write(_INFORMATION)
    delay_s = _DELAYS_S[min(step, len(_DELAYS_S) - 1)]
    asyncio.get_running_loop().call_later(delay_s, probe_listener, transport, reply, step + 1)
