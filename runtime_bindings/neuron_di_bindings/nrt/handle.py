"""Who holds an object of the library's, and when it ends.

The library frees at once whatever it is told to, and what comes after is undefined. So every object
is held here: by who made it, by each call that runs with it, by whatever else needs it (a slice its
tensor, a set its tensors, a posted request its memory). `close` makes it unusable at once; the
library is told when the last hold has ended. Any thread may do any of this.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from neuron_di_bindings.nrt.status import NrtMisuse


class Handle:
    """One object of the library's. `destroy` is called once, with its pointer."""

    def __init__(self, label: str, pointer: int, destroy: Callable[[int], None]) -> None:
        self.label = label
        self._pointer = pointer
        self._destroy = destroy
        self._lock = threading.Lock()
        self._num_holds = 1  # the maker's
        self._is_closed = False
        self._after: list[Callable[[], None]] = []
        self._kept: list[object] = []

    def hold(self) -> int:
        """Keep it until `release`. Its pointer. NrtMisuse after `close`."""
        with self._lock:
            if self._is_closed:
                raise NrtMisuse(f"{self.label} is used after it was given up")
            self._num_holds += 1
            return self._pointer

    def is_used(self) -> bool:
        """Whether somebody holds it but for its maker. Until `close`."""
        return self._num_holds > 1

    def release(self) -> None:
        """End one hold."""
        with self._lock:
            self._num_holds -= 1
            is_last = self._num_holds == 0
        if is_last:
            self._end()

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Its pointer, held within the block."""
        pointer = self.hold()
        try:
            yield pointer
        finally:
            self.release()

    def needs(self, other: "Handle") -> None:
        """Hold another one until the library has ended this one."""
        other.hold()
        self.at_end(other.release)

    def at_end(self, action: Callable[[], None]) -> None:
        """Call this once the library has ended it."""
        self._after.append(action)

    def keep(self, kept: object) -> None:
        """Not to be collected while the library may use it."""
        self._kept.append(kept)

    def close(self) -> None:
        """Give it up. A second time nothing happens."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.release()

    def _end(self) -> None:
        with contextlib.ExitStack() as stack:  # all of it, whatever one of them raises
            for action in self._after:
                stack.callback(action)
            self._destroy(self._pointer)
