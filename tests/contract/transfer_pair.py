"""Two workers' pools and transfer engines, connected as a handshake connects them."""

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvLayout, KvPool, Memory, Runs, create_arena, whole_block_runs
from neuron_di.transfer import (
    BlockSource,
    Receive,
    Send,
    TransferEngine,
    TransferToken,
)
from neuron_di.types import BlockId, Incarnation

from .engine_kinds import KINDS, EngineKind
from .numbered_blocks import NumberedBlocks

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 32
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
UNTOUCHED = 0xEE
WAIT_S = 30.0


def fill(blocks: NumberedBlocks) -> None:
    """The same random bytes in every process."""
    blocks[:] = random_bytes(blocks[:].shape)


def random_bytes(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


def runs_of(source: Sequence[int], destination: Sequence[int], lengths: Sequence[int]) -> Runs:
    return Runs(
        source_offsets=np.array(source, np.int64),
        destination_offsets=np.array(destination, np.int64),
        lengths=np.array(lengths, np.int64),
    )


class Outcome:
    """What becomes of a receive: waited for, made visible and final, as a worker does it.

    `on_success` is called on the thread that ended it: blocks may have changed hands.
    """

    def __init__(
        self,
        engine: TransferEngine,
        receive: Receive,
        token: TransferToken,
        on_success: Callable[[Receive], object],
    ) -> None:
        self.token = token
        self._engine = engine
        self._receive = receive
        self._on_success = on_success
        self._error: NeuronDiError | None = None
        self._ended = threading.Event()
        token.on_done(self._settle)

    def _settle(self, token: TransferToken) -> None:
        self._error = token.error()
        if self._error is None:
            self._engine.fence(PREFILL)
            self._error = self._engine.commit(PREFILL, self._receive)
        if self._error is None:
            self._on_success(self._receive)
        self._ended.set()

    def has_ended(self, timeout_s: float = WAIT_S) -> bool:
        return self._ended.wait(timeout_s) and self.token.is_done()

    def error(self) -> NeuronDiError | None:
        """Wait for the end."""
        if not self.has_ended():
            raise TimeoutError("the receive did not end")
        return self._error


@dataclass
class Pair:
    """`prefill`'s blocks hold random bytes, each byte of `decode`'s is UNTOUCHED.

    Blocks have the numbers 0 to NUM_BLOCKS at each end, wherever they lie (`sent`, `received`).
    """

    kind: EngineKind
    arena_fd: int | None
    prefill_pool: KvPool
    decode_pool: KvPool
    prefill: TransferEngine
    decode: TransferEngine
    sent: NumberedBlocks = field(init=False)
    received: NumberedBlocks = field(init=False)
    _tags: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.sent = NumberedBlocks(self.prefill_pool)
        self.received = NumberedBlocks(self.decode_pool)

    def receive_of(self, source: Sequence[int] | BlockSource, numbers: Sequence[int]) -> Receive:
        """Whole blocks: prefill's of these numbers, or others, into decode's."""
        if not isinstance(source, BlockSource):
            source = self.sent.promise(source)
            source_ids = source.block_ids
        else:  # whatever it names, the runs are in order
            source_ids = self.sent.ids_of(range(len(numbers)))
        block_ids = self.received.ids_of(numbers)
        return Receive(
            tag=next(self._tags),
            runs=whole_block_runs(self.decode_pool.layout, source_ids, block_ids),
            memory=self.decode_pool.memory(),
            source=source,
            block_ids=block_ids,
        )

    def landing_of(self, memory: Memory, runs: Runs) -> Receive:
        """Some bytes of prefill's pool into registered memory."""
        source = self.sent.promise([0])
        return Receive(tag=next(self._tags), runs=runs, memory=memory, source=source)

    def send(self, receive: Receive) -> TransferToken:
        """Prefill's half, on Pull."""
        return self.prefill.post_send(DECODE, send_of(receive))

    def post(self, receive: Receive) -> Outcome:
        """Decode's half alone."""
        return self.outcome(receive, self.decode.post_receive(PREFILL, receive))

    def outcome(self, receive: Receive, token: TransferToken) -> Outcome:
        """Of a receive that was posted."""
        return Outcome(self.decode, receive, token, self._follow)

    def transfer(self, receive: Receive) -> Outcome:
        outcome = self.post(receive)
        self.send(receive)
        return outcome

    def move(self, source_numbers: Sequence[int], numbers: Sequence[int]) -> Outcome:
        return self.transfer(self.receive_of(source_numbers, numbers))

    def connect(self) -> None:
        """As a handshake does."""
        layout = self.decode_pool.layout
        self.prefill.accept(DECODE, self.decode.local_region(PREFILL), layout)
        self.decode.connect(PREFILL, self.prefill.local_region(DECODE), layout)

    def _follow(self, receive: Receive) -> None:
        """Where blocks changed hands both ends learn of it, and prefill computes the same KV in
        those that it got: so its blocks hold what they held, as where they are copied."""
        if self.kind.hands_over:
            self.received.follow()
            self.sent.give_up_taken(receive.source)


def send_of(receive: Receive) -> Send:
    return Send(
        tag=receive.tag,
        runs=receive.runs,
        block_ids=[BlockId(int(block_id)) for block_id in receive.source.block_ids],
        exchange=receive.block_ids,
    )


@contextmanager
def arena_of(kind: EngineKind) -> Iterator[int | None]:
    """The descriptor of an arena for both ends, where they need one."""
    arena_fd = create_arena() if kind.hands_over else None
    try:
        yield arena_fd
    finally:
        if arena_fd is not None:
            os.close(arena_fd)


@contextmanager
def one_end(
    kind: EngineKind,
    incarnation: Incarnation,
    layout: KvLayout = LAYOUT,
    num_blocks: int = 1,
    arena_fd: int | None = None,
) -> Iterator[tuple[KvPool, TransferEngine]]:
    """A worker's pool and transfer engine."""
    with ExitStack() as end:
        if kind.join_pool is not None and arena_fd is not None:
            pool = kind.join_pool(arena_fd, layout, num_blocks, incarnation)
        else:
            pool = kind.make_pool(layout, num_blocks, incarnation)
        end.enter_context(closing(pool))
        engine = end.enter_context(closing(kind.make(pool)))
        yield pool, engine


@contextmanager
def connected_pair(kind_name: str, num_blocks: int = NUM_BLOCKS) -> Iterator[Pair]:
    """Each end has its blocks in the end, whoever had them in between."""
    kind = KINDS[kind_name]
    with ExitStack() as ends:
        arena_fd = ends.enter_context(arena_of(kind))
        pools, engines = [], []
        for incarnation in (PREFILL, DECODE):
            end = one_end(kind, incarnation, LAYOUT, num_blocks, arena_fd)
            pool, engine = ends.enter_context(end)
            pools.append(pool)
            engines.append(engine)
        pair = Pair(kind, arena_fd, *pools, *engines)
        fill(pair.sent)
        pair.received[:] = UNTOUCHED
        pair.connect()
        yield pair
        pair.sent.check()
        pair.received.check()
