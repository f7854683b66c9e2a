"""What every transfer is compared with: a copy of as many bytes, in this process."""

import ctypes
import mmap
from abc import ABC, abstractmethod

from neuron_di.clock import now_s

_PAGE = 4096


class RegionCopy(ABC):
    """Copies from one region of memory to another."""

    def __init__(self, region_bytes: int) -> None:
        self._size = region_bytes
        self._offset = 0

    def seconds(self, num_bytes: int) -> float:
        """Copy so many bytes, at another place each time; more than a region in several pieces."""
        if self._offset + num_bytes > self._size:
            self._offset = 0
        offset, left = self._offset, num_bytes
        start_s = now_s()
        while left:
            count = min(left, self._size - offset)
            self._copy(offset, count)
            left -= count
            offset = 0
        self._wait()
        elapsed_s = now_s() - start_s
        self._offset += num_bytes
        return elapsed_s

    def evict(self) -> None:
        """Have other bytes in the caches than those that were looked at last."""
        self.seconds(self._size)

    @abstractmethod
    def close(self) -> None:
        """Give the memory back."""

    @abstractmethod
    def _copy(self, offset: int, num_bytes: int) -> None:
        """From one region to the same place of the other. May return before it is over."""

    @abstractmethod
    def _wait(self) -> None:
        """Until all of it is over."""


class PlainCopy(RegionCopy):
    """memcpy. Two regions of anonymous memory, every page touched. Owns them until close()."""

    def __init__(self, region_bytes: int) -> None:
        super().__init__(region_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._maps = [mmap.mmap(-1, self._size, flags=flags) for _ in range(2)]
        for view in self._maps:
            view[::_PAGE] = b"\1" * (self._size // _PAGE)
        self._source, self._destination = [_address_of(view) for view in self._maps]

    def close(self) -> None:
        for view in self._maps:
            view.close()

    def _copy(self, offset: int, num_bytes: int) -> None:
        ctypes.memmove(self._destination + offset, self._source + offset, num_bytes)

    def _wait(self) -> None:
        """It is."""


def _address_of(view: mmap.mmap) -> int:
    first = ctypes.c_char.from_buffer(view)
    return ctypes.addressof(first)
