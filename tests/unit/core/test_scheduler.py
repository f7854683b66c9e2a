"""What the engine may rely on with any scheduler."""

import pytest
from core_kit import FINISHED, WAITING, make_received, make_request

from neuron_di.core import BlockPool, CombinedScheduler, DecodeScheduler, PrefillScheduler
from neuron_di.errors import CapacityError, LocalProtocolError, TooLarge


def make_prefill(pool):
    return PrefillScheduler(pool, block_size=4, batch_size=4, chunk_tokens=4, waiting_max=2)


def make_decode(pool):
    return DecodeScheduler(pool, block_size=4, batch_size=4, waiting_max=2, reserve_tokens=8)


def make_combined(pool):
    limits = {"batch_size": 4, "chunk_tokens": 4, "waiting_max": 2, "reserve_tokens": 8}
    return CombinedScheduler(pool, block_size=4, **limits)


@pytest.fixture(params=[make_prefill, make_decode, make_combined])
def scheduler(request):
    return request.param(BlockPool(4))


@pytest.fixture
def new(scheduler):
    make = make_received if isinstance(scheduler, DecodeScheduler) else make_request

    def make_one(name, num_prompt, age=0):
        return make(name, num_prompt=num_prompt, max_tokens=2, age=age)

    return make_one


def test_it_starts_idle(scheduler):
    assert scheduler.is_idle()
    assert scheduler.schedule() is None
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_transferring) == (0, 0, 0)
    scheduler.check_integrity()


def test_a_full_queue_refuses_and_a_place_opens_again(scheduler, new):
    first, second = new("a", 1), new("b", 1)
    scheduler.add(first)
    scheduler.add(second)
    with pytest.raises(CapacityError):
        scheduler.add(new("c", 1))
    assert scheduler.num_waiting == 2
    scheduler.finish(first, "cancelled")
    scheduler.add(new("d", 1))


def test_a_request_larger_than_the_pool_is_refused_at_once(scheduler, new):
    with pytest.raises(TooLarge):
        scheduler.add(new("a", 17))
    assert scheduler.is_idle()


def test_a_request_without_a_prompt_is_a_bug(scheduler, new):
    with pytest.raises(LocalProtocolError):
        scheduler.add(new("a", 0))


def test_nobody_overtakes_the_first_that_waits_for_blocks(scheduler, new):
    large, larger, small = new("a", 11), new("b", 7), new("c", 1)
    scheduler.add(large)
    scheduler.schedule()
    scheduler.add(larger)
    scheduler.add(small)
    scheduler.schedule()
    assert (larger.status, small.status) == (WAITING, WAITING)
    scheduler.finish(large, "cancelled")
    scheduler.schedule()
    assert larger.status is not WAITING


@pytest.mark.parametrize(("ages", "next_one"), [((2.0, 1.0), 1), ((1.0, 1.0), 0)])
def test_the_oldest_starts_next_and_of_one_age_who_came_first(scheduler, new, ages, next_one):
    holder = new("holder", 13)  # all blocks
    scheduler.add(holder)
    scheduler.schedule()
    requests = [new(f"of age {age}, {n}", 9, age=age) for n, age in enumerate(ages)]
    for request in requests:
        scheduler.add(request)
    scheduler.finish(holder, "cancelled")
    scheduler.schedule()
    started, other = requests[next_one], requests[1 - next_one]
    assert (started.status is WAITING, other.status is WAITING) == (False, True)
    scheduler.finish(started, "cancelled")
    scheduler.schedule()
    assert other.status is not WAITING


def test_a_request_is_added_once(scheduler, new):
    request = new("a", 1)
    scheduler.add(request)
    with pytest.raises(LocalProtocolError):
        scheduler.add(request)
    scheduler.schedule()
    with pytest.raises(LocalProtocolError):
        scheduler.add(request)
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("is_started", [False, True])
def test_a_request_is_finished_once(scheduler, new, is_started):
    request = new("a", 1)
    scheduler.add(request)
    if is_started:
        scheduler.schedule()
    scheduler.finish(request, "cancelled")
    assert (request.status, request.finish_reason) == (FINISHED, "cancelled")
    assert request.block_ids == []
    with pytest.raises(LocalProtocolError):
        scheduler.finish(request, "error")
    assert request.finish_reason == "cancelled"
    assert scheduler.is_idle()
    scheduler.check_integrity()


def test_a_request_that_was_not_added_cannot_be_finished(scheduler):
    with pytest.raises(LocalProtocolError):
        scheduler.finish(make_request("a", num_prompt=1), "error")


def test_check_integrity_finds_a_lost_block(scheduler, new):
    request = new("a", 1)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.check_integrity()
    request.block_ids = []
    with pytest.raises(LocalProtocolError):
        scheduler.check_integrity()


def test_check_integrity_finds_a_request_with_too_few_blocks(scheduler, new):
    request = new("a", 9)
    scheduler.add(request)
    scheduler.schedule()
    scheduler._pool.free([request.block_ids.pop()])
    with pytest.raises(LocalProtocolError):
        scheduler.check_integrity()


def test_check_integrity_finds_a_wrong_status(scheduler, new):
    request = new("a", 1)
    scheduler.add(request)
    scheduler.schedule()
    request.status = FINISHED
    with pytest.raises(LocalProtocolError):
        scheduler.check_integrity()
