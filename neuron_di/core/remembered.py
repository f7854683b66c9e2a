"""What is still known of things that are over: bounded, the oldest forgotten first."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """A dictionary of the last `size_max` keys that were set."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._values: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, default: V) -> V:
        return self._values.get(key, default)

    def set(self, key: K, value: V) -> None:
        """Remember `value` under `key`, as the newest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size_max:
            self._values.popitem(last=False)
