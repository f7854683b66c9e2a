"""Engines where prefill posts a send for each pull: what was posted runs on, whatever happens."""

import asyncio
from functools import partial

import pytest
from odd_engines import TwoSidedEngine
from transfer_kit import BareDecode, R, end_of, until

from neuron_di.errors import KvExpired, KvMissing, LocalProtocolError, PeerGone
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Abort, Done, Never, Pull
from neuron_di.wire.handoff import SenderState

PULL = Pull(request_id=R, attempt=0, block_ids=[0, 1])
DONE = Done(request_id=R, attempt=0, kv_bytes=8, transfer_s=0.25)
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
        await peer.shake_hands()
        fabric[peer.incarnation] = TwoSidedEngine(prefill.pool, {})
        prefill.park()
        await peer.lookup()
        assert await peer.answers(PULL) == []
        yield peer


def end_send(prefill, peer):
    ((_, token),) = prefill.transfer._sends[peer.incarnation]
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
    ((_, token),) = prefill.transfer._sends[peer.incarnation]
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
