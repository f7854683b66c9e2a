"""Two workers on simulated Neuron devices, in one process, linked as a handshake links them."""

import itertools
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from contract import nrt_end
from contract.numbered_blocks import NumberedBlocks
from contract.transfer_pair import Outcome

from neuron_di.clock import Deadline
from neuron_di.kv import KvLayout, whole_block_runs
from neuron_di.transfer import BlockSource, Receive, Send
from neuron_di.transfer.nrt_exchange import NrtTimes
from neuron_di.types import Incarnation

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=16, dtype="float32")
NUM_BLOCKS = 6
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
UNTOUCHED = 0xEE
WAIT_S = 30.0
# What each end sends and receives by: closed classes of this form, or (None) libnrt by handles.
DRIVERS = {"libnrt": {}, "torch": {PREFILL: "1", DECODE: "1"}}
MIXED = {"torch to libnrt": {PREFILL: "1"}, "libnrt to torch": {DECODE: "1"}}
_classes = {}
# Short where a test waits for it, long where it must not come in between.
TIMES = NrtTimes(grace_s=0.5, unclaimed_s=WAIT_S, close_s=5.0)


@contextmanager
def driven_by(name):
    """Pools that are made within the block: a name of DRIVERS or MIXED."""
    _classes.update((DRIVERS | MIXED)[name])
    try:
        yield name
    finally:
        _classes.clear()


def until(is_true):
    """Look again and again; TimeoutError when it is not true in time."""
    deadline, pause = Deadline.after(WAIT_S), threading.Event()
    while not is_true():
        if deadline.has_passed():
            raise TimeoutError("it never came")
        pause.wait(0.002)


def ended(token):
    """Wait for the end of a token, and say how it went."""
    event = threading.Event()
    token.on_done(lambda _: event.set())
    if not event.wait(WAIT_S):
        raise TimeoutError("it did not end")
    return token.error()


@dataclass
class End:
    """A worker: its pool, its engine, its blocks by number."""

    pool: nrt_end.SimulatedPool
    engine: object
    blocks: NumberedBlocks = field(init=False)

    def __post_init__(self):
        self.blocks = NumberedBlocks(self.pool)

    @property
    def place(self):
        return self.pool.place

    def num_calls(self, name):
        return self.place.num_calls(f"nrt_async_sendrecv_{name}")


@dataclass
class Two:
    prefill: End
    decode: End
    tags: object = field(default_factory=itertools.count)

    def link(self):
        layout = self.decode.pool.layout
        self.prefill.engine.accept(DECODE, self.decode.engine.local_region(PREFILL), layout)
        self.decode.engine.connect(PREFILL, self.prefill.engine.local_region(DECODE), layout)

    def receive(self, sources, numbers, num_tokens=None):
        return Receive(
            tag=next(self.tags),
            runs=whole_block_runs(LAYOUT, sources, numbers),
            memory=self.decode.pool.memory(),
            source=BlockSource(list(sources), self.prefill.pool.generations(sources)),
            block_ids=list(numbers),
            num_tokens=num_tokens,
        )

    def send(self, receive, **changed):
        send = Send(
            tag=receive.tag,
            runs=receive.runs,
            block_ids=receive.source.block_ids,
            exchange=receive.block_ids,
            num_tokens=receive.num_tokens,
        )
        return self.prefill.engine.post_send(DECODE, replace(send, **changed))

    def post(self, receive):
        token = self.decode.engine.post_receive(PREFILL, receive)
        return Outcome(self.decode.engine, receive, token, lambda _: None)

    def move(self, sources, numbers, num_tokens=None):
        receive = self.receive(sources, numbers, num_tokens)
        outcome = self.post(receive)
        self.send(receive)
        return outcome


@contextmanager
def one_end(incarnation, times=TIMES, engine=None, **pool_fields):
    with ExitStack() as stack:
        pool_fields = {"classes": _classes.get(incarnation), **pool_fields}
        pool = nrt_end.make_pool(LAYOUT, NUM_BLOCKS, incarnation, **pool_fields)
        stack.enter_context(closing(pool))
        made = stack.enter_context(closing(nrt_end.make_engine(pool, times, **(engine or {}))))
        yield End(pool, made)


@contextmanager
def two_ends(times=TIMES, *, is_linked=True, prefill=None, decode=None, engine=None):
    """`prefill` and `decode` are how their pools are made, `engine` how both engines are."""
    with ExitStack() as stack:
        ends = [
            stack.enter_context(one_end(incarnation, times, engine, **(fields or {})))
            for incarnation, fields in ((PREFILL, prefill), (DECODE, decode))
        ]
        two = Two(*ends)
        shape = two.prefill.blocks[:].shape
        two.prefill.blocks[:] = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        two.decode.blocks[:] = UNTOUCHED
        if is_linked:
            two.link()
        yield two


def used(block, num_tokens):
    """The bytes of a block's first tokens: [rows, bytes]."""
    rows = LAYOUT.num_layers * 2 * LAYOUT.num_kv_heads
    return block.reshape(rows, LAYOUT.block_size, -1)[:, :num_tokens]
