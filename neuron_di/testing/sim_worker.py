"""One place for a worker in a simulated cluster: real workers live, die and are restarted here."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial

from neuron_di.config import ByteSize, TransferOptions, WorkerOptions
from neuron_di.core import BlockCount
from neuron_di.engine import Engine
from neuron_di.errors import ConfigError, LocalProtocolError, NeuronDiError, WorkerFailed
from neuron_di.registry import Announcer, EmbeddedRegistry
from neuron_di.testing.fake_handover import FakeArena, FakeArenaPool, FakeHandoverEngine
from neuron_di.testing.fake_model import EOS_ID, FakeBackend, FakePool, FakeTokenizer
from neuron_di.testing.fake_transfer import Fabric, FakeTransferEngine
from neuron_di.testing.network import Network
from neuron_di.testing.sim_failure import Failure, Kind
from neuron_di.testing.sim_legs import Server
from neuron_di.testing.sim_link import SignalNetwork, SimTransport
from neuron_di.testing.sim_options import ClusterOptions
from neuron_di.testing.sim_prefixes import SimModel
from neuron_di.testing.sim_rpc import SimRegistryClient
from neuron_di.testing.virtual_loop import Process
from neuron_di.testing.workload import CONTEXT_TOKENS
from neuron_di.transfer import TransferEngine
from neuron_di.types import Incarnation, Role
from neuron_di.wire import record_decoder
from neuron_di.wire.admin import DrainOrder, PrepareRole
from neuron_di.wire.leg_link import LegKind
from neuron_di.worker import LoadedModel, Worker
from neuron_di.worker.orders import Orders
from neuron_di.worker.role_epochs import EpochParts, run_epochs
from neuron_di.worker.worker import WorkerParts

MODEL = "fake"
HOST = "sim"
PROXY = "proxy"
ANNOUNCE_TTL_S = 6.0
DRAIN_S = 60.0
TURNS_PER_CHECK = 8  # block by block; their sum is checked after each

_TOKENIZER = FakeTokenizer()


@dataclass(slots=True)
class World:
    """What all processes of one simulation share."""

    network: Network
    signals: SignalNetwork
    fabric: Fabric
    arena: FakeArena | None
    options: ClusterOptions
    servers: dict[tuple[str, int], Server]
    registry_of: Callable[[], EmbeddedRegistry]
    failures: list[Failure]  # what must never happen, and did
    prefixes: Counter[str]  # what became of KV that was kept

    def fail(self, kind: Kind, text: str, request: str = "") -> None:
        self.failures.append(Failure(kind, self.network.loop.now_s, text, request))


class SimWorker:
    """A worker's place: its name, its ports, and whoever lives there now."""

    def __init__(self, world: World, role: Role, number: int, port: int) -> None:
        self.role: Role = role
        self.name = f"{role}-{number}"
        self.address = (HOST, port)
        self.num_lives = 0
        self.worker: Worker | None = None  # while it serves
        self.orders: Orders | None = None
        self.process: Process | None = None
        self._incarnations: set[Incarnation] = set()  # of everybody who lived here
        self._thawed_s = 0.0
        self._world = world
        self._registry: SimRegistryClient  # of whoever lives here, or lived last
        self._stop: asyncio.Event  # of the process
        self._signal_port = world.signals.free_port()  # for when it is a prefill worker

    @property
    def is_alive(self) -> bool:
        return self.process is not None and not self.process.is_dead

    def runs_since(self, at_s: float) -> bool:
        """Alive, and neither frozen now nor since then."""
        process = self.process
        is_awake = process is not None and not process.is_halted
        return is_awake and self._thawed_s <= at_s

    def start(self) -> None:
        """A new process at this place, on the same ports. Nothing if one lives."""
        if not self.is_alive:
            self.num_lives += 1
            self._world.network.note("start", self.name, self.num_lives)
            self.process = self._world.network.spawn(self.name)
            self.process.start(self._live(self.process))

    def kill(self) -> None:
        if self.is_alive:
            self._world.network.note("kill", self.name)
            self._world.network.kill(self.name)
            self.worker = self.orders = None

    def freeze(self) -> None:
        if self.process is not None and self.is_alive:
            self._world.network.note("freeze", self.name)
            self.process.freeze()

    def thaw(self) -> None:
        if self.process is not None and self.process.is_frozen:
            self._world.network.note("thaw", self.name)
            self._thawed_s = self._world.network.loop.now_s
            self.process.thaw()

    def order_drain(self, timeout_s: float) -> None:
        """What `neuron-di drain` does. Nothing where nobody serves."""
        self._order(
            lambda orders, incarnation: orders.order_drain(
                DrainOrder(incarnation=incarnation, timeout_s=timeout_s)
            )
        )

    def terminate(self) -> None:
        """SIGTERM: whatever it does, it is to end."""
        if self.process is not None and self.is_alive:
            self._world.network.note("terminate", self.name)
            self.process.call_soon(self._stop.set)

    def order_role(self, role: Role, timeout_s: float) -> None:
        """What `neuron-di role` does, at once. Nothing where nobody serves, or it refuses."""

        def change(orders: Orders, incarnation: Incarnation) -> None:
            ticket = orders.prepare(PrepareRole(incarnation=incarnation, role=role))
            orders.commit(ticket.ticket, timeout_s)

        self._order(change)

    def _order(self, give: Callable[[Orders, Incarnation], object]) -> None:
        def take() -> None:
            if self.worker is not None and self.orders is not None:
                # It may be busy with an earlier order.
                with contextlib.suppress(NeuronDiError):
                    give(self.orders, self.worker.record().incarnation)

        if self.process is not None and self.is_alive:
            self._world.network.note("order", self.name)
            self.process.call_soon(take)

    async def _live(self, process: Process) -> None:
        epochs = itertools.count()

        async def assemble(role: Role) -> Worker:
            return self._assemble(process, role, next(epochs))

        self.orders = Orders(lambda _: None, drain_timeout_s=DRAIN_S)
        parts = EpochParts(
            assemble=assemble,
            listening=partial(self._listening, process),
            announced=partial(self._announced, process),
        )
        try:
            self._stop = asyncio.Event()
            await run_epochs(self.role, self.orders, parts, self._stop)
        except WorkerFailed:  # neither the new role nor the old one
            self._world.network.note("no role", self.name)
        # Nothing of a killed process runs, not even this: it ends from outside.
        self._world.network.loop.call_soon(self._ended, process, context=Context())

    def _ended(self, process: Process) -> None:
        if self.process is process:
            self.kill()

    def _assemble(self, process: Process, role: Role, epoch: int) -> Worker:
        world, options = self._world, self._world.options
        if epoch and world.network.faults.strikes("role fails"):
            raise ConfigError("an injected fault")
        incarnation = Incarnation(f"{self.name}.life{self.num_lives}.{epoch}")
        driver = _EngineDriver(world, process)
        landing = ByteSize(options.landing_bytes) if options.landing_bytes else None

        def make_transfer(pool: object) -> TransferEngine:
            if isinstance(pool, FakeArenaPool):
                return FakeHandoverEngine(world.network, process, pool)
            assert isinstance(pool, FakePool)
            return FakeTransferEngine(
                world.fabric, process, pool, is_two_sided=options.is_two_sided
            )

        return Worker(
            WorkerOptions(
                model=MODEL,
                role=role,
                worker_id=self.name,
                host=HOST,
                port=self.address[1],
                signal_port=self._signal_port,
                hand_over=options.hand_over,
                kv_transfer=TransferOptions(landing_memory=landing),
                engine=replace(
                    options.engine,
                    block_size=options.block_size(role),
                    num_blocks=options.num_blocks_of(role),
                ),
            ),
            self._model(role, incarnation),
            WorkerParts(
                make_transfer=make_transfer,
                make_transport=lambda: SimTransport(world.signals, process),
                start_engine=driver.start,
                notify_engine=driver.notify,
            ),
        )

    @contextlib.asynccontextmanager
    async def _listening(
        self, process: Process, worker: Worker, orders: Orders
    ) -> AsyncIterator[None]:
        incarnation = worker.record().incarnation
        if incarnation in self._incarnations:
            self._world.fail("bug", f"{self.name} calls two processes {incarnation}")
        self._incarnations.add(incarnation)
        server = Server(process, worker, self._crashed, self._took_late)
        self.worker, self._world.servers[self.address] = worker, server
        try:
            yield
        finally:
            self._check_drained(worker, orders)
            del self._world.servers[self.address]
            self.worker = None
            await server.close()

    @contextlib.asynccontextmanager
    async def _announced(self, process: Process, worker: Worker) -> AsyncIterator[Announcer]:
        world = self._world
        registry = SimRegistryClient(world.network, process, PROXY, world.registry_of)
        self._registry = registry
        async with Announcer(registry, worker.record, ttl_s=ANNOUNCE_TTL_S) as announcer:
            yield announcer

    def _model(self, role: Role, incarnation: Incarnation) -> LoadedModel:
        options, arena = self._world.options, self._world.arena
        return SimModel(
            counts=self._world.prefixes,
            name=MODEL,
            digest="fake-model",
            incarnation=incarnation,
            context_tokens=CONTEXT_TOKENS,
            eos_token_ids=(EOS_ID,),
            tokenizer=_TOKENIZER,
            backend=FakeBackend(
                block_size=options.block_size(role),
                num_blocks=options.num_blocks_of(role),
                incarnation=incarnation,
                faults=self._world.network.faults,
                make_pool=FakePool if arena is None else partial(arena.join, self.name),
                chunk_tokens=options.engine.chunk,
            ),
        )

    def _check_drained(self, worker: Worker, orders: Orders) -> None:
        """Who says that nothing is left has cost nobody anything by then."""
        world = self._world
        said = orders.drain.progress() if orders.drain is not None else None
        world.network.note("drained", self.name, said and said.state)
        if said is None or said.state == "draining":
            return
        blocks = worker.status()
        num_left = blocks.num_blocks - blocks.num_blocks_free - blocks.num_blocks_cached
        if said.state == "drained" and not blocks.has_failed and (len(worker.legs) or num_left):
            words = f"{self.name} drained with {len(worker.legs)} legs and {num_left} blocks"
            world.fail("lost", words)
        record = worker.record()
        entry = world.registry_of()._entries.get(record.key())  # noqa: SLF001 - no door to this
        is_there = entry is not None and str(record.incarnation).encode() in entry.value
        if said.is_withdrawn and is_there:
            world.fail("leaked", f"{self.name} drained and left its key")
        last_put = self._registry.last_put
        if last_put and record_decoder.decode(last_put).state != "draining":
            world.fail("bug", f"{self.name} drained and told nobody that it would")

    def _took_late(self, kind: LegKind) -> None:
        self._world.fail("bug", f"{self.name} took a {kind} leg while it drained")

    def _crashed(self, error: Exception) -> None:
        logging.getLogger(__name__).error("leg_crashed", exc_info=error)


class _EngineDriver:
    """Turns an engine by callbacks, each after the time that a step takes, and checks its books."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._engine: Engine | None = None
        self._is_due = False
        self._num_turns = 0

    def start(self, engine: Engine) -> None:
        self._engine = engine

    def notify(self) -> None:
        if not self._is_due:
            self._is_due = True
            network = self._world.network
            delay_s = self._world.options.step_s * network.rng.random()
            self._process.call_later(delay_s, self._turn)

    def _turn(self) -> None:
        engine = self._engine
        self._is_due = False
        if engine is None:
            return
        if engine.turn(block=False):
            self.notify()
        self._num_turns += 1
        try:
            _check_sum(engine.blocks)
            if self._num_turns % TURNS_PER_CHECK == 0:
                engine._scheduler.check_integrity()  # noqa: SLF001 - not only when it is idle
        except LocalProtocolError as error:
            self._world.fail("leaked", f"{self._process.name}: {error}")


def _check_sum(blocks: BlockCount) -> None:
    """Conservation after each turn; in words where it does not hold."""
    places = blocks.free + blocks.running + blocks.parked
    places += blocks.receiving + blocks.cached + blocks.quarantined
    if places != blocks.total:
        blocks.check()
