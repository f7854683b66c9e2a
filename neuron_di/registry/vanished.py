"""Workers whose key is gone from the registry, though nobody found that they are gone, too."""

from collections.abc import Iterator
from dataclasses import dataclass

from neuron_di.clock import now_s
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import WorkerRecord

RIVALS_MAX = 2

# One life of a worker. After a restart it is another process.
Process = tuple[WorkerId, Incarnation]


def process_of(record: WorkerRecord) -> Process:
    """The process that a record describes."""
    return record.worker_id, record.incarnation


@dataclass(slots=True)
class _Vanished:
    record: WorkerRecord
    since_s: float
    counted_s: float = 0.0  # of the time since then, what `pass_time` was told


class VanishedWorkers:
    """Each by its process, and by the key that it had: of a key, the latest RIVALS_MAX workers."""

    def __init__(self) -> None:
        self._by_process: dict[Process, _Vanished] = {}
        self._at_key: dict[str, list[Process]] = {}

    def __len__(self) -> int:
        return len(self._by_process)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return (vanished.record for vanished in self._by_process.values())

    def add(self, record: WorkerRecord) -> None:
        key, process = record.key(), process_of(record)
        self.discard(process)
        self.discard_lives(record)
        rivals = self._at_key.get(key, [])
        if len(rivals) >= RIVALS_MAX:
            self.discard(rivals[0])
        self._by_process[process] = _Vanished(record, now_s())
        self._at_key.setdefault(key, []).append(process)

    def discard(self, process: Process) -> WorkerRecord | None:
        """The record that is not kept any more; None where none was."""
        vanished = self._by_process.pop(process, None)
        if vanished is None:
            return None
        key = vanished.record.key()
        self._at_key[key].remove(process)
        if not self._at_key[key]:
            del self._at_key[key]
        return vanished.record

    def discard_lives(self, record: WorkerRecord) -> None:
        """Keep no process of this worker at this key: it has gone on in another one."""
        for process in list(self._at_key.get(record.key(), ())):
            if process[0] == record.worker_id:
                self.discard(process)

    def get(self, process: Process) -> WorkerRecord | None:
        vanished = self._by_process.get(process)
        return None if vanished is None else vanished.record

    def ages_s(self) -> dict[Process, float]:
        now = now_s()
        return {process: now - each.since_s for process, each in self._by_process.items()}

    def pass_time(self, duration_s: float, keep_s: float) -> list[WorkerRecord]:
        """Count this time. Who has been kept for `keep_s` of it."""
        for vanished in self._by_process.values():
            vanished.counted_s += duration_s
        return [each.record for each in self._by_process.values() if each.counted_s >= keep_s]
