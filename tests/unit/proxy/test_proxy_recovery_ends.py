"""How requests end: once, with nothing left behind. On virtual time."""

import asyncio
import random
from contextlib import suppress

import pytest
from scripted_worker import parked, token
from virtual_cluster import (
    NUM_TOKENS,
    TOKEN_S,
    VirtualCluster,
    VirtualWorker,
    fail_with,
    failed,
    play,
    silent_after,
    two_by_two,
)
from virtual_time import virtual

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    CapacityError,
    PeerGone,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.types import RequestId
from neuron_di_proxy.receipts import RequestRecord

GONE = PeerGone("the connection ended")


@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.5, 4.5, 6.5])
@virtual
async def test_a_client_that_leaves_closes_every_leg_in_the_same_turn(at_s):
    async with two_by_two() as cluster:
        asked = cluster.request()
        task = asyncio.create_task(cluster.ask(asked))
        await asyncio.sleep(at_s * TOKEN_S)
        await asyncio.sleep(0)
        assert len(cluster.legs) == 2
        assert not cluster.are_all_legs_closed()
        task.cancel()
        await asyncio.sleep(0)  # the turn in which it is cancelled
        assert cluster.are_all_legs_closed()
        with suppress(asyncio.CancelledError):
            await task
        assert asked.record.attempts[0].blamed is None


@virtual
async def test_a_client_that_leaves_while_nothing_runs_starts_nothing():
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(GONE, after=1)
        asked = cluster.request()
        asking = asyncio.create_task(cluster.ask(asked))
        await asyncio.sleep(2.5 * TOKEN_S)
        assert asked.indices == [0, 1]
        await asyncio.sleep(1.0 * TOKEN_S)
        assert cluster.are_all_legs_closed()
        asking.cancel()  # during the back-off
        with suppress(asyncio.CancelledError):
            await asking
        await asyncio.sleep(10.0)
        assert len(cluster.legs) == 2


@pytest.mark.parametrize("state", ["streaming", "waiting"])
@virtual
async def test_at_shutdown_what_runs_ends_with_an_error(state):
    async with two_by_two() as cluster:
        if state == "waiting":
            cluster.directory.records = []
        cluster.workers["d1"].script = silent_after(1)
        asking = asyncio.create_task(cluster.ask())
        await asyncio.sleep(1.0)
        cluster.runner.abandon()
        asked = await asking
        assert "shutting down" in asked.error.message
        assert len(asked.record.attempts) <= 1


@virtual
async def test_the_back_off_grows_and_the_same_seed_gives_the_same_times():
    async def times_s(seed):
        async with VirtualCluster(
            VirtualWorker("p1", "prefill", silent_after(0)),
            VirtualWorker("d1", "decode", fail_with(failed())),
            seed=seed,
            retries_max=4,
        ) as cluster:
            starts_s = []
            open_leg = cluster.open_leg

            def note(record, kind, leg):
                starts_s.append(now_s())
                return open_leg(record, kind, leg)

            cluster.open_leg = note
            await cluster.ask()
            return [b - a - TOKEN_S for a, b in zip(starts_s[::2], starts_s[2::2], strict=False)]

    first, again, other = await times_s(1), await times_s(1), await times_s(2)
    assert first == pytest.approx(again)
    assert first != pytest.approx(other)
    for number, wait_s in enumerate(first):
        assert wait_s == pytest.approx(0.05 * 1.5**number, rel=0.2)


@virtual
async def test_the_back_off_ends_to_grow():
    async with VirtualCluster() as cluster:
        begun_s = now_s()
        record = RequestRecord(request_id=RequestId("r"), model="tiny", attempts=[None] * 20)
        await cluster.runner._back_off(record, Deadline.after(100.0))
        assert now_s() - begun_s == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("seed", range(60))
@virtual
async def test_whatever_happens_there_is_one_end_and_nothing_is_left_open(seed):
    """Workers die, freeze, stall, lie, refuse and restart at random."""
    rng = random.Random(seed)
    errors = [
        GONE,
        PeerTimeout("silent"),
        RemoteProtocolError("garbage"),
        CapacityError("full"),
        failed(),
        failed("kv_missing", 502, fault="peer"),
        parked(),
        token(NUM_TOKENS - 1),
    ]

    def any_script(leg):
        if rng.random() < 0.4:
            return play(leg)
        after = rng.randrange(NUM_TOKENS)
        return (
            silent_after(after)
            if rng.random() < 0.2
            else fail_with(rng.choice(errors), after=after)
        )(leg)

    async with two_by_two(stall_timeout_s=2.0, request_timeout_s=60.0) as cluster:
        for worker in cluster.workers.values():
            worker.script = any_script
        requests = [cluster.request() for _ in range(6)]
        tasks = []
        for asked in requests:
            tasks.append(asyncio.create_task(cluster.ask(asked)))
            await asyncio.sleep(rng.uniform(0, 0.05))
            if rng.random() < 0.5:
                worker = rng.choice(list(cluster.workers.values()))
                rng.choice([worker.kill, worker.restart, worker.freeze])()
                cluster.relist()
        await asyncio.sleep(5.0)
        for worker in cluster.workers.values():
            worker.thaw()
            worker.restart()
        cluster.relist()
        tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for asked in requests[:-1]:
            assert (asked.finished is None) != (asked.error is None)
            assert asked.finished is None or asked.is_complete
        assert cluster.are_all_legs_closed()
        assert all(asked.indices == list(range(len(asked.tokens))) for asked in requests)
        assert not any(watch.legs for watch in cluster.health._watches.values())
