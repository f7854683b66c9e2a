"""Prefill's data port: whoever connects proves who it is, soon, or is gone.

A stranger costs one thread that reads a fixed number of bytes within a fixed time. There are
`UNPROVED_MAX` such threads at most: one more connection ends another. First those that have named
no worker that is expected, and of these the oldest of the address that has most: so strangers who
linger, or come in a flood, keep nobody out who speaks at once or comes from elsewhere.
"""

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable

from neuron_di.clock import Deadline, sleep_s
from neuron_di.errors import ConfigError, NeuronDiError, PeerGone
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.transfer.tcp_proof import Hello, answer
from neuron_di.transfer.tcp_stream import shut_socket, tune
from neuron_di.transfer.tcp_tls import Tls
from neuron_di.types import Incarnation

_log = get_logger(__name__)

UNPROVED_MAX = 64
_BACKLOG = 128
_NO_DESCRIPTOR_PAUSE_S = 0.1


class Arrival:
    """An accepted connection. `source` is where it comes from, `is_shut` that it was ended.

    `is_named`: it has named a worker that is expected.
    """

    def __init__(
        self, sock: socket.socket, source: str, forget: Callable[["Arrival"], None]
    ) -> None:
        self.sock = sock
        self.source = source
        self.is_shut = False
        self.is_named = False
        self._forget = forget

    def replace(self, sock: socket.socket) -> None:
        """This socket takes the place of the other, which is detached."""
        self.sock = sock
        if self.is_shut:  # meanwhile
            shut_socket(sock)

    def proved(self) -> None:
        """Say that the other end is known: newer arrivals do not end it any more."""
        self._forget(self)

    def shut(self) -> None:
        self.is_shut = True
        shut_socket(self.sock)


def prove(
    arrival: Arrival,
    own: Incarnation,
    secrets_of: Callable[[Incarnation], tuple[bytes, bytes] | None],
    pool_bytes: int,
    *,
    tls: Tls | None,
    silence_s: float,
    deadline: Deadline,
) -> tuple[Hello, bytes]:
    """TLS, where there is one, then the proof: as `answer` in tcp_proof.py.

    OSError where the connection ends, NeuronDiError where it is not proved in time.
    """

    def named(peer: Incarnation) -> tuple[bytes, bytes] | None:
        found = secrets_of(peer)
        arrival.is_named = found is not None
        return found

    tune(arrival.sock, silence_s)
    if tls is not None:
        arrival.sock.settimeout(max(deadline.remaining_s(), 1e-3))
        secured = tls.server.wrap_socket(
            arrival.sock, server_side=True, do_handshake_on_connect=False
        )
        arrival.replace(secured)
        secured.do_handshake()
    return answer(arrival.sock, own, named, pool_bytes, tls=tls, deadline=deadline)


class TcpListener:
    """Owns the port, a thread that accepts, and a thread per connection.

    `serve` runs on a thread of its own, until the connection is over.
    """

    def __init__(self, host: str, port: int, serve: Callable[[Arrival], None]) -> None:
        """ConfigError where nobody can listen there, PeerGone where no thread is left."""
        self._serve = serve
        self._lock = threading.Lock()
        self._unproved: OrderedDict[Arrival, None] = OrderedDict()
        self._threads: set[threading.Thread] = set()
        self._is_closed = False
        self._failures = LimitedLogger(__name__)  # the accepting thread's
        try:
            is_v6 = ipaddress.ip_address(host).version == 6
            family = socket.AF_INET6 if is_v6 else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen for data connections on {host}:{port}: {error}",
                param="transfer_host",
            ) from None
        self.port: int = self._socket.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="kv-tcp-port", daemon=True)
        try:
            self._accepting.start()
        except RuntimeError:
            self._socket.close()
            raise PeerGone("no thread is left to listen for data connections") from None

    def close(self, deadline: Deadline) -> None:
        """Stop listening and end who is not proved. Wait for all threads until the deadline:
        whoever serves proved connections ends those first."""
        with self._lock:
            self._is_closed = True
            for arrival in self._unproved:
                arrival.shut()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._accepting.join(deadline.remaining_s())
        self._socket.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(deadline.remaining_s())

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._failures.warning("data_port_cannot_accept", reason=str(error))
                sleep_s(_NO_DESCRIPTOR_PAUSE_S)
                continue
            arrival = Arrival(sock, source_of(address[0]), self._forget)
            thread = threading.Thread(
                target=self._run, args=(arrival,), name="kv-tcp-out", daemon=True
            )
            with self._lock:
                if self._is_closed:
                    sock.close()
                    return
                if len(self._unproved) >= UNPROVED_MAX:
                    self._make_room()
                self._unproved[arrival] = None
                self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self._end(arrival, thread)

    def _make_room(self) -> None:
        """Under the lock. Those who crowd in end each other."""
        strangers = [arrival for arrival in self._unproved if not arrival.is_named]
        strangers = strangers or list(self._unproved)
        counts = Counter(arrival.source for arrival in strangers)
        most = max(counts.values())
        oldest = next(arrival for arrival in strangers if counts[arrival.source] == most)
        del self._unproved[oldest]
        oldest.shut()

    def _run(self, arrival: Arrival) -> None:
        try:
            self._serve(arrival)
        except Exception:  # one connection's
            if not arrival.is_shut:  # else TLS may fail in any way
                _log.exception("data_connection_failed")
        finally:
            self._end(arrival, threading.current_thread())

    def _forget(self, arrival: Arrival) -> None:
        with self._lock:
            self._unproved.pop(arrival, None)

    def _end(self, arrival: Arrival, thread: threading.Thread) -> None:
        self._forget(arrival)
        arrival.sock.close()
        with self._lock:
            self._threads.discard(thread)


def source_of(address: str) -> str:
    """Who has one of these addresses has them all: a network of IPv6, an address of IPv4."""
    host = ipaddress.ip_address(address.partition("%")[0])
    return str(host) if host.version == 4 else host.packed[:8].hex()


def why_not_served(error: OSError | NeuronDiError) -> str:
    """What ended a connection that was not proved, in words for this end's log."""
    match error:
        case NeuronDiError():
            return error.message
        case TimeoutError():
            return "it did not prove in time who it is"
        case ssl.SSLError():
            return f"TLS with it failed: {error.strerror or error}"
        case _:
            return f"it ended before it was proved: {error.strerror or error}"
