"""One ZMQ socket, served by an asyncio loop.

A plain socket watched through its descriptor: half the latency of zmq.asyncio. The descriptor is
edge-triggered, so each wake-up, and each send, drains until nothing is left.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from neuron_di.obs import get_logger
from neuron_di.transfer.signal_keys import KEY_CHARS

_log = get_logger(__name__)

MESSAGES_PER_TURN_MAX = 100

OnFrames = Callable[[list[bytes]], None]


class SignalSocket:
    """Owns a socket on the running loop. Not thread-safe: one socket, one thread, no exception.

    `on_frames` gets each message's frames. If it raises, that is logged and the link goes on.
    With `has_keys` the first frame begins with the key that the connection proved to have, 40
    bytes, in what is received and in what is sent.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", on_frames: OnFrames, *, has_keys: bool = False
    ) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._has_keys = has_keys
        self._loop = asyncio.get_running_loop()
        fd = socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        self._fd = fd
        self._loop.add_reader(fd, self._drain)
        self._is_closed = False
        self._is_drain_due = False
        self._drain_soon()
        self._watcher: SignalSocket | None = None

    def watch(self, events: int, on_event: Callable[[int, int], None]) -> None:
        """Hear of what happens to the socket's connections: an event and its value."""

        def on_frames(frames: list[bytes]) -> None:
            event = parse_monitor_message(frames)
            on_event(event["event"], event["value"])

        self._watcher = SignalSocket(self._socket.get_monitor_socket(events), on_frames)

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False when the peer is gone or its queue is full: it is not sent."""
        if self._is_closed:
            return False
        if self._has_keys:
            frames = [frames[0][KEY_CHARS:], *frames[1:]]
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            # Sending may have consumed the descriptor's edge for messages that arrived.
            self._drain_soon()
        return True

    def close(self, linger_ms: int = 200) -> None:
        """Stop reading and close. What was queued for sending gets `linger_ms` to leave."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watcher is not None:
            self._socket.disable_monitor()
            self._watcher.close(linger_ms=0)
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=linger_ms)

    def _drain(self) -> None:
        for _ in range(MESSAGES_PER_TURN_MAX):
            if self._is_closed:
                return
            try:
                frames = self._receive()
            except zmq.Again:
                return
            try:
                self._on_frames(frames)
            except Exception:
                _log.exception("signal_failed")
        self._drain_soon()  # a flood must not keep the loop from everything else

    def _drain_soon(self) -> None:
        if not self._is_drain_due:  # one at a time: each message that is answered asks for it
            self._is_drain_due = True
            self._loop.call_soon(self._drain_due)

    def _drain_due(self) -> None:
        self._is_drain_due = False
        self._drain()

    def _receive(self) -> list[bytes]:
        if not self._has_keys:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        # Only an uncopied frame has its connection's properties; the message itself is copied.
        first = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [str(first.get("User-Id")).encode("ascii") + first.bytes]
        while self._socket.getsockopt(zmq.RCVMORE):
            frames.append(self._socket.recv(zmq.NOBLOCK))
        return frames
