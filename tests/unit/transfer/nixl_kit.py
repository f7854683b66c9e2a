"""Two workers whose devices are read by NIXL, in one process, connected as a handshake does it."""

import importlib
import itertools
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np
from contract import nixl_end
from contract.numbered_blocks import NumberedBlocks
from contract.transfer_pair import Outcome

from neuron_di.kv import KvLayout, whole_block_runs
from neuron_di.transfer import BlockSource, Receive, nixl_agent
from neuron_di.types import Incarnation

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")
NUM_BLOCKS = 6
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
UNTOUCHED = 0xEE


@dataclass
class End:
    """A worker: its pool, its engine, its blocks by number."""

    pool: nixl_end.HostDevicePool
    engine: object
    blocks: NumberedBlocks = field(init=False)

    def __post_init__(self):
        self.blocks = NumberedBlocks(self.pool)


@dataclass
class Two:
    prefill: End
    decode: End
    tags: object = field(default_factory=itertools.count)

    def accept(self):
        """What the prefill worker tells then."""
        layout = self.decode.pool.layout
        self.prefill.engine.accept(DECODE, self.decode.engine.local_region(PREFILL), layout)
        return self.prefill.engine.local_region(DECODE)

    def connect(self, region=None):
        region = self.accept() if region is None else region
        self.decode.engine.connect(PREFILL, region, self.decode.pool.layout)

    def receive(self, sources, numbers, num_tokens=None):
        return Receive(
            tag=next(self.tags),
            runs=whole_block_runs(LAYOUT, sources, numbers),
            memory=self.decode.pool.memory(),
            source=BlockSource(list(sources), self.prefill.pool.generations(sources)),
            block_ids=list(numbers),
            num_tokens=num_tokens,
        )

    def post(self, receive):
        token = self.decode.engine.post_receive(PREFILL, receive)
        return Outcome(self.decode.engine, receive, token, lambda _: None)

    def move(self, sources, numbers, num_tokens=None):
        return self.post(self.receive(sources, numbers, num_tokens))


@contextmanager
def one_end(incarnation, engine=None, **pool_fields):
    with ExitStack() as stack:
        pool = stack.enter_context(
            closing(nixl_end.make_pool(LAYOUT, NUM_BLOCKS, incarnation, **pool_fields))
        )
        made = stack.enter_context(closing(nixl_end.make_engine(pool, **(engine or {}))))
        yield End(pool, made)


@contextmanager
def two_ends(*, is_connected=True, prefill=None, decode=None, engine=None):
    """`prefill` and `decode` are how their pools are made, `engine` how both engines are."""
    with ExitStack() as stack:
        ends = [
            stack.enter_context(one_end(incarnation, engine, **(fields or {})))
            for incarnation, fields in ((PREFILL, prefill), (DECODE, decode))
        ]
        two = Two(*ends)
        shape = two.prefill.blocks[:].shape
        two.prefill.blocks[:] = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        two.decode.blocks[:] = UNTOUCHED
        if is_connected:
            two.connect()
        yield two


def used(block, num_tokens):
    """The bytes of a block's first tokens: [rows, bytes]."""
    rows = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads
    return block.reshape(rows, LAYOUT.block_size, -1)[:, :num_tokens]


@dataclass
class Asked:
    """A read, as NIXL was asked for it: own and the peer's [runs, 3], and of which agent."""

    reader: str
    agent: str
    own: np.ndarray
    peers: np.ndarray


class Native:
    """An agent of NIXL's own, for a test to change."""

    def __init__(self, name, config):
        self.name, self._agent = name, real_nixl().nixlAgent(name, config)

    def __getattr__(self, name):
        return getattr(self._agent, name)


def real_nixl():
    return importlib.import_module("nixl_cu12._bindings")


def use_native(monkeypatch, native):
    """Agents that are opened from now on are of this class."""
    module = ModuleType("nixl")
    vars(module).update(vars(nixl_agent.load_nixl()), nixlAgent=native)
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: module)


def record_reads(monkeypatch):
    """Every read that is asked of NIXL from now on, of new agents, in order."""
    asked = []

    class Recording(Native):
        def createXferReq(self, kind, own, peers, agent):
            asked.append(Asked(self.name, agent, *map(rows_in, (own, peers))))
            return self._agent.createXferReq(kind, own, peers, agent)

    use_native(monkeypatch, Recording)
    return asked


def rows_in(descriptors):
    return np.array([descriptors[n][:3] for n in range(descriptors.descCount())], np.int64)
