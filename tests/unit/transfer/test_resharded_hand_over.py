"""Workers of another layout hand over: bytes land beside the pool, are verified, then placed."""

import asyncio
from dataclasses import replace

import pytest
import torch
from odd_engines import HeldEngine, TwoSidedEngine
from transfer_kit import LAYOUT, NUM_BLOCKS, R, end_of, until

from neuron_di.errors import (
    CapacityError,
    KvChanged,
    KvCorrupt,
    KvMissing,
    LocalProtocolError,
    PeerGone,
    PeerRefused,
)
from neuron_di.transfer import ShmEngine, connector
from neuron_di.transfer.kv_receiver import KvReceiver
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import Done

WIDE = replace(LAYOUT, num_layers=2, num_kv_heads=4)
PAGE = 4096


def fill(prefill):
    """Every element another number."""
    pool = prefill.pool
    for rank in range(pool.layout.num_ranks):
        tensor = pool.tensor(rank)
        heads = list(pool.layout.heads_of(rank))
        for block_id in range(NUM_BLOCKS):
            for head, place in zip(heads, range(len(heads)), strict=True):
                part = tensor[block_id, :, :, place]
                numbers = torch.arange(part.numel()).reshape(part.shape)
                part[:] = (block_id * 7919 + head * 104729 + numbers) % 251


def tokens_of(pool, block_ids, num_tokens):
    """Per head of the model: [layer, K or V, token, dim]."""
    layout, heads = pool.layout, {}
    for rank in range(layout.num_ranks):
        tensor = pool.tensor(rank)[list(block_ids)].float()
        for place, head in enumerate(layout.heads_of(rank)):
            # [N, L, C, S, D] -> [L, C, N * S, D]
            part = tensor[:, :, :, place].permute(1, 2, 0, 3, 4)
            found = part.reshape(*part.shape[:2], -1, part.shape[-1])[:, :, :num_tokens]
            if head in heads:
                assert torch.equal(heads[head], found), "replicas differ"
            heads[head] = found
    return torch.stack([heads[head] for head in range(layout.num_kv_heads)])


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 8},
        {"block_size": 1},
        {"num_ranks": 2},
        {"num_ranks": 8, "block_size": 2},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_turned", [False, True], ids=["there", "and back"])
async def test_every_token_arrives_where_attention_reads_it(cluster, fields, is_turned):
    layouts = [WIDE, replace(WIDE, **fields)]
    source, destination = reversed(layouts) if is_turned else layouts
    prefill = cluster.prefill(layout=source, converts=True)
    decode = cluster.decode(layout=destination, converts=True)
    fill(prefill)
    num_tokens = 13
    block_ids = [5, 1, 11, 2, 9, 3, 15, 0, 4, 7, 6, 8, 10][: source.num_blocks_for(num_tokens)]
    ready = prefill.park(block_ids=tuple(block_ids), num_tokens=num_tokens)
    own = [14, 3, 8, 1, 0, 5, 9, 12, 2, 6, 4, 7, 11][: destination.num_blocks_for(num_tokens)]
    await decode.lookup(prefill)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(n) for n in own]))
    assert token.error() is None
    assert (token.engine, token.form) == ("shm", "landed")
    assert torch.equal(
        tokens_of(decode.pool, own, num_tokens), tokens_of(prefill.pool, block_ids, num_tokens)
    )
    used = 2 * 2 * 4 * 8 * num_tokens * (2 if source.dtype == "bfloat16" else 4)
    assert token.kv_bytes <= max(used, len(block_ids) * source.block_bytes)
    assert token.kv_bytes >= used
    assert decode.connector.landing.num_bytes_asked == 0
    others = [n for n in range(NUM_BLOCKS) if n not in own]
    for rank in range(destination.num_ranks):
        assert (decode.pool.tensor(rank)[others] == -1.0).all()
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], Done)
    assert prefill.ended[0][1].form == "landed"


async def test_replicas_of_heads_are_filled_by_what_was_verified(cluster):
    """Digests cover the first replica: the bytes of others are never brought from the peer."""
    layout = replace(WIDE, num_kv_heads=2, num_ranks=4)
    prefill, decode = cluster.prefill(layout=layout), cluster.decode(layout=layout)
    fill(prefill)
    expected = tokens_of(prefill.pool, (5, 1), 8)
    ready = prefill.park(block_ids=(5, 1))
    await decode.lookup(prefill)
    for replica in (1, 3):
        prefill.pool.tensor(replica).fill_(7.5)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(2), BlockId(9)]))
    assert token.error() is None
    assert (token.form, token.kv_bytes) == ("landed", layout.block_bytes)
    assert torch.equal(tokens_of(decode.pool, (2, 9), 8), expected)


@pytest.fixture
async def prefill(cluster):
    prefill = cluster.prefill()
    fill(prefill)
    return prefill


def larger(cluster, **options):
    return cluster.decode(layout=replace(LAYOUT, block_size=8), **options)


async def hands_over(prefill, decode, name="next", block_ids=(8, 9, 10), own=None):
    ready = prefill.park(RequestId(name), block_ids)
    await decode.lookup(prefill, RequestId(name))
    own = [4, 5][: len(block_ids) - 1] if own is None else own
    return await end_of(decode.buffer(prefill).pull(ready, list(map(BlockId, own))))


async def test_landing_memory_is_made_when_it_is_needed(cluster, prefill):
    same, other = cluster.decode(), larger(cluster, worker_id="decode-1")
    await same.buffer(prefill).connect()
    await other.buffer(prefill).connect()
    assert same.connector.landing._memory is None
    assert other.connector.landing._memory is not None


@pytest.mark.parametrize("num_held", [1, 2])
async def test_blocks_that_are_here_already_stay_as_they_are(cluster, prefill, num_held):
    decode = larger(cluster)
    ready = prefill.park(block_ids=(3, 4, 9))
    await decode.lookup(prefill)
    own = [BlockId(7), BlockId(2)]
    token = await end_of(decode.buffer(prefill).pull(ready, own, num_held=num_held))
    assert token.error() is None
    assert token.kv_bytes == (3 - num_held) * LAYOUT.block_bytes
    found = tokens_of(decode.pool, own, 12)
    first = num_held * LAYOUT.block_size
    assert (found[:, :, :, :first] == -1.0).all()
    assert torch.equal(
        found[:, :, :, first:], tokens_of(prefill.pool, (3, 4, 9), 12)[..., first:, :]
    )


async def test_a_flipped_bit_is_found_before_it_is_placed(cluster, prefill):
    decode = larger(cluster)
    ready = prefill.park(block_ids=(3, 4, 9))
    await decode.lookup(prefill)
    prefill.pool.view(BlockId(4))[17] ^= 4
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), KvCorrupt)
    assert (decode.pool.tensor() == -1.0).all()
    assert decode.counters.num_kv_mismatched == 1
    assert decode.connector.landing.num_bytes_asked == 0
    assert (await hands_over(prefill, decode)).error() is None


async def test_room_is_kept_until_its_kv_is_placed(cluster, prefill, monkeypatch):
    decode, place = larger(cluster), KvReceiver._place
    landing, kept = decode.connector.landing, []

    def seen(self, entry, ready, room):
        kept.append(landing._taken.get(room.start, 0) - room.start)
        place(self, entry, ready, room)

    monkeypatch.setattr(KvReceiver, "_place", seen)
    assert (await hands_over(prefill, decode)).error() is None
    assert kept == [PAGE]
    assert landing.num_bytes_asked == 0


async def test_kv_that_cannot_be_placed_is_abandoned_and_leaves_no_room_taken(
    cluster, prefill, monkeypatch
):
    class Told(ShmEngine):
        def commit(self, peer, receive):
            said.append("commit")
            return super().commit(peer, receive)

        def abandon(self, peer, receive):
            said.append("abandon")
            return super().abandon(peer, receive)

    def fail(*_):
        raise ValueError("no place")

    said, decode = [], larger(cluster, make_transfer=Told)
    monkeypatch.setattr(KvReceiver, "_place", fail)
    assert isinstance((await hands_over(prefill, decode)).error(), LocalProtocolError)
    assert said == ["abandon"]
    assert decode.connector.landing.num_bytes_asked == 0
    monkeypatch.undo()
    assert (await hands_over(prefill, decode, "again")).error() is None
    assert said == ["abandon", "commit"]


async def test_kv_that_was_given_up_meanwhile_is_refused(cluster, prefill):
    decode = larger(cluster, make_transfer=HeldEngine)
    ready = prefill.park(block_ids=(3, 4, 9))
    await decode.lookup(prefill)
    decode.transfer.spoil = lambda _: prefill.pool.retire([BlockId(3)])
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(7), BlockId(2)]))
    assert isinstance(token.error(), KvChanged)
    assert decode.connector.landing.num_bytes_asked == 0


async def test_formats_are_converted_only_where_both_say_so(cluster):
    other = replace(LAYOUT, dtype="bfloat16")
    for own, its in ((True, False), (False, True), (False, False)):
        prefill = cluster.prefill(converts=own)
        decode = cluster.decode(layout=other, converts=its)
        with pytest.raises(PeerRefused, match="KV layout"):
            await decode.buffer(prefill).connect()


# Room


async def test_a_prompt_that_never_fits_is_refused_by_the_options_name(cluster):
    prefill = cluster.prefill(layout=WIDE)
    decode = cluster.decode(layout=replace(WIDE, block_size=8), landing_bytes=PAGE)
    assert 3 * WIDE.block_bytes > PAGE
    ready = prefill.park(block_ids=(1, 2, 3))
    await decode.lookup(prefill)
    token = await end_of(decode.buffer(prefill).pull(ready, [BlockId(4), BlockId(5)]))
    assert isinstance(token.error(), CapacityError)  # another decode worker may have it
    assert token.error().retryable
    assert "--landing-memory" in token.error().message
    await until(lambda: prefill.ended)
    assert isinstance(prefill.ended[0][1], KvMissing)  # it need not wait for its lease
    assert (await hands_over(prefill, decode, block_ids=(8, 9))).error() is None


@pytest.mark.parametrize("stream_layers", ["on", "off"])
async def test_replicas_of_a_head_take_no_room(cluster, stream_layers):
    """A prompt as long as the decode worker's pool has what lands of 8 ranks with one head."""
    source = replace(LAYOUT, num_layers=2, head_dim=64, num_ranks=8)
    prefill = cluster.prefill(layout=source, stream_layers=stream_layers)
    decode = cluster.decode(
        layout=replace(source, num_ranks=1, block_size=8), stream_layers=stream_layers
    )
    token = await hands_over(prefill, decode, block_ids=range(NUM_BLOCKS), own=range(8))
    assert token.error() is None


async def test_whoever_connects_first_the_longest_prompt_has_room(cluster, monkeypatch):
    monkeypatch.setattr(connector, "LANDING_BYTES", PAGE)
    layout = replace(LAYOUT, num_layers=2, head_dim=64)
    decode = cluster.decode(layout=layout, stream_layers="on", context_tokens=NUM_BLOCKS * 4)
    alike = cluster.prefill(worker_id="a", layout=layout, stream_layers="on")
    other = cluster.prefill(worker_id="b", layout=replace(layout, block_size=8))
    await decode.buffer(alike).connect()
    token = await hands_over(other, decode, block_ids=range(8), own=range(16))
    assert token.error() is None


async def start_two(cluster, prefill, **options):
    """(decode, the token of the first, which has the room, that of the second, which waits)"""
    decode = larger(cluster, make_transfer=HeldEngine, landing_bytes=PAGE, **options)
    first, second = prefill.park(R, (1, 2)), prefill.park(RequestId("second"), (3, 4))
    await decode.lookup(prefill)
    await decode.lookup(prefill, RequestId("second"))
    decode.transfer.is_holding = True
    buffer = decode.buffer(prefill)
    return decode, buffer.pull(first, [BlockId(0)]), buffer.pull(second, [BlockId(1)])


async def test_who_finds_no_room_waits_for_it_and_keeps_its_lease(cluster, prefill):
    decode, first, second = await start_two(cluster, prefill)
    await until(lambda: decode.buffer(prefill)._entries["second", 0].ask is not None)
    await asyncio.sleep(0)
    assert not second.is_done()
    decode.transfer.is_holding = False
    decode.transfer.let_go()
    assert (await end_of(first)).error() is None
    assert (await end_of(second)).error() is None
    assert torch.equal(tokens_of(decode.pool, [1], 8), tokens_of(prefill.pool, [3, 4], 8))


async def test_who_waits_too_long_for_room_is_told(cluster, prefill):
    decode, first, second = await start_two(cluster, prefill, transfer_timeout_s=0.05)
    assert isinstance((await end_of(second)).error(), CapacityError)
    await until(lambda: prefill.ended)
    decode.transfer.let_go()
    await end_of(first)


@pytest.mark.parametrize("how", ["cancel", "drop", "link"])
async def test_who_waits_for_room_can_give_up(cluster, prefill, how):
    decode, first, second = await start_two(cluster, prefill)
    buffer = decode.buffer(prefill)
    if how == "cancel":
        buffer.cancel(RequestId("second"), 0, "the client left")
    elif how == "drop":
        prefill.buffer.drop(RequestId("second"), 0, "cancelled")
    else:
        buffer.close()
    error = (await end_of(second)).error()
    assert isinstance(error, PeerGone if how == "link" else KvMissing)
    assert decode.connector.landing._waiting == type(decode.connector.landing._waiting)()
    decode.transfer.let_go()
    await end_of(first)
    await until(lambda: decode.connector.landing.num_bytes_asked == 0)
    decode.connector.landing.check_integrity()


async def test_a_two_sided_engine_sends_what_lands(cluster):
    fabric = {}
    prefill = cluster.prefill(make_transfer=lambda pool: TwoSidedEngine(pool, fabric))
    fill(prefill)
    decode = larger(cluster, make_transfer=lambda pool: TwoSidedEngine(pool, fabric))
    ready = prefill.park(block_ids=(3, 4, 9), num_tokens=10)
    await decode.lookup(prefill)
    own = [BlockId(7), BlockId(2)]
    token = await end_of(decode.buffer(prefill).pull(ready, own))
    assert token.error() is None
    assert token.kv_bytes == 10 * LAYOUT.block_bytes // LAYOUT.block_size
    assert torch.equal(tokens_of(decode.pool, own, 10), tokens_of(prefill.pool, (3, 4, 9), 10))
