"""ZMQ sockets of the signal link, served by an asyncio loop: ROUTER at prefill, DEALER at decode.

Plain sockets watched through their descriptor: half the latency of zmq.asyncio. The
descriptor is edge-triggered, so each wake-up, and each send, drains until nothing is left.
A message that cannot be sent at once is dropped and reported: state is repaired by
deadlines and leases, never by hoarding stale messages.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import zmq

from neuron_di.errors import ConfigError, PeerGone
from neuron_di.obs import get_logger
from neuron_di.wire.codec import SIGNAL_BYTES_MAX

_log = get_logger(__name__)

QUEUED_MESSAGES_MAX = 10_000
MESSAGES_PER_TURN_MAX = 100
HEARTBEAT_INTERVAL_MS = 1_000
HEARTBEAT_TIMEOUT_MS = 3_000
CONNECT_TIMEOUT_MS = 2_000


OnFrames = Callable[[list[bytes]], None]


class Link(Protocol):
    """One end of the signal link."""

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False when the peer is gone or its queue is full: it is not sent."""
        ...

    def close(self) -> None: ...


class SignalTransport(Protocol):
    """What carries signals. ZMQ outside of simulations.

    A bound end gets and sends [identity of the peer, message], a connected one [message].
    """

    def bind(self, host: str, port: int, on_frames: OnFrames) -> tuple[Link, int]:
        """Prefill: listen, and return the port. ConfigError when that cannot be."""
        ...

    def connect(self, host: str, port: int, identity: bytes, on_frames: OnFrames) -> Link:
        """Decode: connect in the background. PeerGone when no link can be at that address."""
        ...

    def close(self) -> None:
        """End after every link was closed."""
        ...


class SignalSocket:
    """One ZMQ socket on the running loop. Not thread-safe: one socket, one thread, no exception.

    `on_frames` gets each message's frames. If it raises, that is logged and the link goes on.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", on_frames: OnFrames) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(fd, self._drain)
        self._loop.call_soon(self._drain)
        self._is_closed = False

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False when the peer is gone or its queue is full: it is not sent."""
        if self._is_closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            # Sending may have consumed the descriptor's edge for messages that arrived.
            self._loop.call_soon(self._drain)
        return True

    def close(self, linger_ms: int = 200) -> None:
        """Stop reading and close. What was queued for sending gets `linger_ms` to leave."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _drain(self) -> None:
        for _ in range(MESSAGES_PER_TURN_MAX):
            if self._is_closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                _log.exception("signal_failed")
        self._loop.call_soon(self._drain)  # a flood must not keep the loop from everything else


def _limit(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, SIGNAL_BYTES_MAX)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, 1)


def endpoint(host: str, port: int) -> str:
    """A ZMQ address; port 0 lets the system choose when binding."""
    bracketed = f"[{host}]" if ":" in host else host
    return f"tcp://{bracketed}:{port or '*'}"


def bind_router(
    context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int
) -> "zmq.Socket[bytes]":
    """Prefill's socket: many decode workers on one port. ConfigError when it cannot be bound.

    An identity belongs to the connection that had it first: nobody takes another's over.
    """
    socket = context.socket(zmq.ROUTER)
    _limit(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(endpoint(host, port))
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot bind the signal link to {host}:{port}: {error}") from None
    return socket


def bound_port(socket: "zmq.Socket[bytes]") -> int:
    """The port a bound socket got."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return int(address.rstrip(b"\0").rsplit(b":", 1)[1])


def connect_dealer(
    context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int, identity: bytes
) -> "zmq.Socket[bytes]":
    """Decode's socket to one prefill worker. The connection is made in the background."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    try:
        socket.connect(endpoint(host, port))
    except zmq.ZMQError as error:
        socket.close()
        raise PeerGone(f"no signal link can be at {host}:{port}: {error}") from None
    return socket


class ZmqTransport:
    """Owns a ZMQ context."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def bind(self, host: str, port: int, on_frames: OnFrames) -> tuple[Link, int]:
        socket = bind_router(self._context, host, port)
        return SignalSocket(socket, on_frames), bound_port(socket)

    def connect(self, host: str, port: int, identity: bytes, on_frames: OnFrames) -> Link:
        return SignalSocket(connect_dealer(self._context, host, port, identity), on_frames)

    def close(self) -> None:
        self._context.term()
