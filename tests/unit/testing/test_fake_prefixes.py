"""What simulations have of prompts that begin alike: requests, copies, cuts that show, counts."""

import os
import random
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from neuron_di.config import EngineOptions
from neuron_di.core import BlockPool, PrefillChunk
from neuron_di.kv import create_arena
from neuron_di.request import OutputText, Request
from neuron_di.testing.fake_handover import FakeArenaPool
from neuron_di.testing.fake_model import FakeBackend, FakePool, FakeTokenizer
from neuron_di.testing.faults import Faults
from neuron_di.testing.sim_prefixes import CountedPrefixCache, found_too_much
from neuron_di.testing.workload import (
    ALIKE_TOKENS_MAX,
    CONTEXT_TOKENS,
    FAMILY_SIZE,
    NUM_ALIKE,
    NUM_REQUESTS,
    some_alike,
    wanted,
)
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di.wire import SamplingParams

ONE = Incarnation("one")


def request_of(prompt_ids, block_ids=(), given=()):
    request = Request(
        RequestId("r"),
        0,
        prompt_ids=list(prompt_ids),
        sampling=SamplingParams(),
        max_tokens=4,
        output=OutputText(FakeTokenizer(), stop=(), skip_special_tokens=True, min_tokens=0),
        given=given,
    )
    request.block_ids = list(block_ids)
    return request


def backend_of(make_pool=FakePool, **options):
    return FakeBackend(block_size=2, num_blocks=9, incarnation=ONE, make_pool=make_pool, **options)


@pytest.fixture
def arena_pool():
    fd = create_arena()
    pools = []

    def make(layout, num_blocks, incarnation):
        before = FakeArenaPool.join(fd, WorkerId("before"), layout, 3, Incarnation("before"))
        pools.append(before)  # so that our ids are not the first
        return FakeArenaPool.join(fd, WorkerId("w"), layout, num_blocks, incarnation)

    yield make
    for pool in pools:
        pool.die()
    os.close(fd)


@pytest.mark.parametrize("place", ["alone", "in an arena"])
def test_blocks_are_copied_where_the_model_reads_them(place, arena_pool):
    backend = backend_of(FakePool if place == "alone" else arena_pool)
    ids = backend.pool.block_ids()
    assert (ids[0] > 0) == (place == "in an arena")
    for block_id in ids:
        for position in range(2):
            backend.pool.write(block_id, position, (block_id + 1 << 40) + position)
    before = backend.pool.halves_N2S[ids].copy()
    backend.copy_blocks([ids[1], ids[2], ids[7]], [ids[5], ids[6], ids[0]])
    after = backend.pool.halves_N2S[ids]
    assert np.array_equal(after, before[[7, 1, 2, 3, 4, 1, 2, 7, 8]])
    backend.close()


def test_a_copy_may_fail():
    backend = backend_of(faults=Faults(random.Random(0), {"copy fails": 1.0}))
    with pytest.raises(RuntimeError, match="an injected fault"):
        backend.copy_blocks([1], [2])


@pytest.mark.parametrize(
    ("cuts", "is_alike"),
    [((4, 8, 10), True), ((2, 6, 10), False), ((8, 10), False), ((4, 6, 10), False)],
)
def test_a_prompt_that_is_cut_elsewhere_has_other_kv(cuts, is_alike):
    backend = backend_of(chunk_tokens=4)
    request = request_of(range(1, 11), range(5))

    def last_logits(ends):
        for end in ends:
            chunk = PrefillChunk(request, request.num_computed, end)
            logits = backend.prefill(chunk)
            chunk.mark_computed()
        request.num_computed = 0
        return logits.tolist()

    assert (last_logits(cuts) == last_logits((4, 8, 10))) == is_alike


def test_what_a_cache_did_is_counted():
    counts, pool = Counter(), BlockPool(4)
    options = EngineOptions(block_size=2, chunk_tokens=2)
    cache = CountedPrefixCache(pool, options, counts, frozenset(range(3)))

    def compute(prompt_ids, block_ids, given=()):
        request = request_of(prompt_ids, block_ids, given)
        while request.num_computed < len(prompt_ids):
            chunk = cache.next_of(request) or PrefillChunk.next_of(request, 2)
            chunk.mark_computed()
            cache.keep(chunk)
        return request.num_cached

    own = pool.allocate(2)
    assert compute((1, 2, 3), own) == 0
    assert compute((1, 2, 4), own) == 2
    assert counts == Counter({"found": 1})
    assert compute((1, 2, 5), [0, 3], given=(7,)) == 2
    assert counts["found by a continuation"] == counts["found, blocks changed owner"] == 1
    compute((3, 4, 5), own)
    compute((5, 6, 7), own)
    assert counts["gave way to a piece"] == 1
    pool.allocate(2)
    assert counts["gave way to a request"] == 2


@pytest.mark.parametrize(
    ("num_cached", "may_find_kv", "num_wrong"),
    [((3, 4), True, 0), ((4, 4), True, 1), ((3, 5), True, 1), ((1, 0), False, 1)],
)
def test_no_more_is_found_than_a_tenant_has_asked_for(num_cached, may_find_kv, num_wrong):
    """A first attempt finds what another prompt of its tenant has, a later one its own prompt."""
    prompts = {"a": ((5, 6, 7, 8), 0), "b": ((5, 6, 7, 9), 0), "c": ((5, 6, 7, 8), 1)}
    clients = [
        SimpleNamespace(
            name=name,
            may_find_kv=may_find_kv,
            wanted=SimpleNamespace(prompt_ids=prompt_ids, tenant=tenant),
        )
        for name, (prompt_ids, tenant) in prompts.items()
    ]
    attempts = [SimpleNamespace(number=n, num_cached=each) for n, each in enumerate(num_cached)]
    wrong = list(found_too_much(clients, {"a": SimpleNamespace(attempts=attempts)}))
    assert [name for name, _ in wrong] == ["a"] * num_wrong


def test_a_share_of_the_requests_begins_alike():
    numbers = list(range(20))
    drawn = [some_alike(random.Random(seed), numbers) for seed in range(60)]
    assert all(len(set(each)) == len(numbers) for each in drawn)
    shares = [sum(a != b for a, b in zip(numbers, each, strict=True)) for each in drawn]
    assert shares.count(0) > 10
    assert max(shares) > 14
    assert 3 < sum(shares) / len(shares) < 12
    for each in drawn:
        families = {(n - NUM_REQUESTS) // FAMILY_SIZE for n in each if n >= NUM_REQUESTS}
        assert len(families) <= 2


def test_requests_of_a_family_begin_alike_in_every_way():
    wants = [wanted(NUM_REQUESTS + number) for number in range(NUM_ALIKE)]
    ways = Counter()
    for before, want in pairwise(wants):
        here, there = want.prompt_ids, before.prompt_ids
        assert len(here) <= ALIKE_TOKENS_MAX <= CONTEXT_TOKENS - 24
        if want.number % FAMILY_SIZE:
            answer_ids = tuple(token.token_id for token in before.answer.tokens)
            ways["again"] += here == there
            ways["next turn"] += here[:-2] == there + answer_ids
            ways["other name"] += here[0] != there[0] and here[1:] == there[1:]
            ways["same system prompt"] += here[:2] == there[:2] and here[-3:] != there[-3:]
    assert min(ways[way] for way in ("again", "next turn", "other name", "same system prompt")) > 40
