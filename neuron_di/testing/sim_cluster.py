"""One simulated cluster: a proxy, workers and clients on one virtual clock, from one seed."""

import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, field

from neuron_di.engine import Key
from neuron_di.errors import Preempted
from neuron_di.testing.fake_handover import FakeArena, FakeArenaPool
from neuron_di.testing.fake_model import fake_layout
from neuron_di.testing.fake_transfer import Fabric
from neuron_di.testing.faults import Faults
from neuron_di.testing.network import Network
from neuron_di.testing.sim_client import Client
from neuron_di.testing.sim_link import SignalNetwork, SimTransport
from neuron_di.testing.sim_options import ClusterOptions
from neuron_di.testing.sim_proxy import SimProxy
from neuron_di.testing.sim_worker import SimWorker, World
from neuron_di.testing.virtual_loop import VirtualLoop
from neuron_di.wire.handoff import ReceiverState
from neuron_di.worker import Worker

FIRST_PORT = 8001
CANCEL_S = 2.0  # from a request's end until no worker works on it
CALLBACKS_MAX = 3_000_000


@dataclass(slots=True)
class Tally:
    """What came of some runs. Addable."""

    num_seeds: int = 0
    num_requests: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_cut_off: int = 0
    num_continued: int = 0
    num_retried: int = 0
    num_preempted: int = 0
    prefixes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_callbacks: int = 0
    virtual_s: float = 0.0

    def add(self, other: "Tally") -> None:
        self.num_seeds += other.num_seeds
        self.num_requests += other.num_requests
        self.num_completed += other.num_completed
        self.num_cancelled += other.num_cancelled
        self.num_cut_off += other.num_cut_off
        self.num_continued += other.num_continued
        self.num_retried += other.num_retried
        self.num_preempted += other.num_preempted
        self.prefixes += other.prefixes
        self.errors += other.errors
        self.faults += other.faults
        self.num_callbacks += other.num_callbacks
        self.virtual_s += other.virtual_s


def _asked_by(worker: Worker) -> list[Key]:
    """The hand-overs that a decode worker asks for, or holds at its peer."""
    connector = worker._connector  # noqa: SLF001 - what a leak is, is inside
    if connector is None:
        return []
    waiting = (ReceiverState.ASKING, ReceiverState.HELD)
    return [
        key
        for buffer in connector.buffers()
        for key, entry in buffer._entries.items()  # noqa: SLF001
        if entry.state in waiting
    ]


def _kept_by(worker: Worker, name: str) -> list[str]:
    """Hand-overs, leases and links that a worker's buffers still know."""
    connector = worker._connector  # noqa: SLF001 - what a leak is, is inside
    if connector is None:
        return []
    found = []
    buffers = connector.buffers()
    if num_entries := sum(len(buffer._entries) for buffer in buffers):  # noqa: SLF001
        found.append(f"{name}: {num_entries} hand-overs in its RecvBuffers")
    sender = connector._send_buffer  # noqa: SLF001
    if sender is not None and sender.lookup_dict:
        found.append(f"{name}: {len(sender.lookup_dict)} hand-overs in its SendBuffer")
    connector.landing.check_integrity()
    if connector.landing.num_bytes_asked:
        found.append(f"{name}: {connector.landing.num_bytes_asked} bytes of landing memory taken")
    transport = connector._transport  # noqa: SLF001
    assert isinstance(transport, SimTransport)
    num_used = sum(not buffer.is_broken for buffer in buffers) + (sender is not None)
    if transport.num_open != num_used:
        found.append(f"{name}: {transport.num_open} links are open, {num_used} are used")
    return found


class Cluster:
    """Everything of one run. Drop it within `virtual_loop.silenced`."""

    def __init__(self, rng: random.Random, options: ClusterOptions, faults: Faults) -> None:
        self.rng = rng
        self.options = options
        self.faults = faults
        self.loop = VirtualLoop(  # type: ignore[abstract]  # of typeshed only
            executor_delay_s=lambda: rng.random() * 0.002, callbacks_max=CALLBACKS_MAX
        )
        self.network = Network(self.loop, faults, rng)
        self.network.latency_s_mean = options.latency_s
        layout = fake_layout(options.engine.block_size)
        self.world = World(
            network=self.network,
            signals=SignalNetwork(self.network),
            fabric=Fabric(self.network),
            arena=FakeArena(self.network, layout) if options.has_arena else None,
            options=options,
            servers={},
            registry_of=lambda: self.proxy.registry,
            failures=[],
            prefixes=Counter(),
        )
        self.clients: list[Client] = []
        self.proxy: SimProxy
        self.workers: list[SimWorker] = []

    def start(self) -> None:
        """Start every process. Called on the running loop."""
        self.proxy = SimProxy(self.world, self.rng)
        self.proxy.start()
        counts: Counter[str] = Counter()
        for index, role in enumerate(self.options.roles):
            place = SimWorker(self.world, role, counts[role], FIRST_PORT + index)
            counts[role] += 1
            self.workers.append(place)
            place.start()

    def close(self) -> None:
        self.loop.close()
        if self.world.arena is not None:
            self.world.arena.close()

    def check_later(self, request: str) -> None:
        """This request has ended: look in a while whether everybody knows."""
        self.loop.call_later(CANCEL_S, self.check_cancelled, request, context=Context())

    def check_cancelled(self, request: str) -> None:
        """A request that ended a while ago has no leg any more, on any worker that runs."""
        for place in self.workers:
            if place.worker is None or not place.runs_since(self.loop.now_s - CANCEL_S):
                continue
            busy = [key for key in place.worker.legs._queues if key[0] == request]  # noqa: SLF001
            busy += [key for key in _asked_by(place.worker) if key[0] == request]
            if busy:
                words = f"{place.name} works on {busy}, {CANCEL_S} s after its end"
                self.world.fail("leaked", words, request)

    def leftovers(self) -> list[str]:
        """What the living workers still hold, although no request is there any more."""
        found: list[str] = []
        for place in self.workers:
            worker = place.worker
            if worker is None or not place.is_alive:
                continue
            status = worker.status()
            if status.num_blocks_free != status.num_blocks - status.num_blocks_cached:
                found.append(
                    f"{place.name}: {status.num_blocks_free} of {status.num_blocks} blocks free "
                    f"({status.num_blocks_running} running, {status.num_blocks_parked} parked, "
                    f"{status.num_blocks_receiving} receiving, "
                    f"{status.num_blocks_quarantined} quarantined)"
                )
            if status.num_blocks_cached and self._keeps_nothing(worker):
                found.append(f"{place.name}: keeps {status.num_blocks_cached} blocks")
            found += _kept_by(worker, place.name)
            pool = worker._model.backend.pool  # noqa: SLF001 - what a leak is, is inside
            if isinstance(pool, FakeArenaPool) and (doubts := pool.doubts()):
                found.append(f"{place.name}: blocks {doubts} are another worker's, too")
            busy = (status.num_waiting, status.num_running, status.num_transferring)
            if len(worker.legs) or any(busy):
                found.append(f"{place.name}: {len(worker.legs)} legs, requests {busy}")
        found += self._left_in_registry()
        admission = self.proxy.admission
        if any((admission.num_running, admission.num_waiting, admission.num_places)):
            found.append(
                f"proxy: {admission.num_running} requests run in {admission.num_places} places, "
                f"{admission.num_waiting} wait"
            )
        return found

    def _keeps_nothing(self, worker: Worker) -> bool:
        return self.options.engine.prefix_cache == "off" or worker.record().role == "decode"

    def _left_in_registry(self) -> list[str]:
        """Keys of workers that are not there any more, and leases that nobody has."""
        entries, leases = self.proxy.registry._entries, self.proxy.registry._leases  # noqa: SLF001
        living = {place.worker.record().key() for place in self.workers if place.worker is not None}
        found = [f"registry: {key} is of nobody" for key in entries if key not in living]
        if len(leases) > len(living):
            found.append(f"registry: {len(leases)} leases for {len(living)} workers")
        return found

    def tally(self) -> Tally:
        tally = Tally(num_seeds=1, num_requests=len(self.clients))
        for client in self.clients:
            tally.num_completed += client.outcome == "completed"
            tally.num_cancelled += client.outcome == "cancelled"
            tally.num_cut_off += client.outcome == "cut off"
            if client.failed is not None:
                tally.errors[client.failed.code] += 1
        for record in self.proxy.records.values():
            later = record.attempts[1:]
            tally.num_continued += any(attempt.emitted for attempt in later)
            tally.num_retried += any(not attempt.emitted for attempt in later)
            tally.num_preempted += any(each.code == Preempted.code for each in record.attempts)
        tally.prefixes += self.world.prefixes
        tally.faults += self.faults.num_struck
        tally.num_callbacks = self.loop.num_callbacks
        tally.virtual_s = self.loop.now_s
        return tally
