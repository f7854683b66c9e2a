"""No token is computed from KV that is not, byte for byte, what this request's prefill computed."""

import asyncio
import logging

import msgspec
import pytest
from bare_prefill import BarePrefill
from odd_engines import HeldEngine
from transfer_kit import NUM_BLOCKS, WAIT_S, R, end_of, until

from neuron_di.clock import Deadline
from neuron_di.errors import (
    KvChanged,
    KvCorrupt,
    KvMissing,
    LocalProtocolError,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.kv import block_digests
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Abort, LookupAll, Pull
from neuron_di.wire.handoff import SenderState

OTHER = RequestId("other")


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill()


@pytest.fixture
async def decode(cluster):
    return cluster.decode(make_transfer=HeldEngine)


@pytest.fixture
def bare(prefill):
    """Stands before the pool of `prefill`, which is a real one."""
    with BarePrefill(prefill.pool.region()) as bare:
        yield bare


def events(caplog):
    return [record.message for record in caplog.records if record.levelno >= logging.ERROR]


async def hands_over(prefill, decode, name="next"):
    """Whatever happened before, the next request is served."""
    prefill.park(RequestId(name), (8, 9))
    token = await decode.hand_over(prefill, [14, 15], RequestId(name))
    return token.error() is None and float(decode.pool.tensor()[14].max()) == 8.0


# Whose KV it is


@pytest.mark.parametrize(
    "fields",
    [
        {"worker_id": "prefill-1"},
        {"incarnation": "f0" * 16},
        {"layout_digest": "another"},
        {"digests": [1]},
        {"digests": []},
        {"digests": [1, 2, 3]},
        {"generations": [0]},
        {"block_ids": [3]},
        {"block_ids": []},
    ],
    ids=str,
)
async def test_a_ready_of_somebody_elses_kv_is_refused(bare, prefill, decode, caplog, fields):
    buffer = decode.connector.maybe_setup_buffer(bare.address)
    waiting = asyncio.create_task(buffer.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost))
    await bare.hear(LookupAll)
    bare.send(msgspec.structs.replace(prefill.ready(), **fields))
    with pytest.raises(KvCorrupt, match="not this request's"):
        await waiting
    assert (await bare.hear(Abort)).reason == "kv_corrupt"
    assert not any(isinstance(message, Pull) for message in bare.heard)
    assert decode.counters.num_kv_mismatched == 1
    assert events(caplog) == ["kv_identity_mismatch"]
    assert not buffer.is_broken
    other = asyncio.create_task(buffer.lookup(OTHER, 0, Deadline.after(WAIT_S), decode.on_lost))
    while (await bare.hear(LookupAll)).request_id != OTHER:
        pass
    bare.send(prefill.ready(OTHER))
    assert await other == prefill.ready(OTHER)


async def test_a_ready_of_another_attempt_is_not_taken_for_this_one(bare, prefill, decode):
    buffer = decode.connector.maybe_setup_buffer(bare.address)
    waiting = asyncio.create_task(buffer.lookup(R, 1, Deadline.after(WAIT_S), decode.on_lost))
    await bare.hear(LookupAll)
    bare.send(prefill.ready(attempt=0))
    bare.send(prefill.ready(attempt=2))
    await until(lambda: decode.counters.num_stale == 2)
    assert not waiting.done()
    bare.send(prefill.ready(attempt=1))
    assert (await waiting).attempt == 1


# What bytes they are


async def is_refused(prefill, decode, caplog, ready, block_ids):
    """The pull of these ends with KvCorrupt, in every respect."""
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(n) for n in block_ids]))
    assert isinstance(token.error(), KvCorrupt)
    assert decode.counters.num_kv_mismatched == 1
    assert events(caplog) == ["kv_mismatch"]
    await until(lambda: prefill.ended)
    ((key, error),) = prefill.ended
    assert key == (ready.request_id, 0)
    assert isinstance(error, KvMissing)
    assert "kv_corrupt" in error.message  # so said Abort
    assert decode.buffer(prefill)._entries == {}
    return await hands_over(prefill, decode)


def flip(pool, block_id, bit):
    pool.view(BlockId(block_id))[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bit", [0, 7, 500, -1], ids=str)
async def test_one_flipped_bit_in_any_block(prefill, decode, caplog, place, bit):
    num_bits = 8 * prefill.pool.layout.block_bytes
    block_ids = (5, 0, 11)

    def spoil(_):
        decode.transfer.spoil = lambda _: None
        flip(decode.pool, block_ids[place], bit % num_bits)

    ready = prefill.park(block_ids=(7, 2, 9))
    await decode.lookup(prefill)
    decode.transfer.spoil = spoil
    assert await is_refused(prefill, decode, caplog, ready, block_ids)


async def test_blocks_that_arrived_in_each_others_place(prefill, decode, caplog):
    def spoil(block_ids):
        decode.transfer.spoil = lambda _: None
        tensor = decode.pool.tensor()
        tensor[list(block_ids)] = tensor[list(block_ids)].flip(0)

    ready = prefill.park()
    await decode.lookup(prefill)
    decode.transfer.spoil = spoil
    assert await is_refused(prefill, decode, caplog, ready, (0, 1))


async def test_a_block_that_never_arrived(prefill, decode, caplog):
    def spoil(block_ids):
        decode.transfer.spoil = lambda _: None
        decode.pool.tensor()[block_ids[-1]] = -1.0

    ready = prefill.park()
    await decode.lookup(prefill)
    decode.transfer.spoil = spoil
    assert await is_refused(prefill, decode, caplog, ready, (0, 1))


@pytest.mark.parametrize("are_equal", [False, True], ids=["other bytes", "equal bytes"])
async def test_the_right_bytes_of_another_request(prefill, decode, caplog, are_equal):
    """Even where two requests' bytes are equal: a digest says whose they are."""
    if are_equal:
        prefill.pool.tensor()[[5, 6]] = prefill.pool.tensor()[[3, 4]]
    others = prefill.ready(OTHER, (5, 6))
    fields = {"block_ids": others.block_ids, "digests": others.digests}
    prefill.buffer.expect(R, 0)
    prefill.buffer.park(msgspec.structs.replace(prefill.ready(), **fields))
    ready = await decode.lookup(prefill)
    assert await is_refused(prefill, decode, caplog, ready, (0, 1))


async def test_the_right_bytes_of_an_earlier_attempt(prefill, decode, caplog):
    earlier = prefill.ready(attempt=1)
    prefill.buffer.expect(R, 0)
    prefill.buffer.park(msgspec.structs.replace(earlier, attempt=0))
    ready = await decode.lookup(prefill)
    assert await is_refused(prefill, decode, caplog, ready, (0, 1))


async def test_bytes_that_changed_before_they_were_copied(prefill, decode, caplog):
    """No generation tells of a stray write; the digest does."""
    ready = prefill.park()
    await decode.lookup(prefill)
    flip(prefill.pool, 4, 100)
    assert await is_refused(prefill, decode, caplog, ready, (0, 1))


async def test_kv_that_is_right_is_never_refused(prefill, decode):
    """The control of all of the above."""
    for n in range(20):
        assert await hands_over(prefill, decode, f"r{n}")
    assert decode.counters.num_kv_mismatched == 0


# In which order


@pytest.fixture
def watched(decode, monkeypatch):
    """The calls of decode's engine, and between them which blocks are read."""
    calls = decode.transfer.calls

    def digests(memory, block_ids, *args, **fields):
        if memory == decode.pool.memory():
            calls.extend(f"read {block_id}" for block_id in block_ids)
        return block_digests(memory, block_ids, *args, **fields)

    monkeypatch.setattr("neuron_di.kv.pool.block_digests", digests)
    return calls


async def test_the_fence_comes_after_the_copy_and_before_any_byte_is_read(prefill, decode, watched):
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert token.error() is None
    assert watched == ["copied", "fence", "read 7", "read 2", "commit"]
    assert token.verify_s > 0


async def test_what_is_not_right_is_not_taken(prefill, decode, watched):
    ready = prefill.park()
    await decode.lookup(prefill)
    flip(prefill.pool, 4, 100)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), KvCorrupt)
    assert "commit" not in watched


async def test_blocks_that_were_used_again_are_not_called_corrupt(
    prefill, decode, watched, monkeypatch
):
    ready = prefill.park()
    await decode.lookup(prefill)
    fence = decode.transfer.fence

    def end_of_the_lease(peer):
        fence(peer)
        prefill.pool.retire([BlockId(3)])
        decode.pool.tensor()[7] = 99.0  # as if the next request's had been read

    monkeypatch.setattr(decode.transfer, "fence", end_of_the_lease)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), KvChanged)
    assert decode.counters.num_kv_mismatched == 0
    assert "commit" not in watched


async def test_kv_that_was_given_up_while_it_was_read_is_not_taken(prefill, decode, watched):
    ready = prefill.park()
    await decode.lookup(prefill)
    decode.transfer.spoil = lambda _: prefill.pool.retire([BlockId(3)])  # the bytes are equal
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), KvChanged)
    assert watched[-1] == "commit"
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)


async def test_of_a_copy_that_failed_no_byte_is_read(prefill, decode, watched):
    outside = msgspec.structs.replace(prefill.ready(), block_ids=[3, NUM_BLOCKS])
    prefill.buffer.expect(R, 0)
    prefill.buffer.park(outside)
    ready = await decode.lookup(prefill)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), RemoteProtocolError)
    assert watched == ["copied"]


async def test_what_cannot_be_verified_is_not_delivered(prefill, decode, monkeypatch):
    def fail(_):
        raise OSError("the device is gone")

    ready = prefill.park()
    await decode.lookup(prefill)
    with monkeypatch.context() as patch:
        patch.setattr(decode.transfer, "fence", fail)
        token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), LocalProtocolError)
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)
    assert await hands_over(prefill, decode)


# In which time


@pytest.mark.parametrize("is_cancelled_too", [False, True])
async def test_a_transfer_that_stalls_fails_its_leg_and_keeps_its_blocks(
    cluster, prefill, is_cancelled_too
):
    decode = cluster.decode(make_transfer=HeldEngine, transfer_timeout_s=0.05)
    ready = prefill.park()
    await decode.lookup(prefill)
    decode.transfer.is_holding = True
    token = decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)])
    await until(lambda: decode.lost)
    ((key, error),) = decode.lost
    assert key == (R, 0)
    assert isinstance(error, PeerTimeout)
    if is_cancelled_too:  # as the leg does that heard it
        decode.buffer(prefill).cancel(R, 0, "the decode leg ended")
    assert not token.is_done(), "the copy may still write"
    await until(lambda: prefill.buffer.lookup_dict[R, 0].state is SenderState.PULLING)
    assert prefill.ended == []
    decode.transfer.is_holding = False
    assert await hands_over(prefill, decode)  # others are not held up
    decode.transfer.let_go()
    await end_of(token)
    assert isinstance(token.error(), KvMissing)
    await until(lambda: len(prefill.ended) == 2)
    assert isinstance(prefill.ended[1][1], KvMissing)
    assert prefill.held_by[1] is None
    assert len(decode.lost) == 1


async def test_a_stall_of_what_nobody_waits_for_is_told_to_nobody(cluster, prefill):
    decode = cluster.decode(make_transfer=HeldEngine, transfer_timeout_s=0.05)
    ready = prefill.park()
    await decode.lookup(prefill)
    decode.transfer.is_holding = True
    buffer = decode.buffer(prefill)
    token = buffer.pull(ready, [BlockId(0), BlockId(1)])
    late = buffer._entries[R, 0].late
    buffer.cancel(R, 0, "cancelled")
    deadline = Deadline.after(0.1)
    await until(lambda: deadline.has_passed() and late.when() < asyncio.get_running_loop().time())
    await asyncio.sleep(0)
    decode.transfer.let_go()
    await end_of(token)
    assert decode.lost == []
