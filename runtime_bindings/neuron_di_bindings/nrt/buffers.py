"""Where host memory is, for a call that reads or writes it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Readable = bytes | bytearray | memoryview | NDArray[Any]
Writable = bytearray | memoryview | NDArray[Any]


def bytes_of(buffer: Readable) -> NDArray[np.uint8]:
    """The same memory as bytes. Who keeps the result keeps the memory where it is.

    ValueError where it isn't one run of bytes.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("host memory that isn't one run of bytes")
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def writable_bytes_of(buffer: Writable) -> NDArray[np.uint8]:
    """As `bytes_of`; ValueError where it can't be written."""
    found = bytes_of(buffer)
    if not found.flags.writeable and found.size:
        raise ValueError("host memory that can't be written")
    return found


def address_of(array: NDArray[np.uint8]) -> int:
    """Of its first byte."""
    return int(array.__array_interface__["data"][0])


def check_range(what: str, offset: int, num_bytes: int, size: int) -> None:
    """ValueError unless these bytes are within so many."""
    if offset < 0 or num_bytes < 0 or offset + num_bytes > size:
        raise ValueError(f"{num_bytes} bytes at {offset} are not within the {size} of {what}")
