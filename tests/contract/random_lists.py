"""Random transfers through one connected pair, compared with numpy.

python -m tests.contract.random_lists --engine shm --lists 100000

`make block-lists` does so for several engines; `make test` tries a few lists of each.
"""

import argparse
import sys
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import now_s
from neuron_di.errors import RemoteProtocolError
from neuron_di.kv import KvPool
from neuron_di.types import Incarnation

from .engine_kinds import KINDS
from .numbered_blocks import bytes_of
from .transfer_pair import (
    LAYOUT,
    NUM_BLOCKS,
    UNTOUCHED,
    Outcome,
    connected_pair,
    runs_of,
)

_LANDING_BLOCKS = 8


def check_block_lists(kind_name: str, *, num_lists: int, seed: int) -> None:
    """Whole blocks, scattered or in runs, into the pool. AssertionError where one is wrong."""
    rng = np.random.default_rng(seed)
    with connected_pair(kind_name) as pair:
        expected = pair.received[:]
        for number in range(num_lists):
            source_ids, block_ids = _random_ids(rng), _random_ids(rng)
            count = min(len(source_ids), len(block_ids))
            source_ids, block_ids = source_ids[:count], block_ids[:count]
            _check_success(
                pair.move(source_ids.tolist(), block_ids.tolist()), f"list {number} of seed {seed}"
            )
            expected[block_ids] = pair.sent[source_ids]
            if not np.array_equal(pair.received, expected):
                raise AssertionError(f"list {number} of seed {seed} arrived wrong")


def check_landings(kind_name: str, *, num_lists: int, seed: int) -> None:
    """Runs of bytes of any length and alignment into registered memory, or all are refused."""
    rng = np.random.default_rng(seed)
    landing = KvPool.create(LAYOUT, _LANDING_BLOCKS, Incarnation("1a" * 16))
    with closing(landing), connected_pair(kind_name) as pair:
        pair.decode.register(landing.memory())
        landed = bytes_of(landing.memory())
        sent = pair.sent[:].reshape(-1)
        landed[:] = UNTOUCHED
        expected = landed.copy()
        for number in range(num_lists):
            # Disjoint parts of the landing: between neighbours of sorted cuts, in random order.
            cuts = np.sort(rng.choice(len(landed), 2 * int(rng.integers(1, 40)), replace=False))
            order = rng.permutation(len(cuts) // 2)
            starts, ends = cuts[::2][order], cuts[1::2][order]
            lengths = ends - starts
            sources = rng.integers(0, len(sent) - lengths + 1)
            receive = pair.landing_of(landing.memory(), runs_of(sources, starts, lengths))
            outcome, what = pair.transfer(receive), f"landing {number} of seed {seed}"
            if not pair.kind.lands:
                if not isinstance(outcome.error(), RemoteProtocolError):
                    raise AssertionError(f"{what} was not refused: {outcome.error()!r}")
                continue
            _check_success(outcome, what)
            for source, start, length in zip(sources, starts, lengths, strict=True):
                expected[start : start + length] = sent[source : source + length]
            if not np.array_equal(landed, expected):
                raise AssertionError(f"{what} arrived wrong")
        if not np.array_equal(landed, expected):
            raise AssertionError("landing memory was written to")


def _random_ids(rng: np.random.Generator) -> NDArray[np.int64]:
    count = int(rng.integers(1, NUM_BLOCKS + 1))
    if rng.integers(2):
        start = int(rng.integers(0, NUM_BLOCKS - count + 1))
        return np.arange(start, start + count)
    return rng.permutation(NUM_BLOCKS)[:count]


def _check_success(outcome: Outcome, what: str) -> None:
    error = outcome.error()
    if error is not None:
        raise AssertionError(f"{what} failed: {error!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=KINDS, default="shm")
    parser.add_argument("--lists", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kind = KINDS[arguments.engine]
    if kind.why_not is not None:
        parser.error(kind.why_not)
    start_s = now_s()
    check_block_lists(kind.name, num_lists=arguments.lists, seed=arguments.seed)
    check_landings(kind.name, num_lists=arguments.lists // 10, seed=arguments.seed)
    sys.stdout.write(f"{kind.name}: all as it should be, {now_s() - start_s:.1f} s\n")


if __name__ == "__main__":
    main()
