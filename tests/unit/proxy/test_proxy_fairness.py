"""Tenants that compete: who is served next, by order and never by time."""

import asyncio
import random
from collections import Counter

import pytest
from admission_kit import admission_of
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import virtual

from neuron_di.clock import Deadline
from neuron_di.errors import CapacityError
from neuron_di_proxy.admission import BODY_LATE_S
from neuron_di_proxy.fair_queue import FairQueue
from neuron_di_proxy.tenant import Tenant


def drained(queue):
    """All items, in the order in which they are next."""
    return [queue.take_first() for _ in range(len(queue))]


def test_within_one_flow_first_come_first_served():
    queue = FairQueue()
    for number in range(50):
        queue.put("a", number, 1 + number % 7, 1.0)
    assert drained(queue) == list(range(50))


def test_a_flood_delays_nobody_by_more_than_one_item_per_flow():
    queue = FairQueue()
    for flow in "abc":
        for number in range(1000):
            queue.put(flow, (flow, number), 1, 1.0)
    for _ in range(300):
        queue.take_first()
    queue.put("late", "late", 1, 1.0)
    assert "late" in [queue.take_first() for _ in range(4)]


def test_who_was_away_gets_no_credit_for_it():
    queue = FairQueue()
    for number in range(100):
        queue.put("a", ("a", number), 1, 1.0)
    for _ in range(50):
        queue.take_first()
    for number in range(50):
        queue.put("b", ("b", number), 1, 1.0)
    first = Counter(flow for flow, _ in (queue.take_first() for _ in range(20)))
    assert abs(first["a"] - first["b"]) <= 1


def test_what_did_not_wait_counts_like_what_did():
    queue = FairQueue()
    for _ in range(10):
        queue.pass_by("a", 1, 1.0)
    queue.put("a", "a", 1, 1.0)
    queue.put("b", "b", 1, 1.0)
    assert drained(queue) == ["b", "a"]


@pytest.mark.parametrize(("weight", "cost"), [(3.0, 1.0), (1.0, 1 / 3), (6.0, 2.0)])
def test_shares_follow_weights_and_costs(weight, cost):
    queue = FairQueue()
    for number in range(400):
        queue.put("plain", ("plain", number), 1.0, 1.0)
        queue.put("other", ("other", number), cost, weight)
    first = Counter(flow for flow, _ in (queue.take_first() for _ in range(400)))
    assert first["other"] == pytest.approx(300, abs=2)


def test_what_is_removed_was_never_there():
    """Otherwise a client that leaves again and again would shut its own tenant out."""
    queue = FairQueue()
    queue.put("b", "b0", 1, 1.0)
    for number in range(1000):
        queue.put("a", number, 100, 1.0)
    for number in range(1000):
        queue.remove("a", number)
    queue.put("a", "a", 1, 1.0)
    for number in range(1, 5):
        queue.put("b", f"b{number}", 1, 1.0)
    assert "a" in [queue.take_first() for _ in range(2)]
    drained(queue)
    assert (len(queue), queue.first(), queue._flows, queue._heap) == (0, None, {}, [])


def test_flows_that_are_over_are_forgotten():
    queue = FairQueue()
    for number in range(20_000):
        queue.put(str(number), number, 1, 1.0)
        queue.take_first()
        queue.put("always", -1 - number, 1, 1.0)
        queue.take_first()
    assert len(queue._ends) <= 1025


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_flows_that_always_wait_get_the_same_within_one_item(seed):
    """SFQ's bound: service for weight differs by no more than the largest items of the two."""
    rng = random.Random(seed)
    weights = {flow: rng.choice((0.5, 1.0, 2.0, 5.0)) for flow in "abcde"}
    queue, served, numbers = FairQueue(), Counter(), iter(range(10**9))
    costs = {}

    def put(flow):
        item = (flow, next(numbers))
        costs[item] = rng.randint(1, 20)
        queue.put(flow, item, costs[item], weights[flow])

    for flow in weights:
        put(flow)
        put(flow)
    for _ in range(400):
        item = queue.take_first()
        served[item[0]] += costs[item] / weights[item[0]]
        put(item[0])
        if rng.random() < 0.3:  # and some leave
            flow = rng.choice("abcde")
            left = list(queue._flows[flow].items)[-1]
            put(flow)
            queue.remove(flow, left)
        for one in weights:
            for other in weights:
                bound = 20 / weights[one] + 20 / weights[other]
                assert abs(served[one] - served[other]) <= bound + 1e-9


async def waiting(admission, tenant, order, num_places=1, cost=None):
    """A client: notes when it runs, runs for a while."""
    ticket = admission.arrive(tenant)
    try:
        ticket.take(num_places, num_places if cost is None else cost)
        await ticket.turn(Deadline.after(10_000))
        order.append(tenant.name)
        await asyncio.sleep(1)
    finally:
        ticket.close()


@virtual
@pytest.mark.parametrize("places", [1, 4])
async def test_one_tenants_flood_does_not_delay_anothers_request(places):
    """Not by more than one request per running tenant, whatever the flood has waiting."""
    admission = admission_of(places, queue=500)
    flood, quiet = Tenant(name="flood"), Tenant(name="quiet")
    order = []
    floods = [asyncio.create_task(waiting(admission, flood, order)) for _ in range(300)]
    for _ in range(20):
        await asyncio.sleep(0.7)
        started = len(order)
        request = asyncio.create_task(waiting(admission, quiet, order))
        await request
        # Whoever the freed places went to before: one request of the flood's at most.
        assert order[started:].index("quiet") <= 1
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


@virtual
async def test_who_fills_the_queue_makes_room_for_who_does_not():
    admission = admission_of(1, queue=10)
    flood, quiet = Tenant(name="flood"), Tenant(name="quiet")
    order = []
    floods = [asyncio.create_task(waiting(admission, flood, order)) for _ in range(40)]
    await asyncio.sleep(0.1)
    refused = [task for task in floods if task.done()]
    assert len(refused) == 29
    requests = [asyncio.create_task(waiting(admission, quiet, order)) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert sum(task.done() for task in requests) == 3  # five of ten waiting: its share
    pushed_out = [task for task in floods if task.done() and task not in refused]
    assert pushed_out == floods[6:11]  # the youngest
    assert all(isinstance(task.exception(), CapacityError) for task in pushed_out)
    assert admission.num_waiting == 10
    await asyncio.gather(*floods, *requests, return_exceptions=True)
    assert Counter(order) == {"flood": 6, "quiet": 5}
    assert order[:5].count("quiet") >= 2


@virtual
async def test_a_slow_body_can_be_pushed_out_too():
    admission = admission_of(1, queue=2)
    slow = [admission.arrive(Tenant(name="slow")) for _ in range(3)]
    quick = admission.arrive(Tenant(name="quick"))
    assert [ticket.state for ticket in slow] == ["arrived", "arrived", "pushed out"]
    with pytest.raises(CapacityError, match="waiting"):
        slow[2].take(1, 1)
    await quick.turn(Deadline.after(0))
    for ticket in (*slow, quick):
        ticket.close()
    await admission.wait_idle()
    assert admission.num_waiting == 0


@virtual
async def test_tenants_share_tokens_and_not_answers():
    admission = admission_of(1, queue=500)
    order = []
    tasks = [
        asyncio.create_task(waiting(admission, Tenant(name=name), order, cost=cost))
        for name, cost in (("long", 4000), ("short", 1000))
        for _ in range(100)
    ]
    await asyncio.sleep(50.5)
    assert Counter(order)["short"] == pytest.approx(40, abs=2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@virtual
async def test_heads_without_bodies_keep_nobody_out():
    admission = admission_of(2, queue=1)
    tenant = Tenant(name="everybody")
    slow = [admission.arrive(tenant) for _ in range(3)]
    with pytest.raises(CapacityError):
        admission.arrive(tenant)  # their bodies may be there at any moment
    await asyncio.sleep(BODY_LATE_S)
    for _ in range(3):
        quick = admission.arrive(tenant)
        quick.take(1, 1)
        await quick.turn(Deadline.after(0))
        quick.close()
    assert [ticket.state for ticket in slow] == ["pushed out", "arrived", "arrived"]
    with pytest.raises(CapacityError):
        slow[0].take(1, 1)
    for ticket in slow:
        ticket.close()
    await admission.wait_idle()


@virtual
async def test_tenants_share_by_their_weights():
    admission = admission_of(1, queue=500)
    small, large = Tenant(name="small"), Tenant(name="large", weight=3.0)
    order = []
    tasks = [
        asyncio.create_task(waiting(admission, tenant, order))
        for tenant in (small, large)
        for _ in range(100)
    ]
    await asyncio.sleep(80.5)
    assert Counter(order)["large"] == pytest.approx(60, abs=2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@virtual
async def test_an_answer_of_many_choices_costs_as_many():
    admission = admission_of(4, queue=500)
    order = []
    tasks = [
        asyncio.create_task(waiting(admission, Tenant(name=name), order, num_places))
        for name, num_places in (("many", 4), ("one", 1))
        for _ in range(100)
    ]
    await asyncio.sleep(50.5)
    assert Counter(order)["one"] == pytest.approx(4 * Counter(order)["many"], rel=0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
