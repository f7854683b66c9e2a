"""Workers whose pools lie in one arena: all of them in this process, as far as a test wants."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from neuron_di.errors import NeuronDiError
from neuron_di.kv import ArenaPool, Group, KvLayout, create_arena
from neuron_di.kv.arena import Arena
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di_bindings.owner_words import OwnerWords, slots_of, word

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 6  # of each worker


class Died(Exception):
    """Raised in a worker that ends here and now."""


class SteppedWords(OwnerWords):
    """Words of which each access is announced before it is made."""

    def __init__(self, words, on_access: Callable[[], None]) -> None:
        super().__init__(words)
        self._on_access = on_access

    def load(self, ids):
        return np.concatenate([self._load_one(n) for n in ids]) if len(ids) else super().load(ids)

    def _load_one(self, block_id):
        self._on_access()
        return super().load(np.array([block_id]))

    def swap(self, ids, expected, desired):
        swapped = np.zeros(len(ids), np.bool_)
        for row in range(len(ids)):
            self._on_access()
            swapped[row : row + 1] = super().swap(
                np.asarray(ids)[row : row + 1], expected[row : row + 1], desired[row : row + 1]
            )
        return swapped


@dataclass
class Worker:
    """One end, with the books that an engine would keep: which blocks a request holds."""

    name: str
    pool: ArenaPool
    request: list[BlockId] = field(default_factory=list)

    @property
    def owned(self) -> set[int]:
        return set(self.pool.ownership.ids())

    def step_by(self, on_access: Callable[[], None]) -> None:
        arena = self.pool.arena
        assert isinstance(arena, Arena)
        arena.words = SteppedWords(arena.raw_words, on_access)

    def retire(self) -> None:
        """End the request, as an engine does."""
        while self.pool.retire(self.request):
            self.follow()

    def follow(self) -> None:
        for went, came in self.pool.exchanges():
            if went in self.request:
                self.request[self.request.index(went)] = came

    def die(self) -> None:
        """Nothing of it runs any more, and its locks are gone. Its blocks stay as they are."""
        self.pool.arena.close()


class Scene:
    """A prefill and a decode worker, and who comes after them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._num_joined = 0
        self.prefill, self.decode = self.join("prefill"), self.join("decode")

    def join(self, name: str, num_blocks: int = NUM_BLOCKS, layout: KvLayout = LAYOUT) -> Worker:
        self._num_joined += 1
        incarnation = Incarnation(f"{self._num_joined:032x}")
        pool = ArenaPool.join(self.fd, WorkerId(name), layout, num_blocks, incarnation)
        return Worker(name, pool)

    def promise(self, block_ids: Sequence[int]) -> None:
        """The prefill worker's request has computed KV there."""
        self.prefill.request = [BlockId(n) for n in block_ids]

    def group(self, given: Sequence[int], *, num_held: int = 0) -> Group:
        """Decode's part: what was promised, for these blocks of its own request."""
        self.decode.request = [BlockId(n) for n in given]
        source = self.prefill.request[num_held:]
        generations = self.prefill.pool.generations(source)
        slot = self.prefill.pool.ownership.slot
        given_ids = np.array(given, np.int64)
        return Group(
            np.array(source, np.int64),
            np.array([word(slot, generation) for generation in generations], np.uint64),
            given_ids,
            self.decode.pool.ownership.known(given_ids),
        )

    def take(self, group: Group) -> NeuronDiError | None:
        return self.decode.pool.ownership.take(group, self.prefill.pool.ownership.slot)

    def check(self) -> None:
        """Every block has one owner who knows it, and each end has what it began with."""
        for worker in (self.prefill, self.decode):
            worker.follow()
            arena, slot = worker.pool.arena, worker.pool.ownership.slot
            words = arena.raw_words[: arena.num_granted]
            assert worker.owned == set(np.flatnonzero(slots_of(words) == slot))
            assert set(worker.request) <= worker.owned
            assert len(worker.owned) == NUM_BLOCKS, worker.name
        assert not self.prefill.owned & self.decode.owned

    def close(self) -> None:
        for worker in (self.prefill, self.decode):
            with suppress(AssertionError):  # it was closed
                worker.step_by(lambda: None)
                worker.pool.close()
        os.close(self.fd)


@contextmanager
def scene() -> Iterator[Scene]:
    scene = Scene(create_arena())
    try:
        yield scene
    finally:
        scene.close()


def at_access(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` once, before the access of this number. `act` may make accesses of its own."""
    count = iter(range(1_000_000))

    def on_access() -> None:
        if next(count) == number:
            act()

    return on_access
