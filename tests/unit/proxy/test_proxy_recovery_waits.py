"""How long a request waits for workers that are gone, frozen, late or silent. On virtual time."""

import asyncio
from unittest import mock

import pytest
from virtual_cluster import (
    TOKEN_S,
    VirtualCluster,
    VirtualWorker,
    fail_with,
    failed,
    once,
    one_by_one,
    play,
    silent_after,
    slowly,
    two_by_two,
)
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import CapacityError, PeerGone
from neuron_di_proxy.failure import RequestTimeout, failure_of
from neuron_di_proxy.recovery import ATTEMPTS_MAX

GONE = PeerGone("the connection ended")


@virtual
async def test_no_worker_in_time_is_said_with_what_is_missing():
    async with one_by_one(queue_timeout_s=30.0) as cluster:
        cluster.directory.records = [cluster.workers["p1"].record]
        asked = await cluster.ask()
        assert isinstance(asked.error, CapacityError)
        assert "no decode worker" in asked.error.message
        assert 30.0 <= now_s() < 30.2
        assert asked.record.attempts == []


@virtual
async def test_a_worker_that_comes_while_a_request_waits_gets_it():
    async with one_by_one() as cluster:
        cluster.directory.records = []
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(20.0)
        cluster.relist()
        assert (await asking).is_complete
        assert len((await asking).record.attempts) == 1


@virtual
async def test_of_all_that_wait_one_looks_at_a_time():
    num_waiting = 100
    async with one_by_one() as cluster:
        decode = cluster.workers["d1"]
        decode.kill()
        await asyncio.sleep(1.0)
        with mock.patch.object(cluster.router, "pick", wraps=cluster.router.pick) as pick:
            asking = [asyncio.create_task(cluster.ask()) for _ in range(num_waiting)]
            await asyncio.sleep(10.0)
            assert num_waiting < pick.call_count < 4 * num_waiting
            decode.restart()
            cluster.relist()
            assert all([(await asked).is_complete for asked in asking])


@pytest.mark.parametrize("after", [0, 3])
@virtual
async def test_the_only_worker_restarts_and_no_attempt_is_spent_on_its_absence(after):
    async with one_by_one(retries_max=1, continuations_max=1) as cluster:
        decode = cluster.workers["d1"]
        if after == 0:
            cluster.workers["p1"].script = once(silent_after(0))
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep((after + 0.5) * TOKEN_S)
        decode.kill()
        await asyncio.sleep(10.0)
        decode.restart()
        cluster.relist()
        asked = await asking
        assert asked.is_complete
        assert len(asked.record.attempts) == 2
        assert decode.legs[-1].incarnation == decode.record.incarnation


@virtual
async def test_a_restarted_worker_is_used_although_its_predecessor_was_blamed():
    async with one_by_one() as cluster:
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(3.5 * TOKEN_S)
        cluster.workers["d1"].restart()  # at once, and the directory learns of it later
        await asyncio.sleep(2.0)
        cluster.relist()
        asked = await asking
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("peer_gone", "d1")


@virtual
async def test_a_stale_record_is_waited_out():
    async def script(leg):
        if leg.worker is not None and leg.message.prefill.incarnation.endswith("+"):
            async for event in play(leg):
                yield event
        else:
            yield failed("stale_incarnation", 502, fault="peer")

    async with one_by_one(retries_max=1) as cluster:
        cluster.workers["p1"].restart()
        cluster.workers["p1"].script = once(silent_after(0))
        cluster.workers["d1"].script = script
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(5.0)
        cluster.relist()
        asked = await asking
        assert asked.is_complete
        assert asked.attempts()[0] == ("p1", "d1", 0, "stale_incarnation", "p1")


@virtual
async def test_the_deadline_ends_a_request_that_does_not_get_on():
    async with two_by_two(request_timeout_s=40.0) as cluster:
        cluster.workers["p1"].script = silent_after(0)
        asked = await cluster.ask()
        assert isinstance(asked.error, RequestTimeout)
        assert now_s() == pytest.approx(40.0)
        assert asked.attempts() == [("p1", "d1", 0, "request_timeout", None)]


@virtual
async def test_workers_are_told_how_long_they_have():
    async with two_by_two(request_timeout_s=60.0, stall_timeout_s=15.0) as cluster:
        cluster.workers["d1"].script = silent_after(1)
        assert (await cluster.ask()).is_complete
        times_s = [leg.message.timeout_s for leg in cluster.legs]
        assert times_s[:2] == [60.0, 60.0]
        assert times_s[2] == times_s[3]
        assert 44.0 < times_s[2] < 45.0


@virtual
async def test_waiting_for_workers_ends_with_the_deadline():
    async with two_by_two(request_timeout_s=5.0, queue_timeout_s=30.0) as cluster:
        cluster.directory.records = []
        asked = await cluster.ask()
        assert isinstance(asked.error, RequestTimeout)
        assert now_s() == pytest.approx(5.0, abs=0.01)


@virtual
async def test_a_decode_worker_that_stalls_is_left():
    async with two_by_two(stall_timeout_s=15.0) as cluster:
        cluster.workers["d1"].script = silent_after(2)
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("peer_timeout", "d1")
        gap_s = asked.times_s[3] - asked.times_s[2]
        assert 15.0 <= gap_s < 15.2
        assert isinstance(cluster.legs[0].message.timeout_s, float)


@virtual
async def test_decode_may_take_its_time_for_its_first_token_while_the_kv_is_not_there():
    async def late(leg):
        *events, last = [event async for event in play(leg)]
        for event in events:
            yield event
        await asyncio.sleep(100.0)  # decode has no slot free
        yield last

    async with two_by_two(stall_timeout_s=15.0) as cluster:
        cluster.workers["p1"].script = late
        cluster.workers["d1"].script = after_pause(110.0)
        asked = await cluster.ask()
        assert asked.is_complete
        assert len(asked.record.attempts) == 1


@virtual
async def test_once_it_has_the_kv_it_owes_the_next_token():
    async with two_by_two(stall_timeout_s=15.0) as cluster:
        cluster.workers["d1"].script = silent_after(0)
        asked = await cluster.ask()
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("peer_timeout", "d1")
        assert asked.times_s[1] - asked.times_s[0] < 15.2


def after_pause(pause_s):
    async def script(leg):
        await asyncio.sleep(pause_s)
        async for event in play(leg):
            yield event

    return script


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.25, 0.4, 0.5])
@virtual
async def test_a_frozen_worker_is_left_within_3_s_although_its_connection_is_open(role, phase_s):
    async with two_by_two() as cluster:
        cluster.workers["p1"].script = silent_after(1 if role == "prefill" else 3)
        cluster.workers["d1"].script = silent_after(1 if role == "decode" else 0)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(10.0 + phase_s)
        frozen_s = now_s()
        cluster.workers[f"{role[0]}1"].freeze()
        asked = await asking
        assert asked.is_complete
        assert asked.attempts()[0][3:] == ("peer_timeout", f"{role[0]}1")
        num_before = len([at_s for at_s in asked.times_s if at_s <= frozen_s])
        assert asked.times_s[num_before] - frozen_s < 3.0 + 0.2  # the back-off, and the prefill


@virtual
async def test_prefill_may_die_once_decode_has_spoken():
    async with two_by_two() as cluster:
        cluster.workers["p1"].script = silent_after(2)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(3.5 * TOKEN_S)
        cluster.workers["p1"].kill()
        asked = await asking
        assert asked.is_complete
        assert len(asked.record.attempts) == 1


@virtual
async def test_a_worker_that_the_directory_forgets_ends_what_it_began():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = slowly(1.0)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(1.5)
        cluster.directory.records = []
        asked = await asking
        assert asked.is_complete
        assert len(asked.record.attempts) == 1
        assert cluster.workers["d1"].num_asked > 10  # it was watched all the time


@virtual
async def test_a_forgotten_worker_that_dies_is_noticed():
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = slowly(1.0)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(1.5)
        cluster.directory.records = [
            each for each in cluster.directory.records if each.worker_id != "d1"
        ]
        await asyncio.sleep(1.0)
        cluster.workers["d1"].freeze()
        asked = await asking
        assert asked.is_complete
        assert asked.attempts()[0][4] == "d1"


@virtual
async def test_a_worker_that_served_again_after_many_failures_is_trusted_again():
    async with one_by_one(retries_max=0, continuations_max=0) as cluster:
        cluster.workers["d1"].script = fail_with(failed())
        for _ in range(5):
            assert (await cluster.ask()).error is not None
            await asyncio.sleep(1.0)
        cluster.workers["d1"].script = play
        start_s = now_s()
        assert (await cluster.ask()).is_complete  # it waited until the breaker let it try
        assert now_s() - start_s > 5.0
        assert cluster.health.reports()[1].state == "broken"
        assert (await cluster.ask()).is_complete
        assert cluster.health.reports()[1].state == "up"


@virtual
async def test_a_stream_does_not_go_on_with_other_weights():
    async with VirtualCluster(
        *(VirtualWorker(name, "prefill", model_digest=name[1:]) for name in ("pold", "pnew")),
        *(VirtualWorker(name, "decode", model_digest=name[1:]) for name in ("dold", "dnew")),
        queue_timeout_s=5.0,
    ) as cluster:
        for name in ("dold", "dnew"):
            cluster.workers[name].script = fail_with(GONE, after=2)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(2.5 * TOKEN_S)
        [first] = {leg.worker_id for leg in cluster.legs if leg.worker_id.startswith("d")}
        cluster.workers[first].kill()
        asked = await asking
        assert isinstance(asked.error, CapacityError)
        assert {leg.worker_id[1:] for leg in cluster.legs} == {first[1:]}


@virtual
async def test_attempts_that_gave_no_token_do_not_bind_the_answer_to_their_weights():
    async with VirtualCluster(
        *(VirtualWorker(name, "prefill", model_digest=name[1:]) for name in ("pa", "pb")),
        *(VirtualWorker(name, "decode", model_digest=name[1:]) for name in ("da", "db")),
    ) as cluster:
        cluster.workers["pa"].script = fail_with(failed())
        cluster.workers["db"].script = once(fail_with(failed(), after=2))
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each[0] for each in asked.attempts()] == ["pa", "pb", "pb"]


@virtual
async def test_a_model_that_vanishes_is_waited_for_by_those_who_have_begun():
    async with one_by_one() as cluster:
        cluster.workers["d1"].script = once(fail_with(GONE, after=2))
        cluster.workers["b1"] = VirtualWorker("b1", "both", model="other")
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(2.5 * TOKEN_S)
        mine, cluster.directory.records = cluster.directory.records, [cluster.workers["b1"].record]
        await asyncio.sleep(5.0)
        cluster.directory.records = mine
        assert (await asking).is_complete


@virtual
async def test_several_workers_that_begin_to_drain_at_once_end_no_request():
    workers = [VirtualWorker(f"p{n}", "prefill") for n in range(1, 6)]
    async with VirtualCluster(*workers, VirtualWorker("d1", "decode")) as cluster:
        for name in ("p1", "p2", "p3", "p4"):
            cluster.workers[name].script = fail_with(failed("over_capacity", 503))
        asked = await cluster.ask()
        assert asked.is_complete
        assert [each[0] for each in asked.attempts()] == ["p1", "p2", "p3", "p4", "p5"]


async def refuse(_):
    """At once, as a worker does that has no place for a leg."""
    yield failed("over_capacity", 503)


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("worker_id", ["p1", "d1"])
@virtual
async def test_who_has_no_room_is_asked_again_and_that_costs_nothing(worker_id, after):
    """Neither an attempt nor the retry budget, which are for failures."""
    is_full = True

    def script(leg):
        return (refuse if is_full else play)(leg)

    async with one_by_one(retries_max=1, continuations_max=1, queue_timeout_s=30.0) as cluster:
        prefill, decode = cluster.workers["p1"], cluster.workers["d1"]
        if worker_id == "p1":
            prefill.script = once(play, script) if after else script
        if after or worker_id == "d1":
            then = script if worker_id == "d1" else play
            decode.script = once(fail_with(GONE, after=after), then) if after else then
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(20.0)
        is_full = False
        asked = await asking
        assert asked.is_complete
        assert len(asked.record.attempts) > 10
        assert cluster.runner.budget.left >= 98


@virtual
async def test_a_refusal_behind_a_token_counts():
    """Its prompt was computed: that is not to go on for as long as there is no room."""
    async with one_by_one(continuations_max=2) as cluster:
        cluster.workers["d1"].script = fail_with(failed("over_capacity", 503))
        asked = await cluster.ask()
        assert failure_of(asked.error).code == "over_capacity"
        assert len(asked.record.attempts) == 3


@virtual
async def test_without_room_in_time_it_is_said_what_was_lacking():
    async with one_by_one(queue_timeout_s=30.0) as cluster:
        cluster.workers["p1"].script = refuse
        asked = await cluster.ask()
        assert failure_of(asked.error).code == "over_capacity"
        assert 30.0 <= now_s() < 32.0


@virtual
async def test_attempts_have_a_bound_however_long_there_is_no_room():
    async with one_by_one(queue_timeout_s=80_000.0, request_timeout_s=80_000.0) as cluster:
        cluster.workers["p1"].script = refuse
        asked = await cluster.ask()
        assert failure_of(asked.error).code == "over_capacity"
        assert len(asked.record.attempts) == ATTEMPTS_MAX


@virtual
async def test_a_refusal_is_no_retry_of_what_fails_later():
    async with one_by_one(retries_max=1, queue_timeout_s=30.0) as cluster:
        scripts = [refuse, fail_with(failed()), refuse, play]
        cluster.workers["p1"].script = lambda leg: scripts.pop(0)(leg)
        asked = await cluster.ask()
        assert asked.is_complete
        assert [attempt.code for attempt in asked.record.attempts] == [
            "over_capacity",
            "internal_error",
            "over_capacity",
            None,
        ]
