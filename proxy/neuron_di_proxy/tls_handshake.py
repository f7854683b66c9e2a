"""A client's connection until it speaks TLS.

It counts as a connection from its first moment: it has a descriptor and memory like any other, and
whoever opens it need not show that it knows TLS.
"""

import asyncio
import ssl
from typing import TYPE_CHECKING, cast

from neuron_di_proxy.front_connection import FrontConnection
from neuron_di_proxy.socket_rest import is_quiet

if TYPE_CHECKING:
    from neuron_di_proxy.front import Front


class TlsHandshake(asyncio.Protocol):
    """Owned by its transport until a FrontConnection takes over, or it fails.

    To its owner it is a connection without a request.
    """

    num_unsent = 0

    def __init__(self, owner: "Front", tls: ssl.SSLContext) -> None:
        self._owner = owner
        self._tls = tls
        self._received = bytearray()
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None

    # What the transport calls: the client's own one, then that of TLS.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's own class
        if self._owner.joined(self):
            self._task = asyncio.get_running_loop().create_task(self._shake())
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data

    # What the owner calls.

    @property
    def is_resting(self) -> bool:
        return is_quiet(self._transport)

    def sweep(self, at_s: float, silent_max: float) -> None:
        """Nothing: a handshake has a deadline of its own."""

    def close(self) -> None:
        self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()

    async def _shake(self) -> None:
        transport, loop = self._transport, asyncio.get_running_loop()
        timeout_s = self._owner.options.header_timeout_s
        try:
            if transport.is_closing():
                return
            loop.call_soon(self._pass_on)
            made = await loop.start_tls(
                transport, self, self._tls, server_side=True, ssl_handshake_timeout=timeout_s
            )
        except OSError:  # no TLS, too late, or gone
            return
        finally:
            self._owner.left(self)
        if made is None or made.is_closing():  # it was ended meanwhile
            return
        connection = FrontConnection(self._owner)
        made.set_protocol(connection)
        connection.connection_made(made)
        if self._received:  # a first request, behind the handshake's last word
            cast("asyncio.Protocol", made.get_protocol()).data_received(bytes(self._received))

    def _pass_on(self) -> None:
        """Tell TLS what came before `start_tls`; reading is paused until it was told."""
        early, self._received = self._received, bytearray()
        protocol = cast("asyncio.BufferedProtocol", self._transport.get_protocol())
        while early:
            buffer = memoryview(protocol.get_buffer(len(early)))
            num_bytes = min(len(buffer), len(early))
            buffer[:num_bytes] = early[:num_bytes]
            del early[:num_bytes]
            protocol.buffer_updated(num_bytes)
