"""Keeps memory that was freed for the next long body, but not what a crowd of them left.

By default the system takes the memory of a long body back as soon as it is freed, and gives it,
page by page and each cleared, to the next one. That costs more than to copy the body. So the libc
is told to keep it, where it can be told; and as it may then keep all that a crowd has needed, it
is looked at now and then.
"""

import ctypes
import os
import resource
from typing import Any

_M_TRIM_THRESHOLD = -1  # names and numbers of malloc.h
_M_MMAP_THRESHOLD = -3

REUSED_BYTES_MAX = 4 << 20  # a longer block is given back when it is freed
KEPT_BYTES_MAX = 64 << 20  # of freed memory. More of it is given back when it is next looked at
LOOK_INTERVAL_S = 5.0

_PAGE_BYTES = resource.getpagesize()


class _Counts(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class Allocator:
    """The process' malloc. Does nothing where that is not glibc's."""

    def __init__(self) -> None:
        self._libc = _glibc()
        self._least_bytes = 0  # resident, since memory was given back

    def keep_freed(self) -> bool:
        """From now on. False: this libc has no such way."""
        if self._libc is None:
            return False
        self._least_bytes = _num_resident_bytes()
        is_kept = self._libc.mallopt(_M_MMAP_THRESHOLD, REUSED_BYTES_MAX)
        return bool(is_kept and self._libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES_MAX))

    def give_back(self) -> bool:
        """Give freed memory back if that is much. Says whether it was.

        What was given back still counts as free, so it is also seen whether the process has grown
        since. Takes about a millisecond for each 30 MiB.
        """
        if self._libc is None:
            return False
        try:
            num_bytes = _num_resident_bytes()
        except OSError:  # no file can be opened just now
            return False
        self._least_bytes = min(self._least_bytes, num_bytes)
        if num_bytes - self._least_bytes <= KEPT_BYTES_MAX:
            return False
        if self._libc.mallinfo2().fordblks <= KEPT_BYTES_MAX:
            return False
        self._libc.malloc_trim(0)
        self._least_bytes = _num_resident_bytes()
        return True


def _glibc() -> Any:
    """None where it is not there, or too old."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Counts
        libc.malloc_trim.argtypes = (ctypes.c_size_t,)
        libc.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except (OSError, AttributeError):
        return None
    return libc


def _num_resident_bytes() -> int:
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(statm, 256).split()[1]) * _PAGE_BYTES
    finally:
        os.close(statm)
