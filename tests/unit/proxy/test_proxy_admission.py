"""Admission: who runs, who waits, who is refused; and that no place is ever lost."""

import asyncio
import random

import pytest
from admission_kit import admission_of
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import virtual

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError, RateLimited
from neuron_di_proxy.admission import LOOK_INTERVAL_S, QUEUE_MIN, SLOTS_UNKNOWN, Admission
from neuron_di_proxy.tenant import EVERYBODY, Tenant

LATER_S = 1000.0


async def run_one(admission, tenant=EVERYBODY, num_places=1):
    """A ticket that runs."""
    ticket = admission.arrive(tenant)
    ticket.take(num_places, num_places)
    await ticket.turn(Deadline.after(LATER_S))
    return ticket


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@virtual
async def test_places_are_counted_and_come_back():
    admission = admission_of(2)
    tickets = [await run_one(admission), await run_one(admission)]
    assert (admission.num_running, admission.num_places, admission.num_waiting) == (2, 2, 0)
    third = asyncio.create_task(run_one(admission))
    await settle()
    assert (admission.num_running, admission.num_waiting, third.done()) == (2, 1, False)
    tickets[0].close()
    tickets[0].close()  # a second time means nothing
    await third
    assert (admission.num_running, admission.num_waiting, admission.num_admitted) == (2, 0, 3)
    tickets[1].close()
    third.result().close()
    assert (admission.num_running, admission.num_places) == (0, 0)
    await admission.wait_idle()


@virtual
async def test_a_request_whose_body_is_being_read_waits_and_takes_no_place():
    admission = admission_of(1, queue=1)
    slow, next_one = admission.arrive(EVERYBODY), admission.arrive(EVERYBODY)
    with pytest.raises(CapacityError, match="2 requests are waiting"):
        admission.arrive(EVERYBODY)  # bodies take memory, too
    await next_one.turn(Deadline.after(0))
    assert (admission.num_running, admission.num_waiting) == (1, 1)
    slow.close()
    assert admission.num_waiting == 0
    next_one.close()


@virtual
async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    admission = admission_of(1, queue=2)
    running = await run_one(admission)
    waiting = [asyncio.create_task(run_one(admission)) for _ in range(2)]
    await settle()
    with pytest.raises(CapacityError) as refused:
        admission.arrive(EVERYBODY)
    assert 1 <= refused.value.retry_after_s <= 60
    assert now_s() == 0.0, "decided without waiting"
    running.close()
    for task in waiting:
        (await task).close()
    (await run_one(admission)).close()


@virtual
async def test_no_queue_at_all():
    admission = admission_of(1, queue=0)
    running = await run_one(admission)
    with pytest.raises(CapacityError):
        admission.arrive(EVERYBODY)
    running.close()
    (await run_one(admission)).close()


@virtual
async def test_several_answers_take_several_places_and_are_not_overtaken():
    admission = admission_of(4)
    first = await run_one(admission, num_places=3)
    large = asyncio.create_task(run_one(admission, num_places=2))
    await settle()
    small = asyncio.create_task(run_one(admission))
    await settle()
    assert (large.done(), small.done()) == (False, False)  # one place is free: not for `small`
    first.close()
    await settle()
    assert (large.done(), small.done(), admission.num_places) == (True, True, 3)
    huge = asyncio.create_task(run_one(admission, num_places=9))
    await settle()
    assert not huge.done()
    large.result().close()
    small.result().close()
    await huge  # asks for more than there is: runs alone
    alone = asyncio.create_task(run_one(admission))
    await settle()
    assert not alone.done()
    huge.result().close()
    (await alone).close()


@virtual
async def test_whoever_waits_too_long_is_told_so_and_leaves_nothing_behind():
    admission = admission_of(1)
    running = await run_one(admission)
    ticket = admission.arrive(EVERYBODY)
    with pytest.raises(CapacityError, match="too long") as refused:
        await ticket.turn(Deadline.after(7))
    assert now_s() == pytest.approx(7.0)
    assert refused.value.retry_after_s >= 1
    assert (ticket.state, admission.num_waiting) == ("closed", 0)
    ticket.close()
    running.close()
    (await run_one(admission)).close()


@virtual
async def test_a_turn_that_comes_with_the_deadline_is_not_lost():
    """The place is given and the wait is over in the same moment, in both orders."""
    for close_first in (True, False):
        admission = admission_of(1)
        running = await run_one(admission)
        loop = asyncio.get_running_loop()
        if close_first:
            loop.call_later(7, running.close)
        late = asyncio.create_task(admission.arrive(EVERYBODY).turn(Deadline.after(7)))
        await settle()
        if not close_first:
            loop.call_later(7, running.close)
        patient = asyncio.create_task(run_one(admission))
        await asyncio.gather(late, return_exceptions=True)
        if late.exception() is None:
            assert admission.num_running == 1
            patient.cancel()
            continue
        (await patient).close()
        assert (admission.num_running, admission.num_waiting) == (0, 0)


@virtual
async def test_a_tenant_has_so_many_open_and_others_are_served():
    admission = admission_of(1)
    tenant = Tenant(name="a", requests_max=2)
    running = await run_one(admission, tenant)
    waiting = asyncio.create_task(run_one(admission, tenant))
    await settle()
    with pytest.raises(RateLimited, match="2 requests") as refused:
        admission.arrive(tenant)
    assert 1 <= refused.value.retry_after_s <= 60
    other = asyncio.create_task(run_one(admission, Tenant(name="b")))
    await settle()
    running.close()
    (await other).close()  # it had nothing yet
    (await waiting).close()
    admission.arrive(tenant).close()


@virtual
async def test_places_and_queue_follow_the_slots():
    slots = 4
    admission = Admission(LimitOptions(), lambda: slots)
    running = [await run_one(admission) for _ in range(5)]  # 1.25 per slot
    waiting = [asyncio.create_task(run_one(admission)) for _ in range(QUEUE_MIN)]
    await settle()
    assert (admission.num_places, admission.num_waiting) == (5, QUEUE_MIN)
    with pytest.raises(CapacityError):
        admission.arrive(EVERYBODY)
    slots = 8  # workers come, and nothing else happens
    await asyncio.sleep(2 * LOOK_INTERVAL_S)
    assert admission.num_places == 10
    slots = 1  # they go: what runs goes on, and nothing starts before there is room
    await asyncio.sleep(2 * LOOK_INTERVAL_S)
    running += [task.result() for task in waiting if task.done()]
    for ticket in running[:8]:
        ticket.close()
    await settle()
    assert admission.num_places == 2
    running[8].close()
    await settle()
    assert admission.num_places == 2
    for task in waiting:
        task.cancel()
    await settle()


@virtual
async def test_without_known_slots_it_is_taken_that_there_are_some():
    admission = Admission(LimitOptions(), lambda: 0)
    for _ in range(SLOTS_UNKNOWN):
        await run_one(admission)
    assert admission.num_running == SLOTS_UNKNOWN


@virtual
async def test_slots_are_counted_once_a_second_and_sooner_only_for_who_has_no_place():
    slots, looks = 2, []

    def count():
        looks.append(now_s())
        return slots

    admission = Admission(LimitOptions(), count)
    running = []
    for _ in range(20):
        running.append(await run_one(admission))
        await asyncio.sleep(0.1)
        if len(running) > 2:
            running.pop(0).close()
    assert 2 <= len(looks) <= 3
    running.append(await run_one(admission))
    await asyncio.sleep(LOOK_INTERVAL_S)
    slots = 4
    num_before = len(looks)
    running.append(await run_one(admission))  # there was no place for it before
    assert (len(running), len(looks)) == (4, num_before + 1)
    for ticket in running:
        ticket.close()


@virtual
async def test_draining_waits_for_whoever_has_a_ticket():
    admission = admission_of(1)
    running = await run_one(admission)
    waiting = asyncio.create_task(run_one(admission))
    reading = admission.arrive(EVERYBODY)
    await settle()
    admission.drain()
    with pytest.raises(CapacityError, match="shutting down"):
        admission.arrive(EVERYBODY)
    idle = asyncio.create_task(admission.wait_idle())
    running.close()
    (await waiting).close()
    await settle()
    assert not idle.done()
    reading.close()
    await idle


@virtual
async def test_who_waits_can_be_abandoned():
    admission = admission_of(1)
    running = await run_one(admission)
    waiting = [asyncio.create_task(run_one(admission)) for _ in range(3)]
    reading = admission.arrive(EVERYBODY)
    await settle()
    admission.abandon_waiting()
    await settle()
    for task in waiting:
        assert isinstance(task.exception(), CapacityError)
    with pytest.raises(CapacityError, match="shutting down"):
        reading.take(2, 2)
    with pytest.raises(CapacityError, match="shutting down"):
        await reading.turn(Deadline.after(1))
    assert (admission.num_waiting, admission.num_running) == (0, 1)
    running.close()
    await admission.wait_idle()


class Crowd:
    """Clients that come, wait, run, leave, at random; what must hold holds at every moment."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.slots = self.rng.randint(1, 6)
        self.limits = LimitOptions(
            requests_max=self.rng.choice((None, 1, 3)), queue_max=self.rng.choice((None, 0, 5))
        )
        self.admission = Admission(self.limits, lambda: self.slots)
        self.places = 0
        self.ended = dict.fromkeys(("served", "refused", "cancelled"), 0)

    async def run(self):
        # Rare cancellations as well as many, also in the very moment of a turn.
        clients = [asyncio.create_task(self.client(number % 4)) for number in range(120)]
        while not all(task.done() for task in clients):
            await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.05)))
            self.check()
            if self.rng.random() < 0.3:
                self.rng.choice(clients).cancel()
            if self.rng.random() < 0.05:
                self.slots = self.rng.randint(0, 6)
        for task in clients:
            if not task.cancelled():
                task.result()
        assert sum(self.ended.values()) + sum(task.cancelled() for task in clients) >= 120
        assert not self.admission._queue
        assert (self.admission.num_running, self.admission.num_places) == (0, 0)
        assert (self.admission.num_waiting, self.admission._crowd) == (0, {})
        await self.admission.wait_idle()

    def check(self):
        admission = self.admission
        assert self.places <= admission.num_places  # given a moment before they are used
        if self.limits.requests_max is not None and admission.num_running > 1:
            assert admission.num_places <= self.limits.requests_max
        if admission._queue:  # who waits, waits for somebody
            assert admission.num_places > 0
            first = admission._queue.first()
            assert admission.num_places + first.num_places > admission._places_max
        assert len(admission._queue) <= admission.num_waiting

    async def client(self, number):
        await asyncio.sleep(self.rng.random() * 2)
        tenant = Tenant(name=str(number), weight=1 + number, requests_max=(None, 7)[number % 2])
        try:
            ticket = self.admission.arrive(tenant)
        except (CapacityError, RateLimited):
            self.ended["refused"] += 1
            return
        num_places = self.rng.choice((1, 1, 1, 2, 5))
        is_running = False
        try:
            await asyncio.sleep(self.rng.choice((0, 0.01)))  # its body
            ticket.take(num_places, num_places)
            await ticket.turn(Deadline.after(self.rng.choice((0.0, 0.05, 60.0))))
            is_running = True
            self.places += num_places
            await asyncio.sleep(self.rng.choice((0, 0.001, 0.2)))
            self.ended["served"] += 1
        except CapacityError:
            self.ended["refused"] += 1
        except asyncio.CancelledError:
            self.ended["cancelled"] += 1
            raise
        finally:
            if is_running:
                self.places -= num_places
            ticket.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_no_place_is_lost_and_none_is_given_twice(seed):
    virtual(Crowd(seed).run)()


@virtual
async def test_with_room_nothing_is_awaited_and_no_timer_is_made():
    """What every request pays when nobody waits."""
    admission = admission_of(10)
    loop = asyncio.get_running_loop()
    before = loop._num_timers
    for _ in range(100):
        ticket = admission.arrive(EVERYBODY)
        ticket.take(1, 1)
        turn = ticket.turn(Deadline.after(30))
        with pytest.raises(StopIteration):
            turn.send(None)
        ticket.close()
    assert loop._num_timers == before
