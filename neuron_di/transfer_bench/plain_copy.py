"""What every transfer is compared with: memcpy of as many bytes, in this process."""

import ctypes
import mmap

from neuron_di.clock import now_s

_PAGE = 4096


class PlainCopy:
    """Two regions of anonymous memory, every page touched. Owns them until close()."""

    def __init__(self, region_bytes: int) -> None:
        self._size = region_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._maps = [mmap.mmap(-1, self._size, flags=flags) for _ in range(2)]
        for view in self._maps:
            view[::_PAGE] = b"\1" * (self._size // _PAGE)
        self._addresses = [_address_of(view) for view in self._maps]
        self._offset = 0

    def seconds(self, num_bytes: int) -> float:
        """Copy so many bytes, at another place each time; more than a region in several pieces."""
        source, destination = self._addresses
        if self._offset + num_bytes > self._size:
            self._offset = 0
        offset, left = self._offset, num_bytes
        start_s = now_s()
        while left:
            count = min(left, self._size - offset)
            ctypes.memmove(destination + offset, source + offset, count)
            left -= count
            offset = 0
        elapsed_s = now_s() - start_s
        self._offset += num_bytes
        return elapsed_s

    def evict(self) -> None:
        """Have other bytes in the caches than those that were looked at last."""
        self.seconds(self._size)

    def close(self) -> None:
        for view in self._maps:
            view.close()


def _address_of(view: mmap.mmap) -> int:
    first = ctypes.c_char.from_buffer(view)
    return ctypes.addressof(first)
