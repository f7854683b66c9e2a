"""Decode's end: what it waits for, and how each wait ends."""

import asyncio

import msgspec
import pytest
from bare_prefill import BarePrefill
from transfer_kit import WAIT_S, Prefill, R, end_of, kv_map, new_incarnation, until

from neuron_di.clock import Deadline
from neuron_di.errors import (
    DeadlinePassed,
    KvChanged,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import (
    Abort,
    Done,
    Handshake,
    Hold,
    KvMapInit,
    LookupAll,
    NotYet,
    Ping,
    Pong,
    Pull,
    encode_msgpack,
)


@pytest.fixture
async def decode(cluster):
    return cluster.decode()


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill()


@pytest.fixture
def bare(prefill):
    """Stands before the pool of `prefill`, which is a real one."""
    with BarePrefill(prefill.pool.region()) as bare:
        yield bare


def look_up(decode, address, request_id=R, timeout_s=WAIT_S):
    buffer = decode.connector.maybe_setup_buffer(address)
    waiting = buffer.lookup(request_id, 0, Deadline.after(timeout_s), decode.on_lost)
    return asyncio.create_task(waiting)


async def test_a_hand_over(prefill, decode):
    ready = prefill.park(block_ids=(7, 2, 11))
    assert await decode.lookup(prefill) == ready
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(n) for n in (0, 15, 4)]))
    assert token.error() is None
    tensor = decode.pool.tensor()
    assert [float(tensor[n].max()) for n in (0, 15, 4)] == [7.0, 2.0, 11.0]
    await until(lambda: prefill.ended)
    ((key, done),) = prefill.ended
    assert key == (R, 0)
    assert prefill.held_by == [None]
    assert done.kv_bytes == token.kv_bytes > 0
    assert done.transfer_s == token.transfer_s
    assert decode.buffer(prefill)._entries == {}
    assert decode.lost == []


async def test_lookup_waits_for_a_prefill_that_comes_later(prefill, decode):
    waiting = asyncio.create_task(decode.lookup(prefill))
    await until(lambda: prefill.buffer.lookup_dict)
    assert not waiting.done()
    ready = prefill.park()
    assert await waiting == ready


async def test_no_pull_before_ready_and_no_transfer_before_pull(bare, prefill, decode):
    """The order of a hand-over (N-08, N-12)."""
    waiting = look_up(decode, bare.address)
    await bare.hear(LookupAll)
    bare.send(NotYet(request_id=R, attempt=0))
    assert (decode.pool.tensor() == -1).all()
    bare.send(prefill.ready())
    ready = await waiting
    assert not any(isinstance(message, Pull) for message in bare.heard)
    buffer = decode.connector.maybe_setup_buffer(bare.address)
    buffer.pull(ready, [BlockId(0), BlockId(1)])
    await bare.hear(Done)
    kinds = [type(message) for message in bare.heard if not isinstance(message, Ping)]
    assert kinds == [Handshake, KvMapInit, LookupAll, Hold, Pull, Done]


async def test_prefill_says_never(prefill, decode):
    waiting = asyncio.create_task(decode.lookup(prefill))
    await until(lambda: prefill.buffer.lookup_dict)
    prefill.buffer.drop(R, 0, "cancelled")
    with pytest.raises(KvMissing, match="cancelled"):
        await waiting
    with pytest.raises(KvMissing, match="cancelled"):
        await decode.lookup(prefill)
    assert not decode.buffer(prefill).is_broken


async def test_the_deadline_of_a_lookup(prefill, decode):
    """The request's own time is over: that is no fault of the prefill worker's."""
    with pytest.raises(DeadlinePassed, match="not ready"):
        await look_up(decode, prefill.address, timeout_s=0.1)
    await until(lambda: prefill.buffer.lookup_dict == {})
    assert not decode.buffer(prefill).is_broken
    assert decode.buffer(prefill)._entries == {}
    with pytest.raises(KvMissing, match="stopped waiting"):  # nobody would pull it
        prefill.buffer.expect(R, 0)


async def test_the_deadline_of_a_lookup_holds_while_it_connects(decode, bare):
    with pytest.raises(DeadlinePassed):  # nobody answers the handshake
        await look_up(decode, bare.address, timeout_s=0.05)
    assert not decode.connector.maybe_setup_buffer(bare.address).is_broken


async def test_a_cancelled_lookup_frees_what_was_parked_for_it(prefill, decode):
    await decode.buffer(prefill).connect()
    waiting = asyncio.create_task(decode.lookup(prefill))
    await until(lambda: prefill.buffer.lookup_dict)
    prefill.park()
    waiting.cancel()  # Ready is on its way
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)
    assert decode.buffer(prefill)._entries == {}


async def test_one_waiter_that_goes_does_not_cancel_the_others(prefill, decode):
    first, second = (look_up(decode, prefill.address, RequestId(n)) for n in "ab")
    await asyncio.sleep(0)
    first.cancel()
    prefill.park(RequestId("b"))
    assert (await second).request_id == "b"
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_the_same_request_twice_is_our_bug_and_spares_the_first(prefill, decode):
    first = asyncio.create_task(decode.lookup(prefill))
    await until(lambda: prefill.buffer.lookup_dict)
    with pytest.raises(LocalProtocolError):
        await decode.lookup(prefill)
    ready = prefill.park()
    assert await first == ready


async def test_kv_given_up_before_the_pull_is_kv_changed(prefill, decode):
    ready = prefill.park()
    await decode.lookup(prefill)
    prefill.pool.retire([BlockId(4)])
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)]))
    assert isinstance(token.error(), KvChanged)
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_ids": [3, 16]},
        {"block_ids": [3, -1]},
        {"block_ids": [3, 2**40]},
        {"generations": [0, 1]},
        {"digests": [0, 0]},
        {"block_ids": [4, 3], "generations": [0, 0]},
    ],
    ids=str,
)
async def test_a_ready_that_lies_fails_its_own_request_only(bare, prefill, decode, fields):
    waiting = look_up(decode, bare.address)
    other = look_up(decode, bare.address, RequestId("other"))
    for _ in range(2):
        await bare.hear(LookupAll)
    bare.send(msgspec.structs.replace(prefill.ready(), **fields))
    buffer = decode.connector.maybe_setup_buffer(bare.address)
    token = await end_of(buffer.pull(await waiting, [BlockId(0), BlockId(1)]))
    assert isinstance(token.error(), NeuronDiError)
    assert (await bare.hear(Abort)).request_id == R
    bare.send(prefill.ready(RequestId("other")))
    token = await end_of(buffer.pull(await other, [BlockId(0), BlockId(1)]))
    assert token.error() is None


async def test_answers_for_nobody_are_ignored(bare, prefill, decode):
    waiting = look_up(decode, bare.address)
    await bare.hear(LookupAll)
    bare.send(prefill.ready(RequestId("nobody's")))
    bare.send(prefill.ready(attempt=1))
    bare.send(kv_map(prefill.pool.region()))
    for _ in range(2):
        bare.send(prefill.ready())
    assert await waiting == prefill.ready()
    bare.send(prefill.ready())
    bare.send(Pong(sequence=7))
    await bare.hear(Ping)
    assert not decode.connector.maybe_setup_buffer(bare.address).is_broken


@pytest.mark.parametrize(
    "frames",
    [(b"",), (b"\xc1",), (b"a", b"b"), (encode_msgpack(Ping(sequence=1)),)],
    ids=["empty", "garbage", "two frames", "a decode worker's"],
)
async def test_a_peer_that_speaks_nonsense_is_given_up(bare, decode, frames):
    waiting = look_up(decode, bare.address)
    await bare.hear(LookupAll)
    bare.send_raw(*frames)
    with pytest.raises(RemoteProtocolError):
        await waiting
    assert decode.connector.connections() == []
    assert decode.counters.num_signals_refused == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"fd": 1_000_000}, PeerGone),
        ({"pid": 2**40}, PeerGone),
        ({"num_blocks": 2**62}, PeerGone),
        ({"incarnation": "another"}, StaleIncarnation),
    ],
)
async def test_a_pool_that_cannot_be_mapped(prefill, decode, fields, error):
    region = msgspec.structs.replace(prefill.pool.region(), **fields)
    with BarePrefill(region) as bare:
        address = msgspec.structs.replace(bare.address, incarnation=prefill.local.incarnation)
        waiting = look_up(decode, address)
        await bare.hear(KvMapInit)
        with pytest.raises(error):
            await waiting
    assert decode.transfer._peers == {}


async def test_a_peer_that_falls_silent_fails_who_waits(cluster, bare):
    decode = cluster.decode(peer_silence_s=0.2, heartbeat_s=0.02)
    waiting = look_up(decode, bare.address)
    await bare.hear(LookupAll)
    with pytest.raises(PeerGone, match="said nothing"):
        await waiting
    assert decode.transfer._peers == {}


async def test_after_silence_the_next_request_makes_a_link_that_works(cluster, prefill):
    decode = cluster.decode()
    broken = decode.buffer(prefill)
    await broken.connect()
    broken._link.break_off(PeerGone("said nothing"))
    ready = prefill.park()
    assert await decode.lookup(prefill) == ready
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)]))
    assert token.error() is None
    assert decode.buffer(prefill) is not broken


async def test_a_live_peer_is_never_called_silent(cluster, prefill):
    decode = cluster.decode(peer_silence_s=1.0, heartbeat_s=0.02)
    buffer = decode.buffer(prefill)
    await buffer.connect()
    await until(lambda: buffer._link._num_pings > 100)
    assert not buffer.is_broken


async def test_close_ends_every_waiter_with_peer_gone(prefill, decode):
    waiting = [look_up(decode, prefill.address, RequestId(str(n))) for n in range(5)]
    await until(lambda: len(prefill.buffer.lookup_dict) == 5)
    buffer = decode.buffer(prefill)
    buffer.close()
    buffer.close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [outcome.code for outcome in outcomes] == ["peer_gone"] * 5
    token = buffer.pull(prefill.ready(), [BlockId(0), BlockId(1)])
    assert isinstance(token.error(), PeerGone)
    with pytest.raises(PeerGone):
        await buffer.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost)


async def test_two_workers_of_one_address_do_not_take_each_other(cluster):
    """A port is used anew by another process, while the registry still names the old one."""
    old = Prefill()
    address = old.address
    await old.close()
    cluster.prefill(signal_port=address.signal_port)
    with pytest.raises(StaleIncarnation):
        await look_up(cluster.decode(), address)
    wrong = msgspec.structs.replace(address, incarnation=new_incarnation())
    with pytest.raises(StaleIncarnation):
        await look_up(cluster.decode(), wrong)
