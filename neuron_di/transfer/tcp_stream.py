"""One proven data connection: bytes go straight between the socket and the memory of a pool.

Under TLS they pass through OpenSSL's buffers, which is a copy on each side.
"""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone
from neuron_di.transfer.tcp_proof import Hello, dial
from neuron_di.transfer.tcp_tls import Tls
from neuron_di.wire import NrtRegion, TcpRegion
from neuron_di_bindings import socket_runs

Array = NDArray[np.int64]
T = TypeVar("T")

_KEEP_ALIVE_S = (10, 5, 3)  # silence, between two probes, and how many of them
_SOME_BYTES = 1 << 12


def tune(sock: socket.socket, silence_s: float) -> None:
    """Small frames leave at once, and a host that is gone is noticed. Buffers tune themselves."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    for name, value in zip(names, _KEEP_ALIVE_S, strict=True):
        sock.setsockopt(socket.IPPROTO_TCP, name, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * silence_s))


def shut_socket(sock: socket.socket) -> None:
    """End the connection both ways. TLS stays: SSLSocket.shutdown() would first take it away, and
    another thread would go on in the clear."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class Stream:
    """Owns the socket. One thread receives and calls close(); any thread may send frames or shut.

    OSError where the connection ends, TimeoutError where no byte moves for `silence_s`.
    """

    has_read_ahead = False  # whether bytes may have come that poll() does not show

    def __init__(self, sock: socket.socket, silence_s: float) -> None:
        self._sock = sock
        self.silence_s = silence_s
        # Held by whoever is not the owner's thread, so that close() gives no descriptor away
        # that somebody is about to use.
        self._lock = threading.Lock()
        tune(sock, silence_s)
        self._prepare()

    def _prepare(self) -> None:
        socket_runs.limit_silence(self._sock, self.silence_s)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send_frames(self, frames: bytes) -> None:
        """Never waits: a peer that leaves so many small frames unread is gone."""
        try:
            with self._lock:
                sent = self._sock.send(frames, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        if sent != len(frames):
            raise PeerGone("the peer reads nothing from its data connection")

    def send_runs(
        self, header: bytes, address: int, offsets: Array, lengths: Array, deadline: Deadline
    ) -> None:
        socket_runs.send_runs(self._sock, header, address, offsets, lengths, deadline=deadline)

    def receive_runs(
        self, address: int, offsets: Array, lengths: Array, deadline: Deadline
    ) -> None:
        socket_runs.receive_runs(self._sock, address, offsets, lengths, deadline=deadline)

    def receive_exactly(self, buffer: bytearray) -> None:
        """Fill it. The first byte may be long in coming; those behind it may not."""
        view = memoryview(buffer)
        done = 0
        while done < len(view):
            try:
                num_bytes = self._sock.recv_into(view[done:])
            except BlockingIOError:
                if done:
                    raise TimeoutError("the peer stalls") from None
                continue
            if not num_bytes:
                raise ConnectionResetError("the peer closed the connection")
            done += num_bytes

    def receive_some(self) -> bytes:
        """What is there; empty where nothing is."""
        try:
            some = self._sock.recv(_SOME_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not some:
            raise ConnectionResetError("the peer closed the connection")
        return some

    def shut(self) -> None:
        """Make whoever waits on the connection return with an error. From any thread."""
        with self._lock:
            shut_socket(self._sock)

    def close(self) -> None:
        with self._lock:
            self._sock.close()


class TlsStream(Stream):
    """OpenSSL serves one thread at a time, so each call takes what is there, under a lock."""

    _sock: ssl.SSLSocket

    def _prepare(self) -> None:
        self._sock.setblocking(False)

    @property
    def has_read_ahead(self) -> bool:  # type: ignore[override]
        with self._lock:
            return self._sock.pending() > 0

    def send_frames(self, frames: bytes) -> None:
        try:
            with self._lock:
                sent = self._sock.send(frames)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            sent = 0
        if sent != len(frames):
            raise PeerGone("the peer reads nothing from its data connection")

    def send_runs(
        self, header: bytes, address: int, offsets: Array, lengths: Array, deadline: Deadline
    ) -> None:
        self._send_all(memoryview(header), deadline)
        for view in socket_runs.views_of(address, offsets, lengths):
            self._send_all(view, deadline)

    def receive_runs(
        self, address: int, offsets: Array, lengths: Array, deadline: Deadline
    ) -> None:
        for view in socket_runs.views_of(address, offsets, lengths):
            done = 0
            while done < len(view):
                done += self._receive_into(view[done:], self.silence_s)
                _check(deadline)

    def receive_exactly(self, buffer: bytearray) -> None:
        view = memoryview(buffer)
        done = 0
        while done < len(view):
            done += self._receive_into(view[done:], self.silence_s if done else None)

    def receive_some(self) -> bytes:
        try:
            with self._lock:
                some = self._sock.recv(_SOME_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b""
        if not some:
            raise ConnectionResetError("the peer closed the connection")
        return some

    def _send_all(self, view: memoryview, deadline: Deadline) -> None:
        while view:
            view = view[self._call(partial(self._sock.send, view), self.silence_s, deadline) :]
            _check(deadline)

    def _receive_into(self, view: memoryview, silence_s: float | None) -> int:
        num_bytes = self._call(partial(self._sock.recv_into, view), silence_s)
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        return num_bytes

    def _call(
        self, call: Callable[[], T], silence_s: float | None, deadline: Deadline | None = None
    ) -> T:
        """OpenSSL has taken all of what is sent when it returns: the deadline may pass before."""
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            poll = select.poll()
            poll.register(self._sock, event)
            if not poll.poll(None if silence_s is None else silence_s * 1000):
                raise TimeoutError("the peer stalls")
            if deadline is not None:
                _check(deadline)


def stream_of(sock: Any, silence_s: float) -> Stream:
    """Owns the socket from now on, also where this fails."""
    try:
        if isinstance(sock, ssl.SSLSocket):
            return TlsStream(sock, silence_s)
        return Stream(sock, silence_s)
    except BaseException:
        sock.close()
        raise


def dial_stream(
    region: TcpRegion | NrtRegion,
    hello: Hello,
    *,
    own_secret: bytes,
    tls: Tls | None,
    silence_s: float,
    deadline: Deadline,
) -> tuple[Stream, int]:
    """Decode side: (a proved connection, how many bytes the peer's pool has). `own_secret` is the
    one for this peer. OSError where it is not connected, and what `dial` raises."""
    left_s = max(deadline.remaining_s(), 1e-3)
    sock = socket.create_connection((region.host, region.port), timeout=left_s)
    try:
        tune(sock, silence_s)
        if tls is not None:
            sock.settimeout(max(deadline.remaining_s(), 1e-3))
            sock = tls.client.wrap_socket(sock)
        pool_bytes = dial(
            sock,
            hello,
            decode_secret=own_secret,
            prefill_secret=region.secret,
            deadline=deadline,
        )
        return stream_of(sock, silence_s), pool_bytes
    except BaseException:
        sock.close()
        raise


def _check(deadline: Deadline) -> None:
    if deadline.has_passed():
        raise TimeoutError("the peer stalls")
