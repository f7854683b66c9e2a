"""The last-known set of workers, as the registry tells it."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from neuron_di.errors import RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.registry.registry import (
    KeyChanged,
    KeyDeleted,
    RegistryEvent,
    Snapshot,
    WatchableRegistry,
)
from neuron_di.wire import PROTOCOL_VERSION, WorkerRecord, record_decoder

_log = get_logger(__name__)

WORKERS_PREFIX = "/workers/"


class Directory:
    """Follows a registry while entered. Read from the same event loop.

    `epoch` counts the changes of the view. `num_ignored` counts values that are no record of
    a worker this version understands: their key has no worker.
    """

    def __init__(self, registry: WatchableRegistry) -> None:
        self._registry = registry
        self._workers: Mapping[str, WorkerRecord] = {}
        self._view: tuple[WorkerRecord, ...] = ()
        self._changed = asyncio.Event()  # set at the next change, and replaced by a fresh one
        self.epoch = 0
        self.num_ignored = 0

    def workers(self) -> tuple[WorkerRecord, ...]:
        """Every worker, sorted by key. The same object until something changes."""
        return self._view

    async def wait_changed(self, epoch: int) -> int:
        """Wait until the view is newer than `epoch`. Returns its epoch."""
        while self.epoch <= epoch:
            await self._changed.wait()
        return self.epoch

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()  # it had failed, which is our own bug: show it

    async def _follow(self) -> None:
        async for event in self._registry.watch(WORKERS_PREFIX):
            self._apply(event)

    def _apply(self, event: RegistryEvent) -> None:
        match event:
            case Snapshot():
                workers = self._records(event.values)
            case KeyChanged():
                others = {key: each for key, each in self._workers.items() if key != event.key}
                workers = others | self._records({event.key: event.value})
            case KeyDeleted():
                workers = {key: each for key, each in self._workers.items() if key != event.key}
        if workers != self._workers:
            self._workers = workers
            self._view = tuple(workers[key] for key in sorted(workers))
            self.epoch += 1
            self._changed.set()
            self._changed = asyncio.Event()

    def _records(self, values: Mapping[str, bytes]) -> dict[str, WorkerRecord]:
        records: dict[str, WorkerRecord] = {}
        for key, value in values.items():
            try:
                record = record_decoder.decode(value)
                if record.key() != key:
                    raise RemoteProtocolError(f"the record belongs at {record.key()}")
                if record.protocol_version != PROTOCOL_VERSION:
                    raise RemoteProtocolError(f"protocol version {record.protocol_version}")
            except RemoteProtocolError as error:
                self.num_ignored += 1
                _log.warning("record_ignored", key=key, reason=error.message)
                continue
            records[key] = record
        return records
