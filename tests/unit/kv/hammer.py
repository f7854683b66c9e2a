"""A process that passes blocks of an arena to and fro until it is killed: half of a test.

    python hammer.py ROLE ARENA_FD SOCKET_FD SEED

The prefill end promises blocks on the socket and gives them up after a while, whether they were
taken or not; the decode end takes what it hears of. Each writes to whatever it owns, and looks
whether that is still there: another writer would show.
"""

import contextlib
import os
import random
import secrets
import socket
import sys

import numpy as np
from arena_kit import LAYOUT

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import ArenaPool, Group
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di_bindings.owner_words import word

NUM_BLOCKS = 40
_PROMISES_MAX = 4


class End:
    """A worker of one role. `lists` are what its requests hold; `marks` what it wrote to blocks
    that nobody else may write to since."""

    def __init__(self, role: str, arena_fd: int, seed: int) -> None:
        incarnation = Incarnation(secrets.token_hex(16))
        self.pool = ArenaPool.join(arena_fd, WorkerId(role), LAYOUT, NUM_BLOCKS, incarnation)
        self.random = random.Random(seed)
        arena, numbers = self.pool.arena, LAYOUT.block_bytes // 4
        flat = np.frombuffer(arena.view, np.float32, offset=arena.data_offset)
        self.blocks = flat.reshape(-1, numbers)  # not by torch, which takes long to load
        self.free = list(self.pool.block_ids())
        self.lists: list[list[BlockId]] = []
        self.marks: dict[BlockId, float] = {}
        self.last_mark = self.pool.ownership.slot * 1_000_000 + seed * 10_000
        self.use(self.free)

    def follow(self) -> None:
        for went, came in self.pool.exchanges():
            holder = next(each for each in self.lists if went in each)
            holder[holder.index(went)] = came

    def retire(self, blocks: list[BlockId]) -> None:
        while self.pool.retire(blocks):
            self.follow()
        self.lists = [each for each in self.lists if each is not blocks]
        self.use(blocks)
        self.free += blocks

    def use(self, blocks: list[BlockId]) -> None:
        """They are ours alone from now on."""
        self.last_mark += 1
        self.blocks[blocks] = self.last_mark
        self.marks.update(dict.fromkeys(blocks, self.last_mark))

    def check(self, blocks: list[BlockId]) -> None:
        """Nobody else wrote to what was ours."""
        for block_id in blocks:
            if not (self.blocks[block_id] == self.marks.pop(block_id)).all():
                raise LocalProtocolError("somebody else wrote to a block of ours")

    def some(self, count_max: int = 6) -> list[BlockId]:
        self.random.shuffle(self.free)
        count = min(count_max, len(self.free))
        taken, self.free = self.free[:count], self.free[count:]
        self.check(taken)
        self.lists.append(taken)
        return taken


def prefill(end: End, link: socket.socket) -> None:
    slot = end.pool.ownership.slot
    while True:
        blocks = end.some(end.random.randint(1, 6))
        end.use(blocks)
        generations = end.pool.generations(blocks)
        words = [word(slot, generation) for generation in generations]
        content = end.blocks[blocks[0], 0]
        with contextlib.suppress(TimeoutError, ConnectionError):  # nobody need hear of it
            link.send(np.array([slot, int(content), *blocks, *words], np.uint64).tobytes())
        while len(end.lists) > end.random.randint(0, _PROMISES_MAX):
            end.retire(end.random.choice(end.lists))


def decode(end: End, link: socket.socket) -> None:
    while True:
        numbers = np.frombuffer(link.recv(4096), np.uint64)
        slot, content = int(numbers[0]), float(numbers[1])
        ids, words = np.split(numbers[2:], 2)
        own = end.some(len(ids))
        source_ids, given_ids = ids.astype(np.int64)[: len(own)], np.array(own, np.int64)
        if len(own) == len(ids):
            group = Group(source_ids, words, given_ids, end.pool.ownership.known(given_ids))
            if end.pool.ownership.take(group, slot) is None:
                end.follow()
                if not (end.blocks[end.lists[-1]] == content).all():
                    raise LocalProtocolError("what was taken is not what was promised")
        end.use(end.lists[-1])
        while len(end.lists) > end.random.randint(0, 3):
            blocks = end.random.choice(end.lists)
            end.check(blocks)
            end.retire(blocks)


def main() -> None:
    role, arena_fd, socket_fd, seed = sys.argv[1], *map(int, sys.argv[2:5])
    end = End(role, arena_fd, seed)
    os.write(1, b".")
    with socket.socket(fileno=socket_fd) as link:
        link.settimeout(0.001 if role == "prefill" else None)
        (prefill if role == "prefill" else decode)(end, link)


if __name__ == "__main__":
    main()
