"""Attempts fence: once a later one is expected, nothing of an earlier one has any effect."""

import asyncio

import pytest
from transfer_kit import BareDecode, R, done_of, pull_of, until

from neuron_di.errors import KvMissing, StaleAttempt
from neuron_di.wire import Abort, Done, Hold, LookupAll, Never, NotYet, Pull
from neuron_di.wire.handoff import SenderState

TAKEN_OVER = "a later attempt took over"


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill()


@pytest.fixture
async def peer(prefill):
    with BareDecode(prefill) as peer:
        await peer.connect()
        yield peer


def of_attempt(attempt):
    return {
        Hold: Hold(request_id=R, attempt=attempt),
        Pull: pull_of(attempt=attempt),
        Done: done_of(attempt),
        Abort: Abort(request_id=R, attempt=attempt, reason="why"),
        LookupAll: LookupAll(request_id=R, attempt=attempt),
    }


def never(attempt, reason=TAKEN_OVER):
    return Never(request_id=R, attempt=attempt, reason=reason)


async def test_an_older_attempt_is_refused(prefill):
    prefill.buffer.expect(R, 2)
    for older in (0, 1):
        with pytest.raises(StaleAttempt):
            prefill.buffer.expect(R, older)
    assert list(prefill.buffer.lookup_dict) == [(R, 2)]


async def test_an_attempt_is_used_once(prefill):
    prefill.park()
    with pytest.raises(KvMissing):
        prefill.buffer.expect(R, 0)
    assert prefill.buffer.lookup_dict[R, 0].state is SenderState.PARKED
    prefill.buffer.drop(R, 0, "cancelled")
    with pytest.raises(KvMissing):
        prefill.buffer.expect(R, 0)
    prefill.buffer.expect(R, 1)


@pytest.mark.parametrize("state", ["asked", "prefilling", "parked", "pulling"])
async def test_an_older_attempt_that_is_still_here_is_given_up(prefill, peer, state):
    if state != "asked":
        prefill.buffer.expect(R, 0)
    assert isinstance(await peer.lookup(), NotYet)
    if state in ("parked", "pulling"):
        prefill.buffer.park(prefill.ready())
        assert await peer.receive() == prefill.ready()
    if state == "pulling":
        await peer.answers(of_attempt(0)[Pull])
    assert prefill.buffer.lookup_dict[R, 0].state.value == state
    prefill.buffer.expect(R, 3)
    assert await peer.receive() == never(0)
    if state in ("asked", "prefilling"):  # no blocks to speak of
        assert prefill.ended == []
    else:
        ((key, error),) = prefill.ended
        assert key == (R, 0)
        assert isinstance(error, KvMissing)
        assert not prefill.held_by[0].is_done()
        await peer.answers(of_attempt(0)[Abort])
        assert prefill.held_by[0].is_done()
    assert list(prefill.buffer.lookup_dict) == [(R, 3)]


async def test_lookups_for_an_older_attempt_are_answered_never(prefill, peer):
    prefill.park(attempt=2)
    for older in (0, 1):
        assert await peer.lookup(attempt=older) == never(older)
    assert await peer.lookup(attempt=2) == prefill.ready(attempt=2)
    assert isinstance(await peer.lookup(attempt=3), NotYet)  # it may be on its way


async def test_nothing_that_is_said_of_an_older_attempt_touches_the_newer(prefill, peer):
    prefill.park(attempt=1)
    assert await peer.lookup(attempt=1) == prefill.ready(attempt=1)
    older = of_attempt(0)
    assert await peer.answers(older[Pull], older[Hold]) == [never(0), never(0)]
    assert await peer.answers(older[Done], older[Abort]) == []
    assert prefill.counters.num_stale == 4
    assert prefill.ended == []
    assert prefill.buffer.lookup_dict[R, 1].state is SenderState.PARKED
    await peer.answers(of_attempt(1)[Pull], of_attempt(1)[Done])
    assert prefill.ended == [((R, 1), of_attempt(1)[Done])]


async def test_a_later_lookup_does_not_fence_a_prefill_that_still_runs(prefill, peer):
    """Only the proxy mints attempts; a decode worker's word of one proves nothing."""
    prefill.buffer.expect(R, 0)
    assert isinstance(await peer.lookup(attempt=1000), NotYet)
    prefill.buffer.park(prefill.ready())
    assert await peer.lookup() == prefill.ready()
    prefill.buffer.expect(R, 1)


async def test_a_prefill_that_ends_after_it_was_fenced_says_so(prefill, peer):
    prefill.buffer.expect(R, 0)
    prefill.buffer.expect(R, 1)
    with pytest.raises(StaleAttempt):
        prefill.buffer.park(prefill.ready(attempt=0))
    assert await peer.lookup() == never(0)
    assert list(prefill.buffer.lookup_dict) == [(R, 1)]


async def test_what_is_remembered_of_older_attempts_is_little(prefill, peer):
    prefill.buffer.expect(R, 1000)
    assert len(prefill.buffer._over) == 0
    await peer.answers(*(of_attempt(n)[LookupAll] for n in range(100)))
    assert len(prefill.buffer._over) == 0, "a peer's questions push nothing out of memory"


async def test_a_decode_worker_waits_for_the_attempt_it_asked_for(cluster, prefill):
    decode = cluster.decode()
    first = asyncio.create_task(decode.lookup(prefill))
    await until(lambda: prefill.buffer.lookup_dict)
    ready = prefill.park(attempt=1)
    with pytest.raises(KvMissing, match=TAKEN_OVER):
        await first
    assert await decode.lookup(prefill, attempt=1) == ready
