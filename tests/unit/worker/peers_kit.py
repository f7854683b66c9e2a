"""Workers that announce themselves in one registry and follow it, each as its process would."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from worker_kit import make_worker

from neuron_di.registry import EmbeddedRegistry, LeaseId
from neuron_di.types import Role
from neuron_di.wire import WorkerRecord, encode_json
from neuron_di.worker import Worker
from neuron_di.worker.peers import following_peers

_ports = count(20_000)  # nobody listens there: these tests talk to workers directly


class Town:
    """A registry and the workers that live by it."""

    def __init__(self, folder: Path) -> None:
        self.registry = EmbeddedRegistry()
        self._folder = folder

    def make(self, role: Role, worker_id: str, **fields: Any) -> Worker:
        worker = make_worker(self._folder, role, worker_id=worker_id, **fields)
        worker.api_port = next(_ports)
        return worker

    async def announce(
        self, record: WorkerRecord, lease: LeaseId | None = None, **fields: Any
    ) -> LeaseId:
        record = msgspec.structs.replace(record, **fields)
        lease = lease or await self.registry.grant(60.0)
        await self.registry.put(record.key(), encode_json(record), lease)
        return lease

    @asynccontextmanager
    async def living(self, role: Role, worker_id: str, **fields: Any) -> AsyncIterator[Worker]:
        """A worker from its start to its end: announced, following, drained, withdrawn."""
        worker = self.make(role, worker_id, **fields)
        try:
            async with following_peers(worker, self.registry):
                lease = await self.announce(worker.record())
                try:
                    yield worker
                finally:
                    await self.announce(worker.record(), lease, state="draining")
                    await self.registry.revoke(lease)
        finally:
            await worker.close()
