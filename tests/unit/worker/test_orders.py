"""Orders of an operator, on simulated workers and a virtual clock: drains and changes of role."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from neuron_di.errors import CapacityError, NeuronDiError, StaleIncarnation
from neuron_di.registry import LeaseId
from neuron_di.testing.faults import Faults
from neuron_di.testing.sim_cluster import Cluster
from neuron_di.testing.sim_options import default_options
from neuron_di.testing.sim_worker import DRAIN_S, SimWorker
from neuron_di.testing.virtual_loop import silenced
from neuron_di.testing.workload import wanted
from neuron_di.types import Incarnation, RequestId, Role
from neuron_di.wire import Parked, PrefillLeg, WorkerRecord, record_decoder
from neuron_di.wire.admin import DrainOrder, PrepareDrain, PrepareRole, RoleTicket
from neuron_di.worker.orders import (
    TICKET_S,
    OrderInProgress,
    Orders,
    RoleImpossible,
    SameRole,
    TicketExpired,
)

Scenario = Callable[[Cluster, SimWorker], Coroutine[Any, Any, None]]


def simulate(
    scenario: Scenario, role: Role = "decode", rates: dict[str, float] | None = None
) -> None:
    """Run `scenario(cluster, place)` in the process of the only worker."""

    async def inside(cluster: Cluster, place: SimWorker) -> None:
        assert place.process is not None
        await place.process.start(scenario(cluster, place))

    simulate_from_outside(inside, role, rates)


def simulate_from_outside(
    scenario: Scenario, role: Role = "decode", rates: dict[str, float] | None = None
) -> None:
    """As `simulate`, for a worker whose process ends: it is looked at from elsewhere."""
    with silenced():
        _run(scenario, role, rates)  # all that is left of it goes before the silence ends


def _run(scenario: Scenario, role: Role, rates: dict[str, float] | None) -> None:
    rng = random.Random(7)
    cluster = Cluster(rng, default_options((role,)), Faults(rng, rates))

    async def main() -> None:
        cluster.start()
        await asyncio.sleep(1.0)
        await scenario(cluster, cluster.workers[0])

    cluster.loop.run_until_complete(main())
    errors, failures = list(cluster.loop.errors), list(cluster.world.failures)
    cluster.loop.close()
    assert (errors, failures) == ([], [])


def orders_of(place: SimWorker) -> Orders:
    assert place.orders is not None
    return place.orders


def record_of(place: SimWorker) -> WorkerRecord:
    assert place.worker is not None
    return place.worker.record()


def prepare(place: SimWorker, role: Role) -> RoleTicket:
    order = PrepareRole(incarnation=record_of(place).incarnation, role=role)
    return orders_of(place).prepare(order)


def drain_order(place: SimWorker, timeout_s: float | None = None) -> DrainOrder:
    return DrainOrder(incarnation=record_of(place).incarnation, timeout_s=timeout_s)


def refused(kind: type[NeuronDiError], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


def keys(cluster: Cluster) -> list[str]:
    return list(cluster.proxy.registry._entries)


def test_preparing_changes_nothing_and_the_ticket_expires() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        before = record_of(place)
        ticket = prepare(place, "prefill")
        assert (ticket.before, ticket.role, ticket.expires_s) == ("decode", "prefill", TICKET_S)
        await asyncio.sleep(TICKET_S - 0.1)
        refused(OrderInProgress, "ticket expires in 0 s", lambda: prepare(place, "both"))
        await asyncio.sleep(0.2)
        commit = orders_of(place).commit
        refused(TicketExpired, "was good for 30 s", lambda: commit(ticket.ticket, None))
        refused(TicketExpired, "unknown here", lambda: commit(ticket.ticket, None))
        assert record_of(place) == before
        assert orders_of(place).outcome is None
        prepare(place, "both")  # nothing is in progress any more

    simulate(scenario)


def is_leaving(place: SimWorker) -> bool:
    assert place.worker is not None
    return place.worker.status().is_leaving


def test_a_worker_says_that_it_may_leave_for_as_long_as_an_order_is_prepared() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        orders = orders_of(place)
        order = PrepareDrain(incarnation=record_of(place).incarnation)
        ticket = orders.prepare_drain(order).ticket
        assert ticket is not None
        assert (is_leaving(place), record_of(place).state) == (True, "ready")
        refused(OrderInProgress, "a drain is prepared", lambda: prepare(place, "both"))
        again = orders.prepare_drain(order)  # of another proxy, say: the two are one
        assert (again.ticket, again.expires_s) == (ticket, TICKET_S)
        refused(TicketExpired, "for a drain", lambda: orders.commit(ticket, None))
        orders.abort(ticket)
        assert not is_leaving(place)
        stale = DrainOrder(incarnation=order.incarnation, ticket=ticket)
        refused(TicketExpired, "unknown here", lambda: orders.order_drain(stale))
        prepare(place, "both")
        assert is_leaving(place)
        refused(OrderInProgress, "a change to both is", lambda: orders.prepare_drain(order))
        await asyncio.sleep(TICKET_S + 0.1)
        assert not is_leaving(place)
        ticket = orders.prepare_drain(order).ticket
        orders.order_drain(DrainOrder(incarnation=order.incarnation, ticket=ticket))
        assert record_of(place).state == "draining"
        assert orders.prepare_drain(order).ticket is None  # whoever else orders it joins

    simulate(scenario)


def test_what_is_refused_by_name() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        orders = orders_of(place)
        refused(SameRole, "role is decode already", lambda: prepare(place, "decode"))
        other = PrepareRole(incarnation=Incarnation("other"), role="prefill")
        refused(StaleIncarnation, "another process", lambda: orders.prepare(other))
        stale = DrainOrder(incarnation=Incarnation("other"))
        refused(StaleIncarnation, "another process", lambda: orders.order_drain(stale))
        ticket = prepare(place, "prefill")
        refused(TicketExpired, "unknown here", lambda: orders.commit("no", None))
        refused(TicketExpired, "unknown here", lambda: orders.commit("\u00e9", None))
        orders.abort(ticket.ticket)
        refused(TicketExpired, "unknown here", lambda: orders.abort(ticket.ticket))
        ticket = prepare(place, "both")
        orders.order_drain(drain_order(place))
        refused(TicketExpired, "another order came", lambda: orders.commit(ticket.ticket, None))
        refused(OrderInProgress, "it will end", lambda: prepare(place, "both"))

    simulate(scenario)


def test_a_role_that_is_impossible_is_refused_before_anything_changes() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        def no(role: Role) -> None:
            raise RoleImpossible(f"no memory for {role}")

        orders = Orders(no, drain_timeout_s=1.0)
        assert place.worker is not None
        orders.begin(place.worker)
        order = PrepareRole(incarnation=record_of(place).incarnation, role="prefill")
        refused(RoleImpossible, "no memory for prefill", lambda: orders.prepare(order))
        assert orders.drain is None
        assert not place.worker.is_draining

    simulate(scenario)


def test_a_change_is_another_process_to_everybody() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        before, orders = record_of(place), orders_of(place)
        ticket = prepare(place, "prefill")
        orders.commit(ticket.ticket, None)
        assert record_of(place).state == "draining"
        refused(OrderInProgress, "changing its role to prefill", lambda: prepare(place, "both"))
        refused(OrderInProgress, "to prefill", lambda: orders.order_drain(drain_order(place)))
        await asyncio.sleep(2.0)
        after = record_of(place)
        assert (after.worker_id, after.role, after.state) == (before.worker_id, "prefill", "ready")
        assert after.incarnation != before.incarnation
        assert after.api_port == before.api_port
        assert keys(cluster) == [after.key()]
        assert len(cluster.proxy.registry._leases) == 1
        assert orders.outcome is not None
        assert (orders.outcome.state, orders.outcome.ticket) == ("changed", ticket.ticket)
        prepare(place, "decode")  # and back again

    simulate(scenario)


def test_where_the_new_role_fails_the_old_one_comes_back_and_says_why() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        before, orders = record_of(place), orders_of(place)
        cluster.faults.once["role fails"] = 0
        orders.commit(prepare(place, "prefill").ticket, None)
        await asyncio.sleep(2.0)
        after = record_of(place)
        assert (after.role, after.state) == ("decode", "ready")
        assert after.incarnation != before.incarnation
        assert keys(cluster) == [after.key()]
        assert orders.outcome is not None
        assert orders.outcome.state == "reverted"
        assert orders.outcome.reason == "an injected fault"

    simulate(scenario)


def test_where_the_old_role_fails_too_the_process_ends() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        place.order_role("prefill", 5.0)
        await asyncio.sleep(3.0)
        assert not place.is_alive
        assert keys(cluster) == []

    simulate_from_outside(scenario, rates={"role fails": 1.0})


def test_a_drained_worker_ends_and_leaves_nothing_behind() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        assert len(keys(cluster)) == 1
        place.order_drain(5.0)
        await asyncio.sleep(3.0)
        assert not place.is_alive
        assert keys(cluster) == []
        assert cluster.proxy.registry._leases == {}

    simulate_from_outside(scenario)


async def _park(place: SimWorker, events: list[object]) -> None:
    """A prefill leg whose decode leg never comes."""
    want = wanted(10)
    leg = PrefillLeg(
        request_id=RequestId("r"),
        attempt=0,
        endpoint="completions",
        prompt=msgspec.Raw(msgspec.json.encode(want.prompt_ids)),
        sampling=want.sampling,
        timeout_s=600.0,
    )
    assert place.worker is not None
    assert place.worker.prefill is not None
    try:
        async for event in place.worker.prefill.run(leg):
            events.append(event)  # noqa: PERF401 - each is looked at as it comes
    except NeuronDiError as error:
        events.append(error.code)


def test_a_drain_waits_until_parked_kv_expires_and_a_second_one_joins_it() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        worker, events = place.worker, list[object]()
        assert worker is not None
        assert place.process is not None
        leg = place.process.start(_park(place, events))
        await asyncio.sleep(1.0)
        assert isinstance(events[-1], Parked)
        first, has_joined = orders_of(place).order_drain(drain_order(place, 300.0))
        assert not has_joined
        await asyncio.sleep(5.0)
        second, has_joined = orders_of(place).order_drain(drain_order(place, 0.0))
        assert has_joined
        assert second is first, "with the time limit of the first"
        progress = first.progress()
        assert (progress.num_running, progress.num_parked) == (0, 1)
        assert progress.lease_ends_s is not None
        assert 20.0 < progress.lease_ends_s < 25.0
        assert progress.left_s == pytest.approx(295.0)
        lines = [line async for line in first._lines()]
        await leg
        assert events[-1] == "kv_expired"
        states = [line.state for line in lines]
        assert states == ["draining"] * (len(lines) - 1) + ["drained"]
        last = lines[-1]
        assert last.failed == {"kv_expired": 1}
        assert (last.num_cut, last.num_parked, last.num_quarantined) == (0, 0, 0)
        assert last.is_withdrawn
        assert 25 < len(lines) < 40, "a line each second"

    simulate_from_outside(scenario, "prefill")


def test_at_its_time_limit_a_drain_says_what_it_cuts() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        events = list[object]()
        assert place.process is not None
        place.process.start(_park(place, events))
        await asyncio.sleep(1.0)
        drain, _ = orders_of(place).order_drain(drain_order(place, 3.0))
        started_s = cluster.loop.time()
        async for line in drain._lines():
            last = line
        assert 3.0 <= cluster.loop.time() - started_s < 3.5
        assert (last.state, last.num_cut, last.num_parked) == ("cut", 1, 1)

    simulate_from_outside(scenario, "prefill")


@pytest.mark.parametrize(("timeout_s", "ends_s"), [(86_400.0, 11.0 + DRAIN_S), (30.0, 31.0)])
def test_a_process_that_is_to_end_lets_no_order_take_longer(
    timeout_s: float, ends_s: float
) -> None:
    """Ten seconds after an order, SIGTERM: its own limit counts from then."""

    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        assert place.worker is not None
        with place.worker.legs.open((RequestId("r"), 0), 600.0):
            orders_of(place).order_drain(drain_order(place, timeout_s))
            started_s = cluster.loop.time() - 1.0
            await asyncio.sleep(10.0)
            place.terminate()
            while place.is_alive:  # noqa: ASYNC110 - on a virtual clock
                await asyncio.sleep(0.1)
            assert ends_s <= cluster.loop.time() - started_s < ends_s + 3.0

    simulate_from_outside(scenario)


def test_a_worker_that_was_idle_says_too_that_it_drains() -> None:
    """Who only saw its key vanish would take it for dead, and keep it for a while."""

    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        seen: list[str] = []
        put = cluster.proxy.registry.put

        async def spy(key: str, value: bytes, lease: LeaseId) -> None:
            seen.append(record_decoder.decode(value).state)
            await put(key, value, lease)

        cluster.proxy.registry.put = spy  # type: ignore[method-assign]
        place.order_drain(5.0)
        await asyncio.sleep(3.0)
        assert seen[-1] == "draining"
        assert keys(cluster) == []

    simulate_from_outside(scenario)


def test_a_process_that_is_told_to_end_between_ticket_and_order_changes_no_role() -> None:
    async def scenario(_: Cluster, place: SimWorker) -> None:
        orders, ticket = orders_of(place), prepare(place, "prefill")
        orders.start_drain()
        refused(OrderInProgress, "it will end", lambda: orders.commit(ticket.ticket, None))
        assert (orders.change, orders.outcome) == (None, None)

    simulate(scenario)


def test_a_draining_worker_takes_nothing_new() -> None:
    async def scenario(cluster: Cluster, place: SimWorker) -> None:
        server = cluster.world.servers[place.address]
        orders_of(place).start_drain()
        (event,) = [each async for each in server.answer("decode", b"{}")]
        assert event.code == CapacityError.code  # type: ignore[union-attr]

    simulate(scenario)
