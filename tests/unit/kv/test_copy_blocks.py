"""Blocks that are copied within a pool: all their bytes, no others, in as few runs as can be."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from arena_kit import LAYOUT, scene
from kv_kit import noise

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import KvPool
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings import block_runs, owner_words, run_copy

# In the arena these are the decode worker's, which come after the prefill worker's.
BLOCKS = range(6, 12)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def way(request, monkeypatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(run_copy, "_IS_COMPILED", False)
        monkeypatch.setattr(block_runs, "_IS_COMPILED", False)
    elif not run_copy.is_compiled():
        pytest.skip("the compiled copies are not built")


needs_owner_words = pytest.mark.skipif(
    not owner_words.is_available(), reason="owner_words was not compiled"
)


@pytest.fixture(params=["plain pool", pytest.param("arena", marks=needs_owner_words)])
def pool(request) -> Iterator[KvPool]:
    """With twelve blocks, as far as addresses go, all of other bytes."""
    if request.param == "plain pool":
        pool = KvPool.create(LAYOUT, 12, Incarnation("ab" * 16))
        fill(pool)
        yield pool
        pool.close()
        return
    with scene() as both:
        fill(both.decode.pool)
        yield both.decode.pool


def fill(pool: KvPool) -> None:
    for number in range(12):
        pool.view(BlockId(number))[:] = noise(LAYOUT.block_bytes, number)


def contents(pool: KvPool) -> list[bytes]:
    return [bytes(pool.view(BlockId(number))) for number in range(12)]


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([6], [11]),
        ([6, 7, 8], [9, 10, 11]),
        ([11, 6, 9], [7, 10, 8]),
        ([6, 7, 10], [11, 9, 8]),
        ([6, 6], [7, 9]),
    ],
)
def test_whole_blocks_are_copied_and_nothing_else_changes(pool, sources, targets):
    expected = contents(pool)
    generations = pool.generations(ids(*BLOCKS))
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    pool.copy_blocks(ids(*sources), ids(*targets))
    assert contents(pool) == expected
    assert pool.generations(ids(*BLOCKS)) == generations  # whose they are, copies do not change


@pytest.mark.parametrize(
    ("sources", "targets", "num_blocks"),
    [
        ([6, 7, 8], [9, 10, 11], [3]),
        ([6, 7, 8], [10, 11, 9], [2, 1]),
        ([6, 8, 9], [10, 11, 7], [1, 1, 1]),
        ([9, 10], [7, 6], [1, 1]),
    ],
)
def test_blocks_that_are_neighbours_at_both_ends_are_one_run(
    pool, monkeypatch, sources, targets, num_blocks
):
    copied = []
    copy_runs = run_copy.copy_runs

    def watched(*, lengths: np.ndarray, **places: object) -> None:
        copied.append((lengths // LAYOUT.block_bytes).tolist())
        copy_runs(lengths=lengths, **places)

    monkeypatch.setattr(run_copy, "copy_runs", watched)
    expected = contents(pool)
    pool.copy_blocks(ids(*sources), ids(*targets))
    assert copied == [num_blocks]
    assert [contents(pool)[target] for target in targets] == [expected[n] for n in sources]


def test_every_rank_has_its_part():
    layout = replace(LAYOUT, num_kv_heads=2, num_ranks=2)
    pool = KvPool.create(layout, 4, Incarnation("ab" * 16))
    for rank in range(2):
        pool.tensor(rank)[:] = torch.arange(4).view(4, 1, 1, 1, 1, 1) + 10 * rank
    pool.copy_blocks(ids(1, 3), ids(2, 0))
    for rank in range(2):
        found = pool.tensor(rank)[:, 0, 0, 0, 0, 0] - 10 * rank
        assert found.tolist() == [3, 1, 1, 3]
    pool.close()


def test_a_closed_pool_copies_nothing():
    pool = KvPool.create(LAYOUT, 4, Incarnation("ab" * 16))
    pool.close()
    with pytest.raises(LocalProtocolError):
        pool.copy_blocks(ids(0), ids(1))
