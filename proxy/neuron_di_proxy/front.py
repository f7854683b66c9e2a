"""The proxy's front: accepts connections, reads HTTP/1.1, hands HTTP/2 over to hypercorn.

The two routes that stream tokens are answered right here, without a framework's price per token;
Quart answers the others, on the same connection. Over HTTP/2 Quart answers them all, and what a
client sees is the same, byte for byte.

Next: proxy/neuron_di_proxy/front_connection.py
"""

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from itertools import islice

from neuron_di.clock import Deadline, now_s
from neuron_di.config import FrontOptions
from neuron_di.obs import get_logger
from neuron_di_proxy.front_connection import FrontConnection
from neuron_di_proxy.hypercorn_side import HypercornSide
from neuron_di_proxy.quart_exchange import QuartExchange
from neuron_di_proxy.request_head import RequestHead
from neuron_di_proxy.send_deadline import NEVER
from neuron_di_proxy.service import Service
from neuron_di_proxy.ticks import look_every
from neuron_di_proxy.tls_handshake import TlsHandshake

BACKLOG = 4096
STARTS_PER_TURN = 4  # requests: what running streams are sent must not wait for a crowd of them
SWEEP_S_MIN, SWEEP_S_MAX = 0.02, 1.0

_LOOKED_AT_MAX = 64  # connections, when another wants to join

_Connection = FrontConnection | TlsHandshake
_log = get_logger(__name__)


class Front:
    """Owns the listening socket and every connection. Used from one event loop.

    `takes_hot` False lets Quart answer every request, so that both ways can be compared.
    """

    def __init__(
        self,
        service: Service,
        hypercorn: HypercornSide,
        tls: ssl.SSLContext | None = None,
        *,
        takes_hot: bool = True,
    ) -> None:
        self.service = service
        self.options = service.config.front
        self.send_timeout_s = service.limits.send_timeout_s
        self.takes_hot = takes_hot
        self.is_draining = False
        self._counts = service.metrics.connections
        self._hypercorn = hypercorn
        self._tls = tls
        self._connections: dict[_Connection, None] = {}
        self._resting: dict[_Connection, None] = {}  # without a request; since longest first
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._due: deque[FrontConnection] = deque()  # have a request that is to be started
        self._num_started = 0  # in this turn of the loop
        self._stop_sweeping: Callable[[], None] | None = None  # while there is a connection
        self._num_held = 0  # by hypercorn: HTTP/2
        self._interval_s = sweep_interval_s(self.options, self.send_timeout_s)
        self._silent_max = (self.options.ping_interval_s or NEVER) / self._interval_s

    async def start(self, sock: socket.socket) -> None:
        """Accept connections from now on. Takes over `sock`."""
        loop, tls = asyncio.get_running_loop(), self._tls
        self._server = await loop.create_server(
            lambda: FrontConnection(self) if tls is None else TlsHandshake(self, tls),
            sock=sock,
            backlog=BACKLOG,
        )

    def drain(self, *, leaves_port: bool = False) -> None:
        """Let each connection end with its next response; on request, accept no more of them."""
        self.is_draining = True
        if leaves_port:
            self._server.close()

    async def flush(self, deadline: Deadline) -> None:
        """Wait until every client has taken what was written for it, or until the deadline."""
        # Sockets do not say when they are empty.
        while not deadline.has_passed() and any(c.num_unsent for c in self._connections):  # noqa: ASYNC110
            await asyncio.sleep(min(self._interval_s, deadline.remaining_s()))

    async def stop(self, timeout_s: float) -> None:
        """Accept no more, and end every connection; busy ones have `timeout_s` for last words."""
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        for connection in list(self._connections):
            connection.abort()
        await self._hypercorn.stop(timeout_s)
        if self._stop_sweeping is not None:
            self._stop_sweeping()

    @property
    def num_connections(self) -> int:
        return len(self._connections) + self._num_held

    # What connections call.

    def joined(self, connection: _Connection) -> bool:
        """A connection was made. False: there are too many, and it must end."""
        if self.num_connections >= self.options.connections_max:
            self._counts.num_refused += 1
            try:
                has_room = self._end_a_resting_one()
            except Exception as error:  # a bug, and no reason to forget who wants to join
                _log.exception("no_room_made", raised=error)
                has_room = False
            if not has_room:
                return False
        self._connections[connection] = self._resting[connection] = None
        self._count_open()
        self._is_empty.clear()
        if self._stop_sweeping is None:
            self._stop_sweeping = look_every(self._interval_s, self._sweep)
        return True

    def left(self, connection: _Connection) -> None:
        """A connection is over."""
        self._connections.pop(connection, None)
        self._resting.pop(connection, None)
        self._count_open()
        if not self._connections:
            self._is_empty.set()

    def begins(self, connection: FrontConnection) -> None:
        """A request's head has come."""
        self._resting.pop(connection, None)

    def rests(self, connection: FrontConnection) -> None:
        """Its response is written, and the next request may come."""
        self._resting[connection] = None

    def let_answer(self, connection: FrontConnection) -> None:
        """Call `begin_answer` of the connection, now or in its turn."""
        if self._num_started == 0:
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_started < STARTS_PER_TURN:
            self._num_started += 1
            connection.begin_answer()
        else:
            self._due.append(connection)

    def _next_turn(self) -> None:
        self._num_started = num = min(len(self._due), STARTS_PER_TURN)
        if num:
            asyncio.get_running_loop().call_soon(self._next_turn)
        for _ in range(num):
            self._due.popleft().begin_answer()

    def hand_over(
        self, connection: FrontConnection, transport: asyncio.Transport, received: bytes
    ) -> None:
        """Give an HTTP/2 connection and what it has received to hypercorn, for good."""
        self.left(connection)
        self._hypercorn.hold(transport, received, self._held_no_more)
        self._num_held += 1
        self._count_open()

    def open_other(self, head: RequestHead, transport: asyncio.Transport) -> QuartExchange:
        """Take a request that Quart answers."""
        return QuartExchange(self._hypercorn.app, self.service, head, transport)

    def _end_a_resting_one(self) -> bool:
        """Make room for another: or whoever keeps connections open would keep all others out.

        Who has rested for longest is looked at first, hypercorn's last. Who is not quiet yet goes
        behind all others.
        """
        for connection in list(islice(self._resting, _LOOKED_AT_MAX)):
            if connection.is_resting:
                self.left(connection)
                connection.abort()
                return True
            self._resting[connection] = self._resting.pop(connection)
        return self._hypercorn.end_a_resting_one(_LOOKED_AT_MAX)

    def _held_no_more(self) -> None:
        self._num_held -= 1
        self._count_open()

    def _count_open(self) -> None:
        self._counts.num_open = self.num_connections

    def _sweep(self) -> None:
        if not self.num_connections and self._stop_sweeping is not None:
            self._stop_sweeping()
            self._stop_sweeping = None
        at_s = now_s()
        for connection in list(self._connections):
            try:
                connection.sweep(at_s, self._silent_max)
            except Exception as error:  # a bug, and no reason to keep no deadline any more
                _log.exception("sweep_failed", raised=error)
                connection.abort()
        self._hypercorn.sweep(at_s)


def sweep_interval_s(options: FrontOptions, send_timeout_s: float) -> float:
    """Seconds between two sweeps: small beside every deadline, and cheap beside the rest."""
    waits = [
        options.header_timeout_s,
        options.body_timeout_s,
        options.keep_alive_s,
        send_timeout_s,
        options.ping_interval_s or NEVER,
    ]
    return max(SWEEP_S_MIN, min(SWEEP_S_MAX, min(waits) / 5))
