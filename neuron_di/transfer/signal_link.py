"""What carries signals between workers: ZMQ, a ROUTER at prefill and a DEALER at decode.

A message that cannot be sent at once is dropped and reported: state is repaired by
deadlines and leases, never by hoarding stale messages.

Encrypted, that is CURVE: the ROUTER has the key that its worker's record names, a DEALER cannot
talk to a ROUTER with another, and each message comes with the key of the DEALER that sent it.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from neuron_di.dead_hosts import notice_dead_hosts
from neuron_di.errors import ConfigError, PeerGone, PeerRefused
from neuron_di.obs import LimitedLogger
from neuron_di.transfer.door import Door, Guard
from neuron_di.transfer.signal_keys import KEY_CHARS, SignalKeys
from neuron_di.transfer.signal_socket import OnFrames, SignalSocket
from neuron_di.wire.codec import SIGNAL_BYTES_MAX

_refusals = LimitedLogger(__name__)

QUEUED_MESSAGES_MAX = 10_000
CONNECT_TIMEOUT_MS = 2_000
HANDSHAKE_TIMEOUT_S = 5.0  # beside the time that an unknown key is waited for
# One may be broken off by a process that ended; so many in a row have a reason.
HANDSHAKES_FAILED_MAX = 3


class Link(Protocol):
    """One end of the signal link."""

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False when the peer is gone or its queue is full: it is not sent."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Seal:
    """What a connected end encrypts with, and the key that the other end must have.

    `on_failed` is called when the two could not agree: connecting goes on no longer.
    """

    keys: SignalKeys
    server_key: str
    on_failed: Callable[[PeerGone], None]


class SignalTransport(Protocol):
    """What carries signals. ZMQ outside of simulations.

    A bound end gets and sends [identity of the peer, message], a connected one [message]. With a
    guard the identity begins with the peer's key, 40 characters. A transport that cannot encrypt
    need not know `guard` and `seal`: they are given where keys are.
    """

    def bind(
        self, host: str, port: int, on_frames: OnFrames, *, guard: Guard | None = None
    ) -> tuple[Link, int]:
        """Prefill: listen, and return the port. ConfigError when that cannot be."""
        ...

    def connect(
        self,
        host: str,
        port: int,
        identity: bytes,
        on_frames: OnFrames,
        *,
        seal: Seal | None = None,
    ) -> Link:
        """Decode: connect in the background. PeerGone when no link can be at that address."""
        ...

    def close(self) -> None:
        """End after every link was closed. On the loop."""
        ...

    def wait_closed(self) -> None:
        """Come back once all is sent, or was given up. Blocks: call it off the loop, at the end."""
        ...


def _limit(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, SIGNAL_BYTES_MAX)
    socket.setsockopt(zmq.IPV6, 1)
    notice_dead_hosts(socket)


def endpoint(host: str, port: int) -> str:
    """A ZMQ address; port 0 lets the system choose when binding."""
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}:{port or '*'}"


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, guard: Guard | None = None
) -> "zmq.Socket[bytes]":
    """Prefill's socket: many decode workers on one port. ZMQError when it cannot be bound.

    An identity belongs to the connection that had it first: nobody takes another's over.
    """
    socket = context.socket(zmq.ROUTER)
    try:
        _limit(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if guard is not None:
            handshake_s = HANDSHAKE_TIMEOUT_S + guard.patience_s
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, guard.keys.secret)
            socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * handshake_s))
        socket.bind(endpoint(host, port))
    except BaseException:
        socket.close()
        raise
    return socket


def bound_port(socket: "zmq.Socket[bytes]") -> int:
    """The port a bound socket got."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return int(address.rstrip(b"\0").rsplit(b":", 1)[1])


def connect_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]",
    host: str,
    port: int,
    identity: bytes,
    seal: Seal | None = None,
) -> "zmq.Socket[bytes]":
    """Decode's socket to one prefill worker. The connection is made in the background.

    ZMQError when there can be none, PeerRefused when the other end's key is none.
    """
    socket = context.socket(zmq.DEALER)
    try:
        _limit(socket)
        if seal is not None:
            # Told to the other end only, under encryption: nobody else can wait for this
            # connection to break, take its name and hear what is meant for it.
            identity += b"-" + secrets.token_hex(8).encode()
            _encrypt(socket, seal)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.connect(endpoint(host, port))
    except BaseException:
        socket.close()
        raise
    return socket


def _encrypt(socket: "zmq.Socket[bytes]", seal: Seal) -> None:
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, seal.server_key.encode())
    except (zmq.ZMQError, UnicodeEncodeError):
        raise PeerRefused(
            f"a signal key has {KEY_CHARS} characters of Z85, and the peer's has not"
        ) from None
    socket.setsockopt(zmq.CURVE_PUBLICKEY, seal.keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, seal.keys.secret)


def _watch_bound(socket: SignalSocket, guard: Guard) -> None:
    """Count who does not speak CURVE, or not to our key, or hangs up before that is clear."""

    def on_event(_: int, value: int) -> None:
        _refusals.warning("signal_handshake_failed", cause=value)
        guard.on_refused()

    socket.watch(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, on_event
    )


def _watch_connected(socket: SignalSocket, seal: Seal) -> None:
    """Tell as soon as it is clear that the two ends will not agree; ZMQ itself stays silent."""
    num_failed = 0

    def on_event(event: int, value: int) -> None:
        nonlocal num_failed
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            num_failed = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            seal.on_failed(PeerGone(f"the directory there does not know our key ({value})"))
        else:
            num_failed += 1
            if num_failed >= HANDSHAKES_FAILED_MAX:
                seal.on_failed(PeerGone("whoever listens there does not have the key it should"))

    socket.watch(
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        on_event,
    )


class ZmqTransport:
    """Owns a ZMQ context. At most one of its bound ends has a guard."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door: Door | None = None

    def bind(
        self, host: str, port: int, on_frames: OnFrames, *, guard: Guard | None = None
    ) -> tuple[Link, int]:
        link: SignalSocket | None = None
        try:
            if guard is not None:
                assert self._door is None, "one guard"
                self._door = Door(self._context, guard)  # first, or ZMQ would let everybody in
            socket = bind_router(self._context, host, port, guard)
            link = SignalSocket(socket, on_frames, has_keys=guard is not None)
            if guard is not None:
                _watch_bound(link, guard)
            return link, bound_port(socket)
        except zmq.ZMQError as error:
            if link is not None:
                link.close(linger_ms=0)
            raise ConfigError(f"cannot bind the signal link to {host}:{port}: {error}") from None

    def connect(
        self,
        host: str,
        port: int,
        identity: bytes,
        on_frames: OnFrames,
        *,
        seal: Seal | None = None,
    ) -> Link:
        link: SignalSocket | None = None
        try:
            socket = connect_dealer(self._context, host, port, identity, seal)
            link = SignalSocket(socket, on_frames)
            if seal is not None:
                _watch_connected(link, seal)
            return link
        except zmq.ZMQError as error:  # such as: no descriptors are left
            if link is not None:
                link.close(linger_ms=0)
            raise PeerGone(f"no signal link can be at {host}:{port}: {error}") from None

    def close(self) -> None:
        if self._door is not None:
            self._door.close()

    def wait_closed(self) -> None:
        # A socket that nobody closed would keep us here for ever.
        self._context.destroy(linger=0)
