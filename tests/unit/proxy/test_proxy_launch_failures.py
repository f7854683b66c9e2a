"""One attempt: continued, late, lost; and who is at fault."""

import asyncio

import pytest
from launch_run import Run
from scripted_worker import (
    finished,
    parked,
    released,
    token,
)

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone, PeerTimeout, RemoteProtocolError
from neuron_di.wire import Failed, Released
from neuron_di_proxy.failure import LegFailed, RequestTimeout
from neuron_di_proxy.route import Route
from neuron_di_proxy.workers import process_of


async def test_a_continuation_gives_the_ids_and_starts_at_the_next_index(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record), emitted=(100, 101))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    assert prefill_leg.message.emitted == (100, 101)
    assert decode_leg.message.num_emitted == 2
    assert prefill_leg.message.attempt == decode_leg.message.attempt == 1
    await prefill_leg.finish(token(2), parked(), released())
    await decode_leg.finish(token(3), finished(4))
    assert await run.outcome() == [token(2), token(3), finished(4)]
    assert run.attempt.num_tokens == 2


@pytest.mark.parametrize("index", [0, 1, 3])
async def test_a_continuation_that_starts_elsewhere_is_refused(client, prefill, decode, index):
    run = Run(client, Route(prefill.record, decode.record), emitted=(100, 101))
    await (await prefill.next_leg()).finish(token(index))
    with pytest.raises(RemoteProtocolError, match="2 was due"):
        await run.task
    assert run.attempt.blamed == prefill.record


async def test_what_was_emitted_may_be_all(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record), emitted=(100, 101))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(finished(2, "p1", "stop"))
    assert await run.outcome() == [finished(2, "p1", "stop")]
    await decode_leg.closed.wait()


async def test_an_end_that_counts_tokens_which_never_came_is_refused(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    await decode_leg.finish(token(1), finished(3))
    with pytest.raises(RemoteProtocolError, match="after 3 tokens, of which 2 came"):
        await run.task
    assert run.attempt.blamed == decode.record


async def test_legs_are_told_what_time_remains(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record), deadline=Deadline.after(5.0))
    for worker in (prefill, decode):
        assert 0 < (await worker.next_leg()).message.timeout_s <= 5.0
    run.task.cancel()
    await asyncio.gather(run.task, return_exceptions=True)


async def test_the_deadline_ends_an_attempt_and_blames_nobody(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record), deadline=Deadline.after(0.05))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    with pytest.raises(RequestTimeout):
        await run.task
    assert (run.attempt.code, run.attempt.blamed) == ("request_timeout", None)
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()


async def test_a_sign_of_life_is_no_token(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record), stall_timeout_s=0.1)
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    await decode_leg.send(token(1))

    async def keep_alive():
        while True:
            await decode_leg.keep_alive()
            await asyncio.sleep(0.005)

    keeping = asyncio.create_task(keep_alive())
    with pytest.raises(PeerTimeout, match="d1 sent no token"):
        await run.task
    keeping.cancel()
    assert run.attempt.blamed == decode.record
    await decode_leg.closed.wait()


@pytest.mark.parametrize(
    ("side", "fault", "status", "blamed"),
    [
        ("p1", "us", 500, "p1"),
        ("p1", "peer", 502, "d1"),
        ("d1", "us", 500, "d1"),
        ("d1", "peer", 502, "p1"),
        ("d1", "client", 400, None),
        ("d1", "us", 503, None),
        ("d1", "us", 429, None),
    ],
)
async def test_who_is_at_fault(client, prefill, decode, side, fault, status, blamed):
    run = Run(client, Route(prefill.record, decode.record))
    legs = {"p1": await prefill.next_leg(), "d1": await decode.next_leg()}
    await legs[side].finish(
        Failed(code="some_code", message="x", http_status=status, retryable=True, fault=fault)
    )
    with pytest.raises(LegFailed):
        await run.task
    assert run.attempt.code == "some_code"
    assert (run.attempt.blamed and run.attempt.blamed.worker_id) == blamed
    assert (run.attempt.refused_by is not None) == (status in (429, 503))


@pytest.mark.parametrize("side", ["p1", "d1"])
async def test_a_worker_that_speaks_of_the_deadline_first_is_not_at_fault(
    client, prefill, decode, side
):
    """Its clock may be a little ahead of ours, and in an overload many requests end so."""
    run = Run(client, Route(prefill.record, decode.record))
    legs = {"p1": await prefill.next_leg(), "d1": await decode.next_leg()}
    await legs[side].finish(
        Failed(code="deadline_exceeded", message="x", http_status=504, retryable=False, fault="us")
    )
    with pytest.raises(LegFailed):
        await run.task
    assert (run.attempt.code, run.attempt.blamed) == ("deadline_exceeded", None)


@pytest.mark.parametrize("num_events", [1, 2])
async def test_a_lost_worker_ends_the_attempt_although_its_connection_is_open(
    client, prefill, decode, num_events
):
    run = Run(client, Route(prefill.record, decode.record))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await run.events.get()
    if num_events > 1:
        await decode_leg.send(token(1))
        await run.events.get()
    run.health.fail_all(PeerTimeout("the worker is frozen"))
    with pytest.raises(PeerTimeout, match="frozen"):
        await run.task
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()


async def test_a_worker_that_is_lost_after_its_last_word_is_no_matter(client, prefill, decode):
    run = Run(client, Route(prefill.record, decode.record))
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(token(0), parked(), released())
    await run.until_heard("prefill", Released)
    lost = run.health._watches[process_of(prefill.record)].legs
    for on_loss in list(lost.values()):
        on_loss(PeerGone("p1 is gone"))
    await decode_leg.finish(token(1), finished(2))
    assert await run.outcome() == [token(0), token(1), finished(2)]


async def test_a_bug_of_ours_is_no_workers_fault(client, prefill, decode):
    def open_leg(record, kind, leg):
        raise ZeroDivisionError

    client.open_leg = open_leg
    run = Run(client, Route(prefill.record, decode.record))
    with pytest.raises(ZeroDivisionError):
        await run.task
    assert run.attempt.blamed is None


@pytest.mark.parametrize("text", ["x", "x" * 100_000])
async def test_decode_may_not_say_more_ahead_of_prefill_than_can_be_kept(
    client, prefill, decode, text
):
    async def flood(leg):
        for index in range(1, 1_000_000):
            await leg.send(token(index, text))
        raise AssertionError("all was taken")

    decode.script = flood
    run = Run(client, Route(prefill.record, decode.record))
    prefill_leg = await prefill.next_leg()
    await prefill_leg.send(token(0))
    with pytest.raises(RemoteProtocolError, match="more than can be kept"):
        await run.task
    assert run.seen() == [token(0)]
    assert run.attempt.blamed == decode.record
    await prefill_leg.closed.wait()
