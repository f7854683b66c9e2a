"""One place for a worker in a simulated cluster: real workers live, die and are restarted here."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from neuron_di.config import WorkerOptions
from neuron_di.core import BlockCount
from neuron_di.engine import Engine
from neuron_di.errors import LocalProtocolError
from neuron_di.registry import Announcer, EmbeddedRegistry
from neuron_di.testing.fake_model import EOS_ID, FakeBackend, FakePool, FakeTokenizer
from neuron_di.testing.fake_transfer import Fabric, FakeTransferEngine
from neuron_di.testing.network import Network
from neuron_di.testing.sim_failure import Failure, Kind
from neuron_di.testing.sim_legs import Server
from neuron_di.testing.sim_link import SignalNetwork, SimTransport
from neuron_di.testing.sim_options import ClusterOptions
from neuron_di.testing.sim_rpc import SimRegistryClient
from neuron_di.testing.virtual_loop import Process
from neuron_di.testing.workload import CONTEXT_TOKENS
from neuron_di.types import Incarnation, Role
from neuron_di.worker import LoadedModel, Worker
from neuron_di.worker.worker import WorkerParts

MODEL = "fake"
HOST = "sim"
PROXY = "proxy"
ANNOUNCE_TTL_S = 6.0
TURNS_PER_CHECK = 8  # block by block; their sum is checked after each

_TOKENIZER = FakeTokenizer()


@dataclass(slots=True)
class World:
    """What all processes of one simulation share."""

    network: Network
    signals: SignalNetwork
    fabric: Fabric
    options: ClusterOptions
    servers: dict[tuple[str, int], Server]
    registry_of: Callable[[], EmbeddedRegistry]
    failures: list[Failure]  # what must never happen, and did

    def fail(self, kind: Kind, text: str, request: str = "") -> None:
        self.failures.append(Failure(kind, self.network.loop.now_s, text, request))


class SimWorker:
    """A worker's place: its name, its ports, and whoever lives there now."""

    def __init__(self, world: World, role: Role, number: int, port: int) -> None:
        self.role: Role = role
        self.name = f"{role}-{number}"
        self.address = (HOST, port)
        self.num_lives = 0
        self.worker: Worker | None = None
        self.process: Process | None = None
        self._thawed_s = 0.0
        self._world = world
        self._signal_port = world.signals.free_port() if role == "prefill" else 0

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
            self.worker = None

    def freeze(self) -> None:
        if self.process is not None and self.is_alive:
            self._world.network.note("freeze", self.name)
            self.process.freeze()

    def thaw(self) -> None:
        if self.process is not None and self.process.is_frozen:
            self._world.network.note("thaw", self.name)
            self._thawed_s = self._world.network.loop.now_s
            self.process.thaw()

    async def _live(self, process: Process) -> None:
        world, options = self._world, self._world.options
        incarnation = Incarnation(f"{self.name}.life{self.num_lives}")
        driver = _EngineDriver(world, process)

        def make_transfer(pool: object) -> FakeTransferEngine:
            assert isinstance(pool, FakePool)
            return FakeTransferEngine(
                world.fabric, process, pool, is_two_sided=options.is_two_sided
            )

        worker = Worker(
            WorkerOptions(
                model=MODEL,
                role=self.role,
                worker_id=self.name,
                host=HOST,
                port=self.address[1],
                signal_port=self._signal_port,
                hand_over=options.hand_over,
                engine=replace(options.engine, num_blocks=options.num_blocks),
            ),
            self._model(incarnation),
            WorkerParts(
                make_transfer=make_transfer,
                make_transport=lambda: SimTransport(world.signals, process),
                start_engine=driver.start,
                notify_engine=driver.notify,
            ),
        )
        worker.set_state("ready")
        self.worker = worker
        world.servers[self.address] = Server(process, worker, self._crashed)
        registry = SimRegistryClient(world.network, process, PROXY, world.registry_of)
        async with Announcer(registry, worker.record, ttl_s=ANNOUNCE_TTL_S):
            await asyncio.get_running_loop().create_future()  # for ever

    def _model(self, incarnation: Incarnation) -> LoadedModel:
        options = self._world.options
        return LoadedModel(
            name=MODEL,
            digest="fake-model",
            incarnation=incarnation,
            context_tokens=CONTEXT_TOKENS,
            eos_token_ids=(EOS_ID,),
            tokenizer=_TOKENIZER,
            backend=FakeBackend(
                block_size=options.engine.block_size,
                num_blocks=options.num_blocks,
                incarnation=incarnation,
                faults=self._world.network.faults,
            ),
        )

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
