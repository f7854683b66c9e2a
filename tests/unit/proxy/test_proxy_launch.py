"""Two legs become one sequence of tokens, in whatever order their events arrive."""

import msgspec
import pytest
from launch_run import REQUEST, Run
from scripted_worker import (
    ScriptedWorker,
    finished,
    parked,
    play_prefill,
    receipt,
    released,
    token,
)

from neuron_di.errors import KvMissing, PeerError, PeerGone, RemoteProtocolError
from neuron_di.wire import Failed, Finished
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.route import Route


async def test_both_legs_start_before_either_answers(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    assert prefill_leg.message.request_id == decode_leg.message.request_id == "r1"
    assert prefill_leg.message.sampling == decode_leg.message.sampling == REQUEST.sampling
    assert decode_leg.message.prefill == prefill.record.peer_address()
    assert bytes(prefill_leg.message.prompt) == b'"hi"'


async def test_workers_hear_how_long_the_request_has_waited(client, prefill, decode):
    """Not how long this attempt has: a later one is as old as its request."""
    run = Run(client, Route(prefill.record, decode.record), emitted=(5,), waited_s=40.0)
    legs = await prefill.next_leg(), await decode.next_leg()
    assert {40.0 <= leg.message.waited_s < 60.0 for leg in legs} == {True}
    run.task.cancel()


async def test_token_0_is_given_before_decode_says_anything(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0))
    assert await run.events.get() == token(0)
    await prefill_leg.finish(parked(), released())
    await decode_leg.send(token(1))
    assert await run.events.get() == token(1)
    await decode_leg.finish(finished(2))
    assert await run.outcome() == [finished(2)]


async def test_decode_that_is_early_waits_for_prefill(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await decode_leg.finish(token(1), token(2), finished(3))
    await prefill_leg.send(token(0))
    assert await run.events.get() == token(0)
    await prefill_leg.finish(parked(), released())
    assert await run.outcome() == [token(1), token(2), finished(3)]


async def test_the_receipts_of_both_legs_are_kept(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await decode_leg.finish(token(1), finished(2))
    assert await run.events.get() == token(0)
    assert await run.events.get() == token(1)
    await prefill_leg.finish(released())  # its word comes last, and is waited for
    assert await run.outcome() == [finished(2)]
    assert run.attempt.prefill == released().receipt
    assert run.attempt.decode == finished(2).receipt
    assert run.attempt.num_tokens == 2


async def test_a_complete_answer_does_not_wait_for_ever_for_prefills_receipt(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await decode_leg.finish(token(1), finished(2))
    assert (await run.outcome())[-1] == finished(2)
    assert run.attempt.prefill is None
    await prefill_leg.closed.wait()


async def test_prefill_that_finishes_cancels_decode(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(token(0), finished(1))
    assert await run.outcome() == [token(0), finished(1)]
    await decode_leg.closed.wait()


@pytest.mark.parametrize("last", [finished(1), None])
async def test_what_decode_never_gets_is_explained_by_prefill(run, prefill, decode, last):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    never = Failed(code=KvMissing.code, message="never", http_status=502, retryable=True)
    await decode_leg.finish(never)
    await run.until_heard("decode", LegFailed)
    if last is not None:
        await prefill_leg.finish(token(0), last)
        assert await run.outcome() == [token(0), last]
    else:
        await prefill_leg.finish(
            Failed(code="invalid_request", message="bad prompt", http_status=400, retryable=False)
        )
        with pytest.raises(LegFailed, match="bad prompt"):
            await run.task


async def test_kv_that_is_missing_although_it_was_parked_fails_the_request(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await decode_leg.finish(
        Failed(code=KvMissing.code, message="never", http_status=502, retryable=True)
    )
    await prefill_leg.send(token(0), parked())
    with pytest.raises(LegFailed, match="never"):
        await run.task
    await prefill_leg.closed.wait()


async def test_a_refusal_of_decode_stops_prefill_at_once(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await decode_leg.finish(
        Failed(code="over_capacity", message="full", http_status=503, retryable=True)
    )
    with pytest.raises(LegFailed, match="full"):
        await run.task
    await prefill_leg.closed.wait()


async def test_a_failure_of_prefill_stops_decode(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await run.events.get()
    prefill_leg.hang_up()
    with pytest.raises(PeerGone):
        await run.task
    await decode_leg.closed.wait()


async def test_decode_that_has_spoken_goes_on_without_prefill(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await decode_leg.send(token(1))
    assert [await run.events.get(), await run.events.get()] == [token(0), token(1)]
    prefill_leg.hang_up()
    await decode_leg.finish(token(2), finished(3))
    assert await run.outcome() == [token(2), finished(3)]
    assert run.attempt.prefill is None


async def test_a_failure_of_decode_between_tokens_stops_prefill(run, prefill, decode):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await decode_leg.send(token(1))
    assert [await run.events.get(), await run.events.get()] == [token(0), token(1)]
    decode_leg.hang_up()
    with pytest.raises(PeerGone):
        await run.task
    await prefill_leg.closed.wait()


@pytest.mark.parametrize("indices", [[0], [2], [1, 1], [1, 3], [1, 2, 1]])
async def test_a_token_that_is_not_due_is_never_given(client, prefill, decode, indices):
    async def script(leg):
        await leg.send(*(token(index) for index in indices), finished(9))

    prefill.script, decode.script = play_prefill, script
    run = Run(client, Route(prefill.record, decode.record))
    with pytest.raises(RemoteProtocolError, match="was due"):
        await run.task
    given = [event.index for event in run.seen()]
    assert given == list(range(len(given)))


@pytest.mark.parametrize(
    "events",
    [
        [token(1)],
        [parked()],
        [released()],
        [token(0), token(1)],
        [token(0), released()],
        [token(0), parked(), parked()],
        [token(0), parked(), finished(1)],
    ],
    ids=lambda events: "-".join(type(event).__name__ for event in events),
)
async def test_prefill_that_breaks_the_order_of_its_events(run, prefill, decode, events):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    await prefill_leg.finish(*events)
    with pytest.raises(RemoteProtocolError):
        await run.task
    await decode_leg.closed.wait()


async def test_decode_that_breaks_the_order_of_its_events(client, prefill, decode):
    async def script(leg):
        await leg.send(token(1), parked())

    prefill.script, decode.script = play_prefill, script
    with pytest.raises(RemoteProtocolError, match="Parked"):
        await Run(client, Route(prefill.record, decode.record)).task


@pytest.mark.parametrize("reason", ["cancelled", "error"])
async def test_an_aborted_request_is_not_an_answer(client, prefill, decode, reason):
    async def script(leg):
        await leg.send(token(1), finished(2, reason=reason))

    prefill.script, decode.script = play_prefill, script
    with pytest.raises(PeerError, match=reason):
        await Run(client, Route(prefill.record, decode.record)).task


@pytest.mark.parametrize("num_events", [0, 1, 2])
async def test_an_attempt_that_is_given_up_closes_both_legs(run, prefill, decode, num_events):
    prefill_leg, decode_leg = await prefill.next_leg(), await decode.next_leg()
    if num_events > 0:
        await prefill_leg.send(token(0), parked())
        await run.events.get()
    if num_events > 1:
        await decode_leg.send(token(1))
        await run.events.get()
    run.task.cancel()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()


async def test_one_worker_can_do_it_all(client, stack):
    async def script(leg):
        await leg.send(*(token(index) for index in range(4)), finished(4, "b1"))

    both = await stack.enter_async_context(ScriptedWorker("b1", "both", script))
    run = Run(client, Route(both.record, both.record))
    assert await run.outcome() == [*(token(index) for index in range(4)), finished(4, "b1")]
    assert (
        run.attempt.prefill
        == run.attempt.decode
        == receipt("b1", "decode", link="shm", form="direct", kv_bytes=4096, transfer_s=0.25)
    )


async def test_text_that_was_held_back_stays_with_the_last_event(client, prefill, decode):
    end = msgspec.structs.replace(finished(2), text="held")

    async def script(leg):
        await leg.send(token(1, ""), end)

    prefill.script, decode.script = play_prefill, script
    events = await Run(client, Route(prefill.record, decode.record)).outcome()
    assert isinstance(events[-1], Finished)
    assert events[-1].text == "held"
