"""The signal link in memory: ZMQ's ROUTER and DEALER on the simulated network, with faults.

As with ZMQ: each connection is in order; a DEALER queues while nobody listens and goes on with
whoever listens next at the address; a ROUTER cannot send to an identity that is not connected,
and gives an identity to the connection that had it first. Faults drop, duplicate, delay or
reorder messages by their type.
"""

import random
from collections import deque
from collections.abc import Callable

from neuron_di.errors import ConfigError
from neuron_di.testing.network import RESET_TIMEOUT_S, Network, Wire
from neuron_di.testing.virtual_loop import Process
from neuron_di.transfer import Guard, Link, OnFrames, Seal

QUEUED_MESSAGES_MAX = 10_000
RECONNECT_S_MAX = 1.0

Address = tuple[str, int]
_Lost = Callable[["_Session"], None]


class SignalNetwork:
    """Who listens where, and which DEALERs wait for somebody to listen there."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.routers: dict[Address, _Router] = {}
        self.dealers: dict[Address, list[_Dealer]] = {}
        self._next_port = 7000

    def free_port(self) -> int:
        self._next_port += 1
        return self._next_port


class SimTransport:
    """A SignalTransport of one simulated process, at the place that it is the process of."""

    def __init__(self, signals: SignalNetwork, process: Process) -> None:
        self._signals = signals
        self._process = process
        self._links: list[_Router | _Dealer] = []

    @property
    def num_open(self) -> int:
        """Links that were not closed."""
        return sum(not link.is_closed for link in self._links)

    def bind(
        self, host: str, port: int, on_frames: OnFrames, *, guard: Guard | None = None
    ) -> tuple[Link, int]:
        assert guard is None, "nothing is encrypted here"
        port = port or self._signals.free_port()
        if (host, port) in self._signals.routers:
            raise ConfigError(f"cannot bind the signal link to {host}:{port}: in use")
        router = _Router(self._signals, self._process, (host, port), on_frames)
        self._links.append(router)
        return router, port

    def connect(
        self,
        host: str,
        port: int,
        identity: bytes,
        on_frames: OnFrames,
        *,
        seal: Seal | None = None,
    ) -> Link:
        assert seal is None, "nothing is encrypted here"
        dealer = _Dealer(self._signals, self._process, (host, port), identity, on_frames)
        self._links.append(dealer)
        return dealer

    def close(self) -> None:
        for link in self._links:
            link.close()

    def wait_closed(self) -> None:
        """What was said is on its way."""


class _Session:
    """A connection between a DEALER and a ROUTER. `end` may be called at both sides."""

    def __init__(self, signals: SignalNetwork, dealer: "_Dealer", router: "_Router") -> None:
        network = signals.network
        self._network = network
        self.dealer = dealer
        self.router = router
        ours, theirs = dealer.process.name, router.process.name
        self.to_router = Wire(network, ours, theirs, router.process)
        self.to_dealer = Wire(network, theirs, ours, dealer.process)
        self._deaths = [(ours, self._dealer_died), (theirs, self._router_died)]
        for place, callback in self._deaths:
            network.on_death(place, callback)

    def send(self, wire: Wire, frames: list[bytes]) -> None:
        """Send the last of the frames, if faults let it pass, to be delivered as `frames`."""
        network = self._network
        message = frames[-1]
        tag = message_tag(message)
        is_up = wire is self.to_router
        deliver = self.router.deliver if is_up else self.dealer.deliver
        dealer, router = self.dealer.process.name, self.router.process.name
        ends = (dealer, router) if is_up else (router, dealer)
        network.note("signal", *ends, tag, message)
        network.on_signal(*ends, tag)
        delays = network.faults.message_delays(tag)
        if delays != ((0.0, True),):
            network.note("message fault", tag, len(delays))
        if network.faults.strikes("garbage"):
            garbage = _garbage_like(message, network.rng)
            wire.send(deliver, [*frames[:-1], garbage])
        for delay_s, is_ordered in delays:
            wire.send(deliver, frames, delay_s=delay_s, is_ordered=is_ordered)

    def end(self) -> None:
        self.to_router.is_closed = self.to_dealer.is_closed = True
        for place, callback in self._deaths:
            self._network.forget_death(place, callback)

    def _dealer_died(self) -> None:
        self._notice(self.dealer.process, self.router.process, self.router.lost)

    def _router_died(self) -> None:
        self._notice(self.router.process, self.dealer.process, self.dealer.lost)

    def _notice(self, dead: Process, other: Process, lost: _Lost) -> None:
        self.end()
        network = self._network
        is_cut = network.is_cut(dead.name, other.name)
        delay_s = RESET_TIMEOUT_S if is_cut else network.latency_s()
        other.call_later(delay_s, lost, self)


class _Router:
    def __init__(
        self, signals: SignalNetwork, process: Process, address: Address, on_frames: OnFrames
    ) -> None:
        self.process = process
        self._signals = signals
        self._address = address
        self._on_frames = on_frames
        self._sessions: dict[bytes, _Session] = {}
        self.is_closed = False
        signals.routers[address] = self
        signals.network.on_death(process.name, self._unbind)
        for dealer in signals.dealers.get(address, ()):
            dealer.reconnect_soon()

    def send(self, frames: list[bytes]) -> bool:
        identity, message = frames
        session = self._sessions.get(identity)
        if self.is_closed or session is None:
            return False
        session.send(session.to_dealer, [message])
        return True

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._unbind()
            for session in self._sessions.values():
                session.end()
                session.dealer.process.call_soon(session.dealer.lost, session)

    def accept(self, session: _Session) -> bool:
        """False: this identity is another connection's."""
        identity = session.dealer.identity
        if identity in self._sessions:
            return False
        self._sessions[identity] = session
        return True

    def lost(self, session: _Session) -> None:
        if self._sessions.get(session.dealer.identity) is session:
            del self._sessions[session.dealer.identity]

    def deliver(self, frames: list[bytes]) -> None:
        if not self.is_closed:
            self._on_frames(frames)

    def _unbind(self) -> None:
        self._signals.routers.pop(self._address, None)


class _Dealer:
    def __init__(
        self,
        signals: SignalNetwork,
        process: Process,
        address: Address,
        identity: bytes,
        on_frames: OnFrames,
    ) -> None:
        self.process = process
        self.identity = identity
        self._signals = signals
        self._address = address
        self._on_frames = on_frames
        self._session: _Session | None = None
        self._queue: deque[bytes] = deque()
        self.is_closed = False
        signals.dealers.setdefault(address, []).append(self)
        process.call_later(signals.network.latency_s(), self._connect)

    def send(self, frames: list[bytes]) -> bool:
        (message,) = frames
        if self.is_closed or len(self._queue) >= QUEUED_MESSAGES_MAX:
            return False
        if self._session is None:
            self._queue.append(message)
        else:
            self._session.send(self._session.to_router, [self.identity, message])
        return True

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._signals.dealers[self._address].remove(self)
        if (session := self._session) is not None:
            # What is on its way still arrives, and then the end of the connection.
            session.to_router.send(self._hang_up, session)

    def _hang_up(self, session: _Session) -> None:
        session.end()
        session.router.lost(session)

    def reconnect_soon(self) -> None:
        """Somebody listens again."""
        delay_s = 0.05 + RECONNECT_S_MAX * self._signals.network.rng.random()
        self.process.call_later(delay_s, self._connect)

    def lost(self, session: _Session) -> None:
        if self._session is session:
            self._session = None
            if self._address in self._signals.routers:
                self.reconnect_soon()

    def deliver(self, frames: list[bytes]) -> None:
        if not self.is_closed:
            self._on_frames(frames)

    def _connect(self) -> None:
        router = self._signals.routers.get(self._address)
        if self.is_closed or self._session is not None or router is None:
            return  # who binds the address later calls reconnect_soon
        network = self._signals.network
        if network.is_cut(self.process.name, router.process.name):
            self.reconnect_soon()
            return
        session = _Session(self._signals, self, router)
        if not router.accept(session):
            session.end()
            self.reconnect_soon()
            return
        self._session = session
        while self._queue:
            session.send(session.to_router, [self.identity, self._queue.popleft()])


def _garbage_like(message: bytes, rng: random.Random) -> bytes:
    """What is no message: noise, a part of one, or one with more behind it."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randbytes(rng.randrange(64))
    return message[: rng.randrange(len(message))] if kind == 1 else message + rng.randbytes(8)


def message_tag(message: bytes) -> str:
    """The type of a signal message: the value of its first field, as msgspec writes a union."""
    if message[1:6] != b"\xa4type":
        return "?"
    length = message[6] & 0x1F
    return message[7 : 7 + length].decode("ascii", "replace")
