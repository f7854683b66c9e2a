"""Processes that a directory knows to be gone although the registry may still have their records.

A directory that adopts a successor knows more than the registry does. When the registry is heard
again, it may say the predecessor's record once more, until the successor has announced itself.
"""

from collections import deque
from dataclasses import dataclass, field

from neuron_di.clock import now_s
from neuron_di.registry.vanished import Process

LIVES_MAX = 4  # of a worker that is restarted again and again meanwhile


@dataclass(slots=True)
class _Replaced:
    processes: deque[Process] = field(default_factory=lambda: deque(maxlen=LIVES_MAX))
    heard_s: float | None = None  # when the registry first said one of them again


class ReplacedProcesses:
    """Each by the key at which another process was put in its place. As many as there are keys."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._at_key: dict[str, _Replaced] = {}

    def __len__(self) -> int:
        return len(self._at_key)

    def add(self, key: str, process: Process) -> None:
        """At this key there is another process now."""
        replaced = self._at_key.setdefault(key, _Replaced())
        replaced.processes.append(process)
        replaced.heard_s = None

    def forget(self, key: str) -> None:
        """The registry said something else of this key."""
        self._at_key.pop(key, None)

    def is_old(self, key: str, process: Process) -> bool:
        """Whether what the registry says of this key is what was so before.

        For so many seconds it is: then the successor should have announced itself.
        """
        replaced = self._at_key.get(key)
        if replaced is None:
            return False
        now = now_s()
        replaced.heard_s = now if replaced.heard_s is None else replaced.heard_s
        if process in replaced.processes and now < replaced.heard_s + self._keep_s:
            return True
        self.forget(key)
        return False
