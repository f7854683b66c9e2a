"""Blocks are had as they are needed; the youngest gives way, and the oldest never does."""

import pytest
from core_kit import make_request

from neuron_di.core import BlockPool
from neuron_di.core.growth import Growth
from neuron_di.errors import Preempted

BLOCK_SIZE = 4


@pytest.fixture
def pool():
    return BlockPool(12)


@pytest.fixture
def growth(pool):
    return Growth(pool, block_size=BLOCK_SIZE, reserve_tokens=2 * BLOCK_SIZE)


def started(pool, growth, name, *, num_prompt=4, max_tokens=40, num_computed=4, age=0):
    request = make_request(name, num_prompt=num_prompt, max_tokens=max_tokens, age=age)
    request.block_ids = pool.allocate(-(-growth.num_tokens(request) // BLOCK_SIZE))
    request.num_computed = num_computed
    return request


def test_it_starts_with_a_part_of_a_long_answer_and_all_of_a_short_one(growth):
    assert growth.num_tokens(make_request("a", num_prompt=5, max_tokens=40)) == 5 + 8
    assert growth.num_tokens(make_request("b", num_prompt=5, max_tokens=3)) == 5 + 3 - 1


def test_one_whose_blocks_are_full_gets_as_many_again(pool, growth):
    request = started(pool, growth, "a", num_computed=11)
    assert growth.grow([request]) == [request]
    assert len(request.block_ids) == 3
    request.num_computed = 12
    assert growth.grow([request]) == [request]
    assert len(request.block_ids) == 5


def test_it_never_gets_more_than_it_can_ever_use(pool, growth):
    request = started(pool, growth, "a", max_tokens=10, num_computed=12)
    assert len(request.block_ids) == 3
    growth.grow([request])
    assert len(request.block_ids) == 4  # of 13 positions
    assert growth.is_share(request)
    request.block_ids += pool.allocate(1)
    assert not growth.is_share(request)


def test_what_all_need_to_grow_once_more_is_kept(pool, growth):
    long = started(pool, growth, "a")
    short = started(pool, growth, "b", max_tokens=7)  # 10 positions, all of which it has
    assert growth.num_kept([long, short]) == 2


def test_little_that_is_left_is_shared_out(pool, growth):
    requests = [started(pool, growth, name, num_computed=12) for name in "abc"]
    assert pool.num_free == 3
    assert growth.failures(requests) == []
    assert growth.grow(requests) == requests
    assert [len(request.block_ids) for request in requests] == [4, 4, 4]


def test_the_youngest_gives_way_and_all_others_go_on(pool, growth):
    requests = [started(pool, growth, name, num_computed=12) for name in "abcd"]
    assert pool.num_free == 0
    ((request, error),) = growth.failures(requests)
    assert request is requests[3]
    assert isinstance(error, Preempted)
    pool.free(request.block_ids)
    assert growth.grow(requests[:3]) == requests[:3]


def test_who_needs_nothing_gives_way_too_if_it_is_the_youngest(pool, growth):
    requests = [started(pool, growth, name, num_computed=12) for name in "abc"]
    requests.append(started(pool, growth, "d", num_computed=5))
    assert [request for request, _ in growth.failures(requests)] == requests[3:]


def test_who_gave_way_and_came_again_is_as_old_as_before(pool, growth):
    ages = {"a": 2, "b": 3, "c": 4, "again": 1}
    requests = [started(pool, growth, name, num_computed=12, age=age) for name, age in ages.items()]
    assert [request for request, _ in growth.failures(requests)] == [requests[2]]
    assert [request for request, _ in growth.failures([requests[0], requests[3]])] == [requests[0]]


def test_each_has_an_error_of_its_own(pool, growth):
    """One that is raised for several would collect the traces of all."""
    requests = [started(pool, growth, name, num_computed=12) for name in "abcd"]
    requests[3].block_ids = []
    errors = [error for _, error in growth.failures(requests)]
    assert len({id(error) for error in errors}) == len(errors) == 2


def test_the_last_one_left_waits_for_what_comes_free_by_itself(pool, growth):
    request = started(pool, growth, "a", num_computed=12)
    held = pool.allocate(pool.num_free)  # by a transfer, say
    assert growth.failures([request]) == []
    assert growth.grow([request]) == []
    pool.free(held[:1])
    assert growth.grow([request]) == [request]
