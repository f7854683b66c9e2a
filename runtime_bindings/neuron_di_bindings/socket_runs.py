"""Sending and receiving runs of memory through a stream socket, without a copy in user space.

The socket blocks, and `limit_silence` says how long. The caller has checked that the runs lie in
memory that it owns, and keeps memory and socket until the call returns. Without the compiled part
the same system calls are made from Python.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

_IOVECS_MAX = 1024
_CALL_BYTES_MAX = 64 << 20
_INT64 = np.dtype(np.int64)


class Deadline(Protocol):
    """A moment on the system's monotonic clock, in seconds."""

    @property
    def at_s(self) -> float: ...

    def has_passed(self) -> bool: ...


def limit_silence(sock: socket.socket, silence_s: float) -> None:
    """Make the socket block, and a call end with TimeoutError when no byte moves for so long."""
    sock.setblocking(True)
    limit = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def send_runs(
    sock: socket.socket,
    header: bytes,
    address: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    deadline: Deadline,
) -> None:
    """Send the header, then the runs at these offsets from an address, in order.

    TimeoutError when the deadline passes, ConnectionError when the connection ends.
    """
    _check(offsets, lengths)
    library = _library()
    if library is None:
        _send_plain(sock, header, address, offsets, lengths, deadline)
        return
    result = library.send_runs(
        sock.fileno(),
        header,
        len(header),
        address,
        offsets.tobytes(),
        lengths.tobytes(),
        len(offsets),
        int(deadline.at_s * 1e9),
    )
    if result:
        _raise(result)


def receive_runs(
    sock: socket.socket,
    address: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    deadline: Deadline,
) -> None:
    """Fill the runs at these offsets from an address, in order. Errors as of send_runs."""
    _check(offsets, lengths)
    library = _library()
    if library is None:
        _receive_plain(sock, address, offsets, lengths, deadline)
        return
    result = library.receive_runs(
        sock.fileno(),
        address,
        offsets.tobytes(),
        lengths.tobytes(),
        len(offsets),
        int(deadline.at_s * 1e9),
    )
    if result:
        _raise(result)


def is_compiled() -> bool:
    """Whether the compiled part is used."""
    return _library() is not None


def views_of(
    address: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
) -> Iterator[memoryview]:
    """The runs' bytes, each writable."""
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        if length < 0:
            raise ValueError("a run has a negative length")
        yield memoryview((ctypes.c_char * length).from_address(address + offset)).cast("B")


@cache
def _library() -> ctypes.CDLL | None:
    folder = Path(__file__).parent
    paths = [folder / f"_socket_runs{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        return None
    try:
        return load(path)
    except (OSError, AttributeError):  # built for another machine
        return None


def load(path: Path) -> ctypes.CDLL:
    """The compiled part in this file."""
    library = ctypes.CDLL(str(path))
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    # Arrays go as bytes: a copy of a few costs a tenth of what numpy takes to tell an address.
    rows = ctypes.c_char_p
    library.send_runs.argtypes = (
        *(ctypes.c_int, ctypes.c_char_p, number),
        *(pointer, rows, rows, number, number),
    )
    library.receive_runs.argtypes = (ctypes.c_int, pointer, rows, rows, number, number)
    library.send_runs.restype = library.receive_runs.restype = number
    return library


def _check(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """C would read beyond the arrays."""
    for array in (offsets, lengths):
        if array.dtype != _INT64 or array.ndim != 1:
            raise ValueError("offsets and lengths are rows of int64")
    if len(offsets) != len(lengths):
        raise ValueError("each offset has a length")


def _raise(result: int) -> NoReturn:
    if result == -1:
        raise ConnectionResetError("the peer closed the connection")
    if result == errno.ETIMEDOUT:
        raise TimeoutError("the peer stalls")
    if result == errno.EINVAL:
        raise ValueError("a run has a negative length")
    raise OSError(result, os.strerror(result))


def _batch(views: list[memoryview]) -> list[memoryview]:
    """The first of them, as many as one call takes. They stay in the list."""
    taken: list[memoryview] = []
    num_bytes = 0
    for view in views[-1 : -_IOVECS_MAX - 1 : -1]:
        taken.append(view)
        num_bytes += len(view)
        if num_bytes >= _CALL_BYTES_MAX:
            break
    return taken


def _drop(views: list[memoryview], num_bytes: int) -> None:
    """Forget the first bytes: they moved."""
    while views and num_bytes >= len(views[-1]):
        num_bytes -= len(views.pop())
    if num_bytes:
        views[-1] = views[-1][num_bytes:]


def _send_plain(
    sock: socket.socket,
    header: bytes,
    address: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    deadline: Deadline,
) -> None:
    views = [memoryview(header), *views_of(address, offsets, lengths)]
    views.reverse()  # the next one is the last
    _drop(views, 0)
    while views:
        try:
            _drop(views, sock.sendmsg(_batch(views)))
        except BlockingIOError:
            raise TimeoutError("the peer stalls") from None
        if views and deadline.has_passed():
            raise TimeoutError("the peer stalls")


def _receive_plain(
    sock: socket.socket,
    address: int,
    offsets: NDArray[np.int64],
    lengths: NDArray[np.int64],
    deadline: Deadline,
) -> None:
    views = list(views_of(address, offsets, lengths))
    views.reverse()
    _drop(views, 0)
    while views:
        try:
            num_bytes = sock.recvmsg_into(_batch(views))[0]
        except BlockingIOError:
            raise TimeoutError("the peer stalls") from None
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        _drop(views, num_bytes)
        if views and deadline.has_passed():
            raise TimeoutError("the peer stalls")
