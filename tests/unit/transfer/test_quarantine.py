"""How long parked KV is kept: its lease, and the quarantine of blocks that may be read."""

import pytest
from transfer_kit import BareDecode, LeapClock, R, done_of, pull_of, swept, until

from neuron_di.clock import use_clock
from neuron_di.config import HandOverOptions
from neuron_di.errors import KvExpired, KvMissing
from neuron_di.wire import Abort, Hold, LookupAll, Never
from neuron_di.wire.handoff import SenderState

LOOKUP = LookupAll(request_id=R, attempt=0)
HOLD = Hold(request_id=R, attempt=0)
PULL = pull_of()
DONE = done_of()
ABORT = Abort(request_id=R, attempt=0, reason="why")
FOR_EVER_S = 1e9


@pytest.fixture(autouse=True)
def sweeps_often(monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)


@pytest.fixture
def leap():
    clock = LeapClock()
    with use_clock(clock):
        yield clock.leap


@pytest.fixture
async def prefill(cluster, leap):
    """With the limits as they are, but for the silence of peers."""
    return cluster.prefill(peer_silence_s=FOR_EVER_S)


@pytest.fixture
async def peer(prefill):
    with BareDecode(prefill) as peer:
        await peer.connect()
        yield peer


# Leases


def test_the_limits_that_these_tests_are_about():
    limits = HandOverOptions()
    assert (limits.kv_lease_s, limits.kv_lease_max_s, limits.quarantine_s) == (30.0, 480.0, 15.0)


async def test_a_lease_that_nobody_renews_is_30_s(prefill, peer, leap):
    prefill.park()
    await peer.lookup()
    leap(29.0)
    await swept(prefill)
    assert prefill.ended == []
    leap(1.0)
    await swept(prefill)
    ((key, error),) = prefill.ended
    assert key == (R, 0)
    assert isinstance(error, KvExpired)
    assert await peer.receive() == Never(request_id=R, attempt=0, reason="the lease ended")
    assert prefill.counters.num_leases_ended == 1


async def test_without_a_reader_the_lease_ends_too_and_the_blocks_are_free_at_once(prefill, leap):
    prefill.park()
    leap(30.0)
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)
    assert prefill.held_by == [None]
    await swept(prefill)
    assert prefill.buffer.lookup_dict == {}  # nor is its Ready kept for nobody


@pytest.mark.parametrize("word", [HOLD, LOOKUP], ids=["Hold", "LookupAll"])
async def test_a_reader_that_speaks_of_it_renews_the_lease(prefill, peer, leap, word):
    prefill.park()
    await peer.lookup()
    for _ in range(6):
        leap(25.0)
        await peer.answers(word)
        await swept(prefill)
    assert prefill.ended == []
    leap(30.0)
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)


async def test_a_ping_renews_no_lease(prefill, peer, leap):
    prefill.park()
    await peer.lookup()
    for _ in range(2):
        leap(15.0)
        await peer.answers()
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)


async def test_a_lease_is_renewed_up_to_480_s_only(prefill, peer, leap):
    prefill.park()
    await peer.lookup()
    for _ in range(19):
        leap(25.0)
        await peer.answers(HOLD)
        await swept(prefill)
    assert prefill.ended == []
    leap(5.0)
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)


async def test_a_pull_renews_the_lease_and_holds_go_on_to(prefill, peer, leap):
    prefill.park()
    await peer.lookup()
    for word in (PULL, HOLD, HOLD):
        leap(25.0)
        await peer.answers(word)
        await swept(prefill)
    assert prefill.buffer.lookup_dict[R, 0].state is SenderState.PULLING
    await peer.answers(DONE)
    assert prefill.ended == [((R, 0), DONE)]


async def test_a_process_that_was_suspended_finds_its_leases_ended(prefill, peer, leap):
    prefill.park()
    await peer.lookup()
    leap(120.0)
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)
    assert await peer.receive() == Never(request_id=R, attempt=0, reason="the lease ended")
    assert await peer.ask(PULL) == Never(request_id=R, attempt=0, reason="the lease ended")


# Quarantine


@pytest.fixture(params=["Ready was said", "it pulls"])
async def recalled(prefill, peer, request):
    """A leg that was dropped while decode may be copying its blocks."""
    prefill.park()
    await peer.lookup()
    if request.param == "it pulls":
        await peer.answers(PULL)
    prefill.buffer.drop(R, 0, "cancelled")
    assert await peer.receive() == Never(request_id=R, attempt=0, reason="cancelled")
    ((key, error),) = prefill.ended
    assert key == (R, 0)
    assert isinstance(error, KvMissing)
    (held_by,) = prefill.held_by
    assert not held_by.is_done()
    return held_by


@pytest.mark.parametrize("word", [DONE, ABORT], ids=["Done", "Abort"])
async def test_quarantined_blocks_are_free_with_the_readers_word(prefill, peer, recalled, word):
    assert await peer.answers(word) == []
    assert recalled.is_done()
    assert recalled.error() is None
    assert prefill.buffer.lookup_dict == {}
    assert len(prefill.ended) == 1  # the leg hears nothing twice


async def test_a_reader_that_does_not_let_go_is_waited_for_15_s(prefill, peer, leap, recalled):
    never = Never(request_id=R, attempt=0, reason="cancelled")
    for word in (HOLD, LOOKUP, PULL):
        leap(4.0)
        assert await peer.answers(word) == [never]
        await swept(prefill)
        assert not recalled.is_done()
    leap(3.0)
    await swept(prefill)
    assert recalled.is_done()
    assert prefill.buffer.lookup_dict == {}
    assert prefill.counters.num_leases_ended == 0
    assert await peer.answers(HOLD) == [never]


async def test_another_drop_of_recalled_blocks_changes_nothing(prefill, peer, recalled):
    prefill.buffer.drop(R, 0, "again")
    assert len(prefill.ended) == 1
    assert not recalled.is_done()
    await peer.answers(ABORT)
    assert recalled.is_done()


@pytest.mark.parametrize("is_pulling", [False, True])
async def test_a_reader_that_falls_silent_may_still_read(cluster, is_pulling):
    """A frozen process, say: its copy may go on when it thaws."""
    prefill = cluster.prefill(peer_silence_s=0.3, quarantine_s=0.3)
    with BareDecode(prefill) as peer:
        await peer.connect()
        prefill.park()
        await peer.lookup()
        if is_pulling:
            await peer.answers(PULL)
        await until(lambda: prefill.ended)
        ((_, error),) = prefill.ended
        assert isinstance(error, KvMissing)
        assert "silent" in error.message
        (held_by,) = prefill.held_by
        assert not held_by.is_done()
        assert prefill.connector.connections() == []
        await until(held_by.is_done)
        assert prefill.buffer.lookup_dict == {}


async def test_a_reader_that_never_says_anything_again_costs_a_lease_and_a_quarantine(
    prefill, peer, leap
):
    """It pulls, and never acknowledges."""
    prefill.park()
    await peer.lookup()
    await peer.answers(PULL)
    leap(30.0)
    await swept(prefill)
    assert isinstance(prefill.ended[0][1], KvExpired)
    (held_by,) = prefill.held_by
    assert not held_by.is_done()
    leap(15.0)
    await swept(prefill)
    assert held_by.is_done()
