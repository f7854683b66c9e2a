"""How links between this worker's device and its peers' are made, heard and ended.

Decode dials, prefill listens. One link per peer and direction: who links anew waits for the last
one to be quiet, so that the device's connections can be used again.

Next: neuron_di/transfer/nrt_handshake.py
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.errors import (
    BackendLost,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
)
from neuron_di.kv import NeuronPool
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.transfer.nrt_connections import Connections, ConnectionSet, Direction
from neuron_di.transfer.nrt_driver import Driver
from neuron_di.transfer.nrt_exchange import Exchange, NrtTimes
from neuron_di.transfer.nrt_frames import READY, Frame
from neuron_di.transfer.nrt_handshake import Handshake
from neuron_di.transfer.nrt_link import ControlLink, why_not
from neuron_di.transfer.nrt_plan import DevicePlan
from neuron_di.transfer.nrt_poster import Poster
from neuron_di.transfer.nrt_receiver import NrtReceiver
from neuron_di.transfer.nrt_sender import NrtSender
from neuron_di.transfer.tcp_listener import Arrival, TcpListener, prove, why_not_served
from neuron_di.transfer.tcp_proof import Hello, pair_secret
from neuron_di.transfer.tcp_stream import dial_stream, stream_of
from neuron_di.transfer.tcp_tls import TlsFiles, latest_of
from neuron_di.types import Incarnation
from neuron_di.wire import NrtRegion
from neuron_di_bindings.nrt import NrtError, NrtMisuse, NrtWorkerError

_log = get_logger(__name__)

_ABANDON_S = 1.0  # for what is abandoned to be told


@dataclass(eq=False, slots=True)
class Guest:
    """A decode worker that may link. `pairs` are a rank here and a core there, each."""

    region: NrtRegion
    plan: DevicePlan
    pairs: Sequence[tuple[int, int]]
    sender: NrtSender
    attempt: int = 0


class NrtLinks:
    """Owns the port, once it listens, and a thread per link. Thread-safe."""

    def __init__(
        self,
        pool: NeuronPool,
        driver: Driver,
        connections: Connections,
        poster: Poster,
        times: NrtTimes,
        *,
        secret: bytes,
        tls: TlsFiles | None,
    ) -> None:
        self._pool = pool
        self._driver = driver
        self._connections = connections
        self._poster = poster
        self._times = times
        self._secret = secret
        self._tls = tls
        self._attempts = itertools.count(1)
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener: TcpListener | None = None
        self._guest_of: Callable[[Incarnation], Guest | None] = lambda _: None
        self._linking: set[tuple[Incarnation, Direction]] = set()
        self._exchanges: dict[tuple[Incarnation, Direction], Exchange] = {}  # the last of each
        self._readers: list[threading.Thread] = []
        self._log_lock = threading.Lock()  # of its own: the event loop waits for other ones
        self._refusals = LimitedLogger(__name__)

    @property
    def port(self) -> int:
        """Where it listens; 0: nowhere."""
        return 0 if self._listener is None else self._listener.port

    def listen(self, host: str, port: int, guest_of: Callable[[Incarnation], Guest | None]) -> None:
        """From now on those may link whom `guest_of` knows. Only the first call counts. ConfigError
        where nobody can listen there."""
        with self._lock:
            if self._is_closed:
                raise _closed()
            if self._listener is None:
                self._guest_of = guest_of
                self._listener = TcpListener(host, port, self._serve)

    def dial(
        self, peer: Incarnation, region: NrtRegion, pairs: Sequence[tuple[int, int]]
    ) -> Exchange:
        """Decode side: a link that is proved, and not heard yet. Blocks. PeerError."""
        deadline = Deadline.after(self._times.connect_s)
        with self._alone(peer, "receive"):
            self._until_quiet(peer, "receive", deadline)
            hello = Hello(
                attempt=next(self._attempts),
                index=0,
                num_streams=1,
                decode=self._pool.incarnation,
                prefill=peer,
            )
            link: ControlLink | None = None
            try:
                stream, pool_bytes = dial_stream(
                    region,
                    hello,
                    own_secret=pair_secret(self._secret, peer),
                    tls=latest_of(self._tls),
                    silence_s=self._times.silence_s,
                    deadline=deadline.earlier_of(Deadline.after(self._times.proof_s)),
                )
                link = ControlLink(stream)
                if pool_bytes != region.num_blocks * self._pool.layout.block_bytes:
                    raise PeerRefused("its pool is not one of as many blocks of this layout")
                exchange = self._handshake(link, peer, region, deadline).as_decode(pairs)
                self._keep(peer, "receive", exchange)
                return exchange
            except BaseException as error:
                if link is not None:
                    link.shut()
                    link.close()
                raise self._as_peer_error(error) from None

    def hear(self, exchange: Exchange, receiver: NrtReceiver) -> None:
        """Decode side: from now on `receiver` hears what the peer says, on a thread of its own."""
        thread = threading.Thread(target=exchange.read_on, name="kv-nrt-in", daemon=True)
        self._poster.call(lambda: exchange.start(receiver))
        try:
            thread.start()
        except RuntimeError:
            gone = PeerGone("no thread is left to hear a peer's device")
            self._poster.call(lambda: exchange.abandon(gone))
            exchange.link.close()
            raise gone from None
        with self._lock:
            self._readers = [each for each in self._readers if each.is_alive()]
            self._readers.append(thread)

    def finish(self, exchange: Exchange | None, error: NeuronDiError) -> None:
        """Nothing new begins on it, and it ends after what was agreed on. Returns at once."""
        if exchange is not None:
            self._poster.call(lambda: exchange.finish(error))

    def device_failed(self, error: NrtWorkerError) -> None:
        """Nothing can be done with the device any more. On any thread."""
        self._pool.lose(BackendLost(f"the Neuron device failed: {error}"))
        gone = PeerGone("this worker's device failed")
        with self._lock:
            exchanges = list(self._exchanges.values())
        for exchange in exchanges:
            self._poster.call(partial(exchange.abandon, gone))

    def close(self, deadline: Deadline) -> None:
        """End all links after what was agreed on; by the deadline, whatever is under way."""
        with self._lock:
            self._is_closed = True
            exchanges, readers = list(self._exchanges.values()), list(self._readers)
        for exchange in exchanges:
            self.finish(exchange, _closed())
        for exchange in exchanges:
            exchange.quiet.wait(deadline.remaining_s())
        for exchange in exchanges:
            if not exchange.quiet.is_set():
                self._poster.call(partial(exchange.abandon, _closed()))
        # What is shut ends at once: this is only for a thread that gets no processor.
        deadline = Deadline.after(max(deadline.remaining_s(), _ABANDON_S))
        for exchange in exchanges:
            exchange.quiet.wait(deadline.remaining_s())
        if self._listener is not None:
            self._listener.close(deadline)
        for thread in readers:
            thread.join(deadline.remaining_s())

    def _serve(self, arrival: Arrival) -> None:
        """Prefill side: one connection at the port, on its own thread."""
        deadline = Deadline.after(self._times.proof_s)
        try:
            hello, welcome = prove(
                arrival,
                self._pool.incarnation,
                self._secrets_of,
                self._pool.memory().num_bytes,
                tls=latest_of(self._tls),
                silence_s=self._times.silence_s,
                deadline=deadline,
            )
            guest = self._guest_of(hello.decode)
            if guest is None:
                raise PeerGone("a worker at the control port was disconnected")
            arrival.sock.settimeout(max(deadline.remaining_s(), 1e-3))
            arrival.sock.sendall(welcome)
            arrival.proved()
            link = ControlLink(stream_of(arrival.sock, self._times.silence_s))
            exchange = self._welcome(link, hello, guest)
        except (OSError, NeuronDiError) as error:
            with self._log_lock:
                self._refusals.warning("control_connection_refused", reason=why_not_served(error))
            return
        exchange.read_on()

    def _welcome(self, link: ControlLink, hello: Hello, guest: Guest) -> Exchange:
        """A link to a guest that is proved. Its sends go by it, once this returns."""
        peer, deadline = hello.decode, Deadline.after(self._times.connect_s)
        try:
            with self._alone(peer, "send"):
                if hello.attempt <= guest.attempt:
                    raise PeerRefused("a control connection of an earlier attempt")
                guest.attempt = hello.attempt
                self._until_quiet(peer, "send", deadline)
                handshake = self._handshake(link, peer, guest.region, deadline)
                exchange = handshake.as_prefill(guest.pairs)
                self._keep(peer, "send", exchange)
        except BaseException as error:
            link.shut()  # not before: whoever sees its end may link anew at once
            raise self._as_peer_error(error) from None

        def serve() -> None:
            guest.sender.serve(exchange)
            link.send(Frame(READY))  # whoever hears it may ask for what is posted from now on

        self._poster.call(serve)
        return exchange

    def _secrets_of(self, peer: Incarnation) -> tuple[bytes, bytes] | None:
        guest = self._guest_of(peer)
        if guest is None:
            return None
        return pair_secret(self._secret, peer), guest.region.secret

    def _handshake(
        self,
        link: ControlLink,
        peer: Incarnation,
        region: NrtRegion,
        deadline: Deadline,
    ) -> Handshake:
        def make(link: ControlLink, connections: ConnectionSet) -> Exchange:
            tensors, times = self._driver.tensors, self._times
            return Exchange(self._poster, link, connections, tensors, times, self._lose)

        return Handshake(
            link,
            self._connections,
            self._poster,
            make,
            peer=peer,
            host=region.host,
            deadline=deadline,
            proof_s=self._times.proof_s,
        )

    def _lose(self, num_messages: int) -> None:
        """An exchange ended, and the device still has some of its messages."""
        _log.error("nrt_messages_posted_for_good", count=num_messages)
        self._pool.lose(
            BackendLost(
                f"a peer's device was lost with {num_messages} messages posted to this one: only a "
                "new process has it back"
            )
        )

    @contextmanager
    def _alone(self, peer: Incarnation, direction: Direction) -> Iterator[None]:
        """One link of a peer is made at a time. PeerGone where another one is."""
        key = peer, direction
        with self._lock:
            if self._is_closed:
                raise _closed()
            if key in self._linking:
                raise PeerGone("another link to the same peer is being made")
            self._linking.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._linking.discard(key)

    def _until_quiet(self, peer: Incarnation, direction: Direction, deadline: Deadline) -> None:
        """End the last link, and wait until nothing is under way on it any more."""
        with self._lock:
            last = self._exchanges.get((peer, direction))
        if last is None:
            return
        self.finish(last, PeerGone("linked anew"))
        if not last.quiet.wait(deadline.remaining_s()):
            raise PeerTimeout("the last link to its device is not over in time")

    def _keep(self, peer: Incarnation, direction: Direction, exchange: Exchange) -> None:
        with self._lock:
            is_closed = self._is_closed
            quiet = [key for key, each in self._exchanges.items() if each.quiet.is_set()]
            for key in quiet:
                del self._exchanges[key]
            self._exchanges[peer, direction] = exchange
        if is_closed:
            self._poster.call(lambda: exchange.abandon(_closed()))
            raise _closed()

    def _as_peer_error(self, error: BaseException) -> BaseException:
        """What went wrong while a link was made, as whoever asked for it knows errors."""
        if isinstance(error, NrtWorkerError):
            self.device_failed(error)
        if isinstance(error, NrtError | NrtMisuse):
            return PeerGone(f"the device cannot be connected: {error}")
        return why_not(error)


def _closed() -> PeerGone:
    return PeerGone("this worker's transfer engine is closed")
