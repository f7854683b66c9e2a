"""The proxy's process in a simulated cluster: registry, directory, health, routing, recovery."""

import asyncio
import random
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal

import msgspec

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import CapacityError
from neuron_di.registry import Directory
from neuron_di.testing.sim_client import Client
from neuron_di.testing.sim_lane import SimLane
from neuron_di.testing.sim_legs import SimWorkers
from neuron_di.testing.sim_registry import AnyAddress, SimRegistry
from neuron_di.testing.sim_worker import MODEL, PROXY, World
from neuron_di.testing.virtual_loop import Process
from neuron_di.types import RequestId
from neuron_di.wire import Finished, WorkerRecord
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.emit import Emit
from neuron_di_proxy.health import Health
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.recovery import RequestRunner
from neuron_di_proxy.route import Router
from neuron_di_proxy.self_test import PairBook, SelfTest
from neuron_di_proxy.tenant import Tenant
from neuron_di_proxy.workers import Process as WorkerProcess

SWEEP_S = 0.5
TENANTS = (Tenant(name="one"), Tenant(name="other", weight=2.0))

Lie = Literal["hidden", "stale", "misplaced"]


class LyingDirectory:
    """A directory that can be made to hide workers, or to give old or wrong records of them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._first_seen: dict[str, WorkerRecord] = {}
        self.lies: dict[str, Lie] = {}  # by worker id

    def workers(self) -> tuple[WorkerRecord, ...]:
        known = self._directory.workers()
        for record in known:
            self._first_seen.setdefault(record.worker_id, record)
        if not self.lies:
            return known
        told = (self._told(record, known) for record in known)
        return tuple(record for record in told if record is not None)

    @property
    def epoch(self) -> int:
        return self._directory.epoch

    async def wait_changed(self, epoch: int) -> int:
        return await self._directory.wait_changed(epoch)

    def vanished(self) -> Mapping[WorkerProcess, float]:
        return self._directory.vanished()

    def drop(self, record: WorkerRecord, reason: str) -> None:
        self._directory.drop(record, reason)

    def adopt(self, lost: WorkerRecord, successor: WorkerRecord) -> bool:
        return self._directory.adopt(lost, successor)

    def _told(self, record: WorkerRecord, known: tuple[WorkerRecord, ...]) -> WorkerRecord | None:
        lie = self.lies.get(record.worker_id)
        if lie == "hidden":
            return None
        if lie == "stale":
            return self._first_seen[record.worker_id]
        if lie == "misplaced":
            other = known[(known.index(record) + 1) % len(known)]
            return msgspec.structs.replace(record, api_port=other.api_port)
        return record


class SimProxy:
    """The proxy's place. Clients' requests run in its process, as tasks of their own."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.process: Process | None = None
        self.registry: SimRegistry
        self.directory: LyingDirectory | None = None
        self.runner: RequestRunner | None = None
        self._clients: list[Client] = []  # of this life
        self._self_test: SelfTest | None = None
        self.records: dict[str, RequestRecord] = {}
        self.admission: Admission

    def start(self) -> None:
        """A new process, which knows nothing of its predecessor. Nothing if one lives."""
        if self.process is not None and not self.process.is_dead:
            return
        self.registry = SimRegistry()
        self.admission = Admission(self._world.options.limits, self._num_slots)
        self.directory = self.runner = self._self_test = None
        self._clients = []
        self.process = self._world.network.spawn(PROXY)
        self.process.start(self._live(self.process))

    def kill(self) -> None:
        self._world.network.note("kill", PROXY)
        self._world.network.kill(PROXY)
        for client in self._clients:
            client.cut_off()

    def wipe_registry(self) -> None:
        """Every key and lease is gone at once, as if the registry had been restarted."""
        self._world.network.note("wipe")
        for lease in list(self.registry._leases):  # noqa: SLF001 - there is no door to this
            self.registry._drop(lease)  # noqa: SLF001

    async def _live(self, process: Process) -> None:
        world, limits = self._world, self._world.options.limits
        async with Directory(self.registry, addresses=AnyAddress()) as directory:
            self.directory = LyingDirectory(directory)
            workers = SimWorkers(
                world.network,
                process,
                world.servers,
                idle_timeout_s=limits.idle_timeout_s,
                connect_timeout_s=limits.connect_timeout_s,
            )
            pairs = PairBook()
            async with AsyncExitStack() as stack:
                health = await stack.enter_async_context(Health(workers, self.directory, limits))
                if world.options.has_self_test:
                    self._self_test = SelfTest(
                        workers, self.directory, health, limits, pairs, self._rng
                    )
                    await stack.enter_async_context(self._self_test)
                router = Router(self.directory, health, pairs, rng=self._rng)
                self.runner = RequestRunner(workers, router, health, limits, self._rng)
                await self._sweep()

    async def _sweep(self) -> None:
        """What the registry's server does: end leases, but not for its own absence."""
        swept_s = now_s()
        while True:
            await asyncio.sleep(SWEEP_S)
            self.registry.extend_all(max(0.0, now_s() - swept_s - SWEEP_S))
            swept_s = now_s()
            self.registry.expire()

    def rest(self) -> None:
        """Start nothing of its own any more: it would hold blocks again and again."""
        if self.process is not None and self._self_test is not None:
            self.process.start(self._self_test.__aexit__(None, None, None))

    def serve(self, client: Client) -> "asyncio.Task[None] | None":
        """Run a client's request. Its task ends with the client; None: nobody listens."""
        if self.process is None or self.process.is_dead:
            client.cut_off()
            return None
        self._clients.append(client)
        return self.process.start(self._serve(client))

    def _serve(self, client: Client) -> Coroutine[Any, Any, None]:
        return client.read(partial(self._answer, client))

    async def _answer(self, client: Client, emit: Emit) -> Finished:
        if self.runner is None:
            raise CapacityError("the proxy is starting")
        wanted = client.wanted
        tenant = TENANTS[wanted.tenant]
        request = ChoiceRequest(
            endpoint="completions",
            model=MODEL,
            prompt=msgspec.Raw(msgspec.json.encode(wanted.prompt_ids)),
            sampling=wanted.sampling,
            cache_scope=tenant.cache_scope,
        )
        record = RequestRecord(request_id=RequestId(client.name), model=MODEL)
        self.records[client.name] = record
        ticket = self.admission.arrive(tenant)
        try:
            ticket.take(1, 1.0)
            queue_timeout_s = self._world.options.limits.queue_timeout_s
            await ticket.turn(Deadline(record.accepted_s + queue_timeout_s))
            lane = SimLane(record, emit, is_plain=wanted.sampling.logprobs is None)
            finished = await self.runner.run(request, record, lane.emit, lane.make)
            lane.finish()
            return finished
        finally:
            ticket.close()

    def _num_slots(self) -> int:
        """Answers that the workers can compute together, as far as the directory knows."""
        known = () if self.directory is None else self.directory.workers()
        return sum(record.slots for record in known if record.role != "prefill")
