"""Who may connect to a prefill worker's signal link, and whose key is whose.

    no directory      every key; a key proves that a connection's messages are one peer's, no more
    with a directory  the keys of its decode workers, each for its own worker id and incarnation

A key that is not known yet is waited for, not refused: a decode worker may connect before this
worker's own watch of the registry has told of it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from neuron_di.types import Incarnation, WorkerId


@dataclass(frozen=True, slots=True)
class KeyOwner:
    worker_id: WorkerId
    incarnation: Incarnation


class Admission:
    """The keys that are good now. Lives on the worker's event loop.

    `only` is the one key that may connect, whatever a directory says; None: no such rule.
    `on_change` is called after each change.
    """

    def __init__(self, *, only: str | None = None) -> None:
        self._only = only
        self._owners: Mapping[str, KeyOwner] | None = None
        self.on_change: Callable[[], None] = lambda: None

    def set_owners(self, owners: Mapping[str, KeyOwner]) -> None:
        """What the directory says: from the first call on no other key is good."""
        self._owners = owners
        self.on_change()

    def is_good(self, key: str) -> bool:
        """Whether a connection that proved to have this key may be kept."""
        if self._only is not None and key != self._only:
            return False
        return self._owners is None or key in self._owners

    def may_become_good(self, key: str) -> bool:
        """Whether a directory may yet tell of it."""
        return self._owners is not None and self._only in (None, key)

    def why_not(self, key: str, worker_id: WorkerId, incarnation: Incarnation) -> str | None:
        """Why the connection with this key cannot be that worker; None: it can."""
        if self._owners is None:
            return None
        owner = self._owners.get(key)
        if owner is None:
            return f"{worker_id} is not in the directory"
        if owner.worker_id != worker_id:
            return f"{worker_id} came with the key of another worker, {owner.worker_id}"
        if owner.incarnation != incarnation:
            return f"{worker_id} came with the key of another of its processes"
        return None
