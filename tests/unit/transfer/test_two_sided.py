"""Engines where prefill posts a send for each pull: what was posted runs on, whatever happens."""

import asyncio
from functools import partial

import pytest
from odd_engines import TwoSidedEngine
from transfer_kit import BareDecode, R, done_of, end_of, pull_of, until

from neuron_di.errors import KvExpired, KvMissing, LocalProtocolError, PeerGone, PeerTimeout
from neuron_di.transfer import ShmEngine, TransferToken, prefill_link
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Abort, Done, Never
from neuron_di.wire.handoff import SenderState

PULL = pull_of(engine="two-sided")
DONE = done_of()
ABORT = Abort(request_id=R, attempt=0, reason="why")


@pytest.fixture
def fabric():
    return {}


@pytest.fixture
async def prefill(cluster, fabric, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    make_transfer = partial(TwoSidedEngine, fabric=fabric)
    return cluster.prefill(make_transfer=make_transfer, kv_lease_s=0.5, quarantine_s=0.1)


@pytest.fixture
async def decode(cluster, fabric):
    return cluster.decode(make_transfer=partial(TwoSidedEngine, fabric=fabric))


async def test_a_hand_over(prefill, decode):
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert token.error() is None
    assert [float(decode.pool.tensor()[n].max()) for n in (7, 2)] == [3.0, 4.0]
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], Done)
    assert prefill.held_by == [None]


async def test_sends_are_posted_in_the_order_of_the_pulls(prefill, decode):
    names = [RequestId(name) for name in "abcd"]
    for n, name in enumerate(names):
        prefill.park(name, (n, 10 + n))
    readies = await asyncio.gather(*(decode.lookup(prefill, name) for name in names))
    order = [2, 0, 3, 1]
    tokens = [
        decode.buffer(prefill).pull(readies[n], [BlockId(2 * n), BlockId(2 * n + 1)]) for n in order
    ]
    for token in tokens:
        assert (await end_of(token)).error() is None
    assert prefill.transfer.sent == [[n, 10 + n] for n in order]
    assert [float(decode.pool.tensor()[2 * n].max()) for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


async def test_done_while_the_send_still_runs_holds_the_blocks(prefill, decode):
    prefill.transfer.is_holding_sends = True
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], Done)
    (held_by,) = prefill.held_by
    assert not held_by.is_done()
    prefill.transfer.end_sends()
    assert held_by.is_done()


@pytest.fixture
async def peer(prefill, fabric):
    """Its receive is posted when the test says so: there is no other half until then."""
    with BareDecode(prefill) as peer:
        await peer.connect()
        fabric[peer.incarnation] = TwoSidedEngine(prefill.pool, {})
        prefill.park()
        await peer.lookup()
        assert await peer.answers(PULL) == []
        yield peer


def end_send(prefill, peer):
    ((_, token),) = prefill.transfer._sends[peer.incarnation].values()
    token.complete()


@pytest.mark.parametrize("word", [ABORT, DONE], ids=["Abort", "Done"])
async def test_a_dropped_legs_blocks_wait_for_the_reader_and_the_send(prefill, peer, word):
    prefill.buffer.drop(R, 0, "cancelled")
    (held_by,) = prefill.held_by
    await peer.answers(word)
    assert prefill.buffer.lookup_dict == {}
    assert not held_by.is_done(), "the send still reads them"
    end_send(prefill, peer)
    assert held_by.is_done()


async def test_a_send_that_ended_first_still_waits_for_the_reader(prefill, peer):
    prefill.buffer.drop(R, 0, "cancelled")
    (held_by,) = prefill.held_by
    end_send(prefill, peer)
    assert not held_by.is_done()
    await peer.answers(ABORT)
    assert held_by.is_done()


async def test_abort_while_the_send_runs_holds_the_blocks(prefill, peer):
    await peer.answers(ABORT)
    ((_, error),) = prefill.ended
    assert isinstance(error, KvMissing)
    (held_by,) = prefill.held_by
    assert not held_by.is_done()
    end_send(prefill, peer)
    assert held_by.is_done()


async def test_lease_and_quarantine_end_but_the_send_still_runs(prefill, peer):
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvExpired)
    (held_by,) = prefill.held_by
    await until(lambda: prefill.buffer.lookup_dict == {})  # nor is the quarantine any longer
    assert not held_by.is_done()
    end_send(prefill, peer)
    assert held_by.is_done()


async def test_a_send_that_fails_is_told(prefill, peer):
    """A reader would wait for its half of it in vain (vllm#50754)."""
    ((_, token),) = prefill.transfer._sends[peer.incarnation].values()
    token.complete(PeerGone("the wire is cut"))
    never = await peer.receive()
    assert never == Never(request_id=R, attempt=0, reason="the send failed: peer_gone")
    assert isinstance(prefill.ended[0][1], PeerGone)
    assert prefill.buffer.lookup_dict[R, 0].state is SenderState.RECALLED
    await peer.answers(ABORT)
    assert prefill.held_by[0].is_done()


@pytest.mark.parametrize("failure", [PeerGone("cut"), RuntimeError("a bug")], ids=["error", "bug"])
async def test_a_receive_that_cannot_be_posted_fails_its_own_request(prefill, decode, failure):
    prefill.park()
    ready = await decode.lookup(prefill)
    decode.transfer.fails_with = failure
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)]))
    is_bug = isinstance(failure, RuntimeError)
    assert isinstance(token.error(), LocalProtocolError if is_bug else PeerGone)
    assert (decode.pool.tensor() == -1.0).all()
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)


async def test_a_send_that_cannot_be_posted_is_told(prefill, decode):
    prefill.park()
    ready = await decode.lookup(prefill)
    prefill.transfer.fails_with = RuntimeError("a bug")
    decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)])
    await until(lambda: decode.lost)
    ((key, error),) = decode.lost
    assert key == (R, 0)
    assert isinstance(error, KvMissing)
    assert "the send failed" in error.message
    assert prefill.counters.num_leases_ended == 0


async def start_unsent(prefill, decode):
    """(the buffer, its token of a receive whose send never comes)"""
    prefill.park()
    ready = await decode.lookup(prefill)
    prefill.transfer.fails_with = PeerGone("no wire")
    buffer = decode.buffer(prefill)
    return buffer, buffer.pull(ready, [BlockId(0), BlockId(1)])


async def test_a_receive_that_lost_its_send_is_cancelled_and_the_link_lives(prefill, decode):
    buffer, token = await start_unsent(prefill, decode)
    assert isinstance((await end_of(token)).error(), KvMissing)
    assert decode.transfer.calls == ["cancel"]
    prefill.park(RequestId("next"), (8, 9))
    assert (await decode.hand_over(prefill, [7, 2], RequestId("next"))).error() is None
    assert decode.buffer(prefill) is buffer


@pytest.fixture
async def hasty(cluster, fabric):
    """Its transfers are late soon."""
    make_transfer = partial(TwoSidedEngine, fabric=fabric)
    return cluster.decode(
        make_transfer=make_transfer,
        more_engines=[ShmEngine],
        transfer_timeout_s=0.05,
        heartbeat_s=0.02,
    )


async def test_what_is_being_written_may_end_before_its_link_does(prefill, decode, monkeypatch):
    """Prefill gave up one request: its neighbours go on."""
    monkeypatch.setattr(prefill_link, "CANCEL_S", 0.0)
    decode.transfer.can_cancel = False
    neighbour = asyncio.create_task(decode.lookup(prefill, RequestId("next")))
    buffer, token = await start_unsent(prefill, decode)
    await until(lambda: decode.lost)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert decode.transfer.calls == ["cancel"]
    assert not buffer.is_broken
    ((_, received),) = decode.transfer._receives[prefill.local.incarnation].values()
    received.complete(KvMissing("it ended"))
    await end_of(token)
    prefill.park(RequestId("next"), (8, 9))
    await neighbour


async def test_a_receive_that_cannot_be_cancelled_ends_its_link(prefill, hasty, monkeypatch):
    monkeypatch.setattr(prefill_link, "CANCEL_S", 0.02)
    decode = hasty
    decode.transfer.can_cancel = False
    buffer, token = await start_unsent(prefill, decode)
    await until(lambda: buffer.is_broken)
    assert "lost its send" in buffer.broken.message
    assert decode.transfer.calls == ["cancel", "cancel", "disconnect"]
    assert not token.is_done(), "its blocks may still be written"


async def start_stalled(prefill, decode):
    """(the buffer, its token of a receive that never ends)"""
    prefill.park()
    ready = await decode.lookup(prefill)
    prefill.transfer.post_send = lambda peer, send: TransferToken()  # never matched
    buffer = decode.buffer(prefill)
    return buffer, buffer.pull(ready, [BlockId(0), BlockId(1)])


async def test_a_receive_that_stalls_is_cancelled(both_ways, hasty):
    _, token = await start_stalled(both_ways, hasty)
    assert isinstance((await end_of(token)).error(), KvMissing)
    ((key, error),) = hasty.lost
    assert (key, type(error)) == ((R, 0), PeerTimeout)
    assert hasty.counters.num_lanes_failed == 1


@pytest.fixture
async def both_ways(cluster, fabric):
    make_transfer = partial(TwoSidedEngine, fabric=fabric)
    return cluster.prefill(make_transfer=make_transfer, more_engines=[ShmEngine])


@pytest.mark.parametrize("can_cancel", [True, False])
async def test_the_next_request_goes_by_another_way_than_the_one_that_stalled(
    both_ways, hasty, can_cancel
):
    """And whoever uses the first link still is not disturbed; it ends after the last of them."""
    neighbour = asyncio.create_task(hasty.lookup(both_ways, RequestId("neighbour")))
    hasty.transfer.can_cancel = can_cancel
    stalled, token = await start_stalled(both_ways, hasty)
    await until(lambda: hasty.lost)
    both_ways.park(RequestId("next"), (8, 9))
    moved = await hasty.hand_over(both_ways, [7, 2], RequestId("next"))
    assert (moved.error(), moved.engine) == (None, "shm")
    assert hasty.buffer(both_ways) is not stalled
    assert not neighbour.done()
    assert hasty.connector.buffers() == [hasty.buffer(both_ways), stalled]
    if can_cancel:
        assert token.is_done()
        assert not stalled.is_broken
        stalled.cancel(RequestId("neighbour"), 0, "it left")
        neighbour.cancel()
    await until(lambda: stalled.is_broken)
    assert hasty.transfer.calls[-1] == "disconnect"
    assert hasty.connector.buffers() == [hasty.buffer(both_ways)]
    await asyncio.gather(neighbour, return_exceptions=True)
    both_ways.park(RequestId("last"), (8, 9))
    assert (await hasty.hand_over(both_ways, [7, 2], RequestId("last"))).error() is None
