"""The last-known set of workers, as the registry tells it.

A vanished key is suspicion, not death: a registry that was wiped, or stood still for longer than
its leases last, deletes the key of every living worker at once. A worker whose key vanished stays
in the view, until

    it had said that it drains      at once: it went as it said
    who probes it says `drop`       at once: it is down, frozen, or somebody else
    its process has another key     at once: that one counts
    its successor has its key       at once: a process of the same name
    its key is there again          it had not gone
    nobody says anything            after `keep_s`, of time in which the registry was reachable

Nor does a worker leave the view because another one, of another name, has put a record at its
key: both are in it until somebody has found out which of them is at that address.

While the registry cannot be reached nobody can announce a new process. A worker that was restarted
at its address is known by its own answer then (`adopt`), until the registry says who is there:
its predecessor's record, which the registry may still have, says nothing.

Nor is a present key life: who routes by a directory probes as well.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Self

from neuron_di.clock import now_s
from neuron_di.config import WorkerAddressOptions
from neuron_di.obs import LimitedLogger
from neuron_di.registry.embedded import KEYS_MAX
from neuron_di.registry.record_reader import Fault, RecordReader, RefusedRecord
from neuron_di.registry.registry import (
    KeyChanged,
    KeyDeleted,
    RegistryEvent,
    Snapshot,
    WatchableRegistry,
)
from neuron_di.registry.replaced import ReplacedProcesses
from neuron_di.registry.supervised import Supervised
from neuron_di.registry.vanished import Process, VanishedWorkers, process_of
from neuron_di.wire import WorkerRecord, encode_json

_log = LimitedLogger(__name__)

WORKERS_PREFIX = "/workers/"
KEEP_S = 30.0  # at least; who lives has announced itself again after a third of its lease
KEEP_LEASES = 3
DROPPED_MAX = 16  # workers that are still named after they were dropped
_LOOK_INTERVAL_S = 1.0  # for workers that were kept for long enough
_READ_PER_TURN = 256  # values of a large snapshot, until other callbacks of the loop run


class Directory:
    """Follows a registry while entered. Read from the same event loop.

    `epoch` counts the changes of the view. `ignored` counts keys that are no record of a worker
    this version understands, by what was wrong: they have no worker. `addresses` says where
    workers may be.
    """

    def __init__(
        self,
        registry: WatchableRegistry,
        *,
        addresses: WorkerAddressOptions | None = None,
        keep_s: float = KEEP_S,
    ) -> None:
        self._registry = registry
        self._reader = RecordReader(addresses or WorkerAddressOptions())
        self._keep_s = keep_s
        self._present: dict[str, WorkerRecord] = {}  # by key, the one that changed last comes last
        self._num_keys: Counter[Process] = Counter()  # of those that are present
        self._vanished = VanishedWorkers()
        self._replaced = ReplacedProcesses(keep_s)
        self._has_snapshot = False
        self._dropped: deque[RefusedRecord] = deque(maxlen=DROPPED_MAX)
        self._view: tuple[WorkerRecord, ...] | None = ()  # None: it is to be made anew
        self._changed = asyncio.Event()  # set at the next change, and replaced by a fresh one
        self._following = Supervised("directory", self._follow)
        self._timer: asyncio.TimerHandle | None = None  # while a worker has vanished
        self._looked_s = 0.0
        self.epoch = 0

    @property
    def ignored(self) -> Counter[Fault]:
        return self._reader.num_refused

    @property
    def num_ignored(self) -> int:
        return self.ignored.total()

    def workers(self) -> tuple[WorkerRecord, ...]:
        """Every worker, sorted by key. The same object until something changes."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def vanished(self) -> dict[Process, float]:
        """The workers of the view whose key is gone, and for how many seconds."""
        return self._vanished.ages_s()

    def remember(self, records: Iterable[WorkerRecord]) -> None:
        """Begin with whom another directory knew, as if their keys had vanished.

        Nothing happens where the registry has said already who is there.
        """
        if self._has_snapshot:
            return
        for record in filter(self._may_keep, records):
            self._vanished.add(record)
        if self._vanished:
            _log.info("workers_remembered", num=len(self._vanished))
            self._look_later()
            self._note_change()

    def drop(self, record: WorkerRecord, reason: str) -> None:
        """Whoever probes found that this process is gone. It leaves the view if its key has."""
        vanished = self._vanished.discard(process_of(record))
        if vanished is not None:
            self._note_dropped(vanished, reason)

    def adopt(self, lost: WorkerRecord, successor: WorkerRecord) -> bool:
        """Whoever probes found another process at the address of one that it knew.

        It takes the other's place, if the registry cannot tell of it now, and it is the same
        worker after a restart: of the same name, role and model, at the same key.
        """
        key = lost.key()
        known = self._present.get(key)
        if known is None or process_of(known) != process_of(lost):
            known = self._vanished.get(process_of(lost))
        if (
            not self._registry.trouble()
            or known is None
            or not is_restart_of(successor, lost)
            or self._reader.read(key, encode_json(successor)) is None
        ):
            return False
        _log.info("successor_adopted", worker=lost.worker_id, key=key)
        self._replaced.add(key, process_of(lost))
        self._put(key, successor)
        return True

    def refused(self) -> list[RefusedRecord]:
        """Who is left out and why, by name: records, and workers that were dropped lately."""
        return [*self._reader.refused(), *self._dropped]

    def num_ignored_by_fault(self) -> Mapping[str, int]:
        """How many keys were left out since the start, by what was wrong with them.

        Those that the registry left out, as no worker's or one too many, were not read here.
        """
        counts = {str(fault): num for fault, num in self.ignored.items()}
        if self._registry.num_dropped:
            counts["unread"] = self._registry.num_dropped
        return counts

    def trouble(self) -> str:
        """Why the view may be old; empty while all is well."""
        return self._following.trouble() or self._registry.trouble()

    async def wait_changed(self, epoch: int) -> int:
        """Wait until the view is newer than `epoch`. Returns its epoch."""
        while self.epoch <= epoch:
            await self._changed.wait()
        return self.epoch

    async def __aenter__(self) -> Self:
        await self._following.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._following.__aexit__()
        if self._timer is not None:
            self._timer.cancel()

    async def _follow(self) -> None:
        async for event in self._registry.watch(WORKERS_PREFIX):
            await self._apply(event)

    async def _apply(self, event: RegistryEvent) -> None:
        match event:
            case Snapshot():
                await self._replace(event.values)
            case KeyChanged():
                record = self._reader.read(event.key, event.value)
                if record is not None and not self._has_room(event.key, self._present):
                    self._refuse_one_more(event.key, record)
                    record = None
                if record is None:
                    self._replaced.forget(event.key)
                    self._remove(event.key)
                elif self._replaced.is_old(event.key, process_of(record)):
                    pass
                elif record != self._present.get(event.key):
                    self._put(event.key, record)
            case KeyDeleted():
                self._reader.forget(event.key)
                self._replaced.forget(event.key)
                self._remove(event.key)

    async def _replace(self, values: Mapping[str, bytes]) -> None:
        """Take a snapshot. Until all of it is read, the view is what it was."""
        self._reader.forget_all()
        present: dict[str, WorkerRecord] = {}
        # Who is known goes first: nobody is driven out by a flood of further keys.
        keys = [key for key in self._present if key in values]
        keys += sorted(values.keys() - self._present.keys())
        for number, key in enumerate(keys, start=1):
            if number % _READ_PER_TURN == 0:
                await asyncio.sleep(0)
            record = self._reader.read(key, values[key])
            if record is None:
                continue
            if self._has_room(key, present):
                present[key] = record
            else:
                self._refuse_one_more(key, record)
        self._reader.all_read()
        for key in self._present.keys() - present.keys():
            self._replaced.forget(key)
            self._remove(key)
        for key, record in present.items():
            is_old = self._replaced.is_old(key, process_of(record))
            if not is_old and record != self._present.get(key):
                self._put(key, record)
        self._has_snapshot = True

    def _has_room(self, key: str, present: Mapping[str, WorkerRecord]) -> bool:
        return key in present or len(present) < KEYS_MAX

    def _refuse_one_more(self, key: str, record: WorkerRecord) -> None:
        reason = f"{KEYS_MAX} workers are known, the limit"
        self._reader.refuse(key, "too many", reason, record.worker_id)

    def _put(self, key: str, record: WorkerRecord) -> None:
        former = self._take_out(key)
        self._present[key] = record
        self._num_keys[process_of(record)] += 1
        self._vanished.discard_lives(record)
        self._vanished.discard(process_of(record))
        if former is not None and former.worker_id != record.worker_id:
            words = f"{record.worker_id} has put a record at its key"
            self._keep(former, words)
        elif former is not None and record.started_unix_s < former.started_unix_s:
            self._keep(former, "its key tells of a former process, as of a restored registry")
        if self._dropped:
            others = [each for each in self._dropped if each.worker_id != record.worker_id]
            self._dropped = deque(others, DROPPED_MAX)
        self._note_change()

    def _remove(self, key: str) -> None:
        """A key is gone, or has no worker any more."""
        record = self._take_out(key)
        if record is None:
            return
        self._keep(record, "its key is gone")
        self._note_change()

    def _keep(self, record: WorkerRecord, reason: str) -> None:
        """Keep a worker whose key is not its own any more, if it may live and there is room."""
        if self._may_keep(record):
            self._vanished.add(record)
            _log.warning("worker_vanished", worker=record.worker_id, reason=reason)
            self._look_later()

    def _may_keep(self, record: WorkerRecord) -> bool:
        has_room = len(self._present) + len(self._vanished) < KEYS_MAX
        has_left = record.state == "draining" or process_of(record) in self._num_keys
        return self._keep_s > 0 and has_room and not has_left

    def _take_out(self, key: str) -> WorkerRecord | None:
        record = self._present.pop(key, None)
        if record is not None:
            process = process_of(record)
            self._num_keys[process] -= 1
            if not self._num_keys[process]:
                del self._num_keys[process]
        return record

    def _look_later(self) -> None:
        if self._timer is None:
            self._looked_s = now_s()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_LOOK_INTERVAL_S, self._look)

    def _look(self) -> None:
        """Drop who has vanished for too long: by time in which it could have come back."""
        self._timer = None
        passed_s = min(now_s() - self._looked_s, 2 * _LOOK_INTERVAL_S)  # not what we stood still
        counted_s = 0.0 if self._registry.trouble() else passed_s
        for record in self._vanished.pass_time(counted_s, self._keep_s):
            self.drop(record, f"its key has been gone for {self._keep_s:.0f} s")
        if self._vanished:
            self._look_later()

    def _note_dropped(self, record: WorkerRecord, reason: str) -> None:
        _log.warning("worker_dropped", worker=record.worker_id, reason=reason)
        self._dropped.append(RefusedRecord(record.key(), record.worker_id, reason))
        self._note_change()

    def _note_change(self) -> None:
        self._view = None
        self.epoch += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _make_view(self) -> tuple[WorkerRecord, ...]:
        # A process that changes its role has two keys for a while: the later one counts.
        last = {process_of(record): record for record in self._vanished}
        for record in self._present.values():
            last[process_of(record)] = record
        return tuple(sorted(last.values(), key=_place_in_view))


def _place_in_view(record: WorkerRecord) -> tuple[str, str]:
    return record.key(), record.worker_id


def is_restart_of(successor: WorkerRecord, lost: WorkerRecord) -> bool:
    """Whether this is the same worker in another process: what others go by has not changed.

    Not where a key would have to be believed: a prefill worker lets in those that the registry
    has. So a decode worker with a fresh one has to wait for it, and a prefill worker, which knows
    nobody yet.
    """
    return (
        successor.incarnation != lost.incarnation
        and successor.state == "ready"
        and (successor.role == "both" or successor.signal_key is None)
        and all(
            getattr(successor, name) == getattr(lost, name)
            for name in (
                "worker_id", "role", "host", "api_port", "signal_host", "model", "model_digest",
                "layout_digest", "numerics", "transfer",
            )
        )
    )  # fmt: skip


def keep_s_for(ttl_s: float) -> float:
    """How long to keep a worker whose key vanished, where its lease lasted `ttl_s`."""
    return max(KEEP_S, KEEP_LEASES * ttl_s)
