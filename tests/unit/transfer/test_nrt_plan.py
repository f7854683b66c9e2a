"""Both ends of a pair of devices reckon the same messages, and a peer's numbers are bounded."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_di.errors import ConfigError, PeerRefused, RemoteProtocolError
from neuron_di.kv import DeviceKv, KvGeometry, KvLayout, KvMap, planner
from neuron_di.transfer.nrt_plan import DevicePlan, device_geometry, region_of
from neuron_di.wire import NrtRegion, Offer

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, head_dim=8, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 5
ITEM = 2
HALF_BYTES = LAYOUT.block_bytes // LAYOUT.block_size // 2  # of a token: its keys, or its values
RANKS = (1, 2, 3, 4, 8)
# As large as models are: 80 layers, slots of 8,192 tokens.
LARGE = KvLayout(num_layers=80, num_kv_heads=8, head_dim=128, block_size=8192, dtype="bfloat16")
LARGE_BYTES = LARGE.block_bytes // LARGE.block_size // 2  # of a token: its keys, or its values


class Sized:
    core, nrt = 0, None

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes


def device(num_ranks, keys="HSD", values="HSD", pad=8, num_heads=8):
    geometry = KvGeometry.of_rank_tensors(
        KvMap.of_tensor_parallel(num_ranks, LAYOUT.num_kv_heads, num_heads),
        num_layers=LAYOUT.num_layers,
        head_dim=LAYOUT.head_dim,
        block_size=LAYOUT.block_size + pad,
        num_blocks=NUM_BLOCKS,
        dtype=LAYOUT.dtype,
        keys=keys,
        values=values,
    )
    tensors = [Sized(num_bytes) for _, num_bytes in sorted(geometry.tensor_bytes().items())]
    return DeviceKv(tensors=tensors, geometry=geometry, lncs=tuple(range(7, 7 + num_ranks)))


def region(of, **changed):
    made = region_of(of, NUM_BLOCKS, host="10.0.0.1", port=5, secret=bytes(32), is_tls=False)
    return msgspec.structs.replace(made, **changed)


def geometry(num_ranks, **fields):
    """As its own worker has it."""
    return DeviceKv.used_part(device(num_ranks, **fields).geometry, LAYOUT.block_size)


@pytest.mark.parametrize("keys", ["HSD", "HDS", "SHD"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_peer_knows_the_geometry_from_what_it_is_told(num_ranks, keys):
    told = region(device(num_ranks, keys=keys))
    assert Offer.of("nrt", told).read() == told
    known, own = device_geometry(told, LAYOUT), geometry(num_ranks, keys=keys)
    assert known.heads == own.heads
    assert known.strides == own.strides
    assert (known.tensors == own.tensors).all()
    assert (known.offsets == own.offsets).all()
    assert known.block_size == LAYOUT.block_size


def test_a_device_of_other_tensors_cannot_be_told_of():
    known = device(2)
    offsets = known.geometry.offsets + 2
    odd = replace(known.geometry, offsets=offsets)
    bigger = [Sized(tensor.num_bytes + 2) for tensor in known.tensors]
    with pytest.raises(ConfigError, match="one tensor per rank"):
        region(DeviceKv(tensors=bigger, geometry=odd, lncs=known.lncs))
    wide = replace(known.geometry.strides[0], block=known.geometry.strides[0].block + 2)
    odd = replace(known.geometry, strides=(wide, wide), num_blocks=1)
    with pytest.raises(ConfigError, match="array of slots"):
        region(DeviceKv(tensors=bigger, geometry=odd, lncs=known.lncs))


def slots_of(geometry, seed):
    """Bytes of each tensor."""
    sizes = geometry.tensor_bytes()
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, sizes[number], np.uint8) for number in range(len(sizes))]


def read(geometry, tensors, blocks, num_tokens, replica):
    """[L, C, heads, tokens, D] of one replica of each head, numbers as bytes."""
    found = np.zeros((geometry.num_layers, 2, 4, num_tokens, geometry.head_dim, ITEM), np.uint8)
    for head, holders in enumerate(geometry.holders()):
        for layer in range(geometry.num_layers):
            rank, place = holders[replica(layer, len(holders))]
            for c, strides in enumerate(geometry.strides):
                array = tensors[geometry.tensors[rank, layer, c]]
                for token in range(num_tokens):
                    block, position = divmod(token, geometry.block_size)
                    start = blocks[block] * strides.block + place * strides.head
                    start += position * strides.token
                    for dim in range(geometry.head_dim):
                        at = start + dim * strides.dim
                        found[layer, c, head, token, dim] = array[at : at + ITEM]
    return found


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.tuples(st.sampled_from(RANKS), st.sampled_from(RANKS)),
    keys=st.sampled_from(["HSD", "HDS"]),
    pads=st.tuples(st.sampled_from([0, 8]), st.sampled_from([0, 8])),
    sources=st.permutations(range(NUM_BLOCKS)),
    destinations=st.permutations(range(NUM_BLOCKS)),
    num_tokens=st.integers(1, 3 * LAYOUT.block_size),
)
def test_both_ends_reckon_the_same_messages_and_they_are_right(
    ranks, keys, pads, sources, destinations, num_tokens
):
    ends = list(zip(ranks, pads, strict=True))
    regions = [region(device(count, keys=keys, pad=pad)) for count, pad in ends]
    own = [geometry(count, keys=keys, pad=pad) for count, pad in ends]
    plans = [
        DevicePlan(own[0], device_geometry(regions[1], LAYOUT)),
        DevicePlan(device_geometry(regions[0], LAYOUT), own[1]),
    ]
    assert plans[0].pairs == plans[1].pairs
    count = LAYOUT.num_blocks_for(num_tokens)
    ids = sources[:count], destinations[:count]
    sent, received = (plan.moves(*ids, num_tokens) for plan in plans)
    assert sent.digest() == received.digest()
    is_by_head = keys == "HDS" and pads[0] == pads[1]
    num_key_tokens = count * (LAYOUT.block_size + pads[0]) if is_by_head else num_tokens
    assert sent.num_bytes == (num_key_tokens + num_tokens) * HALF_BYTES
    from_, to = (
        slots_of(device(count, keys=keys, pad=pad).geometry, seed)
        for seed, (count, pad) in enumerate(ends)
    )
    before = [tensor.copy() for tensor in to]
    (pairs, ours), (its_pairs, theirs) = sent.in_turns(), received.in_turns()
    assert (pairs == its_pairs).all()
    for pair, i, j in zip(pairs.tolist(), ours.tolist(), theirs.tolist(), strict=True):
        source_rank, destination_rank = plans[0].pairs[pair]
        assert sent.lengths[i] == received.lengths[j]
        source = int(sent.source_tensors[i]), int(sent.source_offsets[i])
        target = int(received.destination_tensors[j]), int(received.destination_offsets[j])
        assert source[0] % ranks[0] == source_rank
        assert target[0] % ranks[1] == destination_rank
        length = int(sent.lengths[i])
        assert source[1] + length <= len(from_[source[0]])
        to[target[0]][target[1] : target[1] + length] = from_[source[0]][
            source[1] : source[1] + length
        ]
    expected = read(own[0], from_, ids[0], num_tokens, lambda layer, n: layer % n)
    came = read(own[1], to, ids[1], num_tokens, lambda layer, n: layer % n)
    if ranks[0] <= 4:  # each head once: there is one replica to send
        assert (came == expected).all()
    slot_bytes = own[1].strides[0].block
    for slot in set(range(NUM_BLOCKS)) - set(ids[1]):
        part = slice(slot * slot_bytes, (slot + 1) * slot_bytes)
        assert all((a[part] == b[part]).all() for a, b in zip(to, before, strict=True))
    others = {own[1].rank_of_tensor()[n] for n in range(len(to))}
    assert others == set(range(ranks[1]))


def test_messages_go_in_turns_over_pairs_and_in_order_within_each():
    moves = DevicePlan(geometry(2), geometry(1)).moves([0], [1], 3)
    pairs, rows = replace(moves, starts=np.array([0, 1, 1, 4, 6])).in_turns()
    assert pairs.tolist() == [0, 2, 3, 2, 3, 2]
    assert rows.tolist() == [0, 1, 4, 2, 5, 3]


def test_messages_of_other_lengths_have_another_digest():
    plan = DevicePlan(geometry(2), geometry(1))
    digests = {plan.moves([0], [1], count).digest() for count in range(1, 17)}
    digests |= {plan.moves([0, 1], [1, 0], 32).digest()}
    assert len(digests) == 17
    assert plan.moves([0], [1], 3).digest() == plan.moves([2], [3], 3).digest()


@pytest.mark.parametrize(("mine", "its"), [("HSD", "HDS"), ("HDS", "HSD"), ("HDS", "SHD")])
def test_numbers_in_another_order_do_not_go_from_device_to_device(mine, its):
    with pytest.raises(PeerRefused, match="orders"):
        DevicePlan(geometry(2, keys=mine), geometry(2, keys=its))


def test_another_model_is_refused():
    other = replace(geometry(2), num_layers=3)
    with pytest.raises(PeerRefused, match="num_layers"):
        DevicePlan(other, geometry(2))


@pytest.mark.parametrize(
    ("sources", "destinations", "num_tokens"),
    [
        ([], [], None),
        ([0], [0], 0),
        ([0], [0], -1),
        ([0], [0], 17),
        ([0, 1], [0, 1], 16),
        ([0], [0, 1], 16),
        ([0, 0], [0, 1], None),
        ([0, 1], [2, 2], None),
        ([NUM_BLOCKS], [0], 1),
        ([0], [NUM_BLOCKS], 1),
        ([-1], [0], 1),
        ([2**64], [0], 1),
        ([None], [0], 1),
    ],
)
def test_transfers_that_cannot_be_are_refused(sources, destinations, num_tokens):
    with pytest.raises(RemoteProtocolError):
        DevicePlan(geometry(2), geometry(1)).moves(sources, destinations, num_tokens)


def test_numbers_of_a_region_are_bounded():
    told = region(device(2))
    for fields in (
        {"lncs": [-1, 0]},
        {"lncs": [0, 4096]},
        {"lncs": list(range(300))},
        {"heads": [[-2], [0]]},
        {"heads": [[4096], [0]]},
        {"heads": [[0] * 300, [1] * 300]},
        {"keys": "DSH"},
        {"block_size": 0},
        {"block_size": (1 << 24) + 1},
        {"num_blocks": 0},
        {"port": 65536},
        {"secret": bytes(31)},
        {"host": ""},
    ):
        raw = msgspec.msgpack.encode(msgspec.structs.replace(told, **fields))
        with pytest.raises(RemoteProtocolError):
            Offer(engine="nrt", region=msgspec.Raw(raw)).read()
    assert isinstance(Offer.of("nrt", told).read(), NrtRegion)


def test_a_device_larger_than_any_is_refused():
    layout = replace(LAYOUT, head_dim=1 << 16, num_layers=1)
    told = region(device(2), block_size=1 << 24, num_blocks=1 << 24)
    with pytest.raises(RemoteProtocolError, match="size"):
        device_geometry(told, layout)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lncs": [1]}, "one for each rank"),
        ({"lncs": [1, 1]}, "one for each rank"),
        ({"heads": [[0, 1], [2]]}, "cannot be"),
        ({"heads": [[0, 1], [2, 4]]}, "cannot be"),
        ({"heads": [[-1, -1], [-1, -1]]}, "cannot be"),
        ({"heads": [[0, 1], [2, -1]]}, "other KV heads"),
        ({"block_size": 15}, "shorter"),
        ({"lncs": list(range(256)), "heads": [[0, 1, 2, 3] * 64] * 256}, "more KV heads"),
    ],
)
def test_a_device_that_no_worker_has_is_refused(fields, words):
    with pytest.raises(RemoteProtocolError, match=words):
        device_geometry(region(device(2), **fields), LAYOUT)


def large_region(heads, layout=LARGE, keys="HDS", pad=128):
    return NrtRegion(
        host="10.0.0.1",
        port=5,
        secret=bytes(32),
        is_tls=False,
        lncs=list(range(len(heads))),
        heads=heads,
        keys=keys,
        values="HSD",
        block_size=layout.block_size + pad,
        num_blocks=4,
    )


def large_geometry(num_ranks, layout=LARGE, **fields):
    heads = KvMap.of_tensor_parallel(num_ranks, layout.num_kv_heads, 128).heads
    return device_geometry(large_region([list(row) for row in heads], layout, **fields), layout)


@pytest.mark.parametrize("num_tokens", [1, 1000, 8192])
def test_transposed_keys_of_a_head_are_one_message_where_slots_are_alike(num_tokens):
    mine = large_geometry(32, keys="HDS")
    moves = DevicePlan(mine, large_geometry(32, keys="HDS")).moves([0], [1], num_tokens)
    assert len(moves.lengths) == 2 * 80 * 8
    assert moves.num_bytes == (8192 + 128 + num_tokens) * LARGE_BYTES
    other = DevicePlan(mine, large_geometry(32, keys="HDS", pad=0)).moves([0], [1], num_tokens)
    assert len(other.lengths) == (128 + 1) * 80 * 8
    assert other.num_bytes == 2 * num_tokens * LARGE_BYTES


def test_two_devices_that_would_need_messages_without_end_do_not_pair():
    layout = replace(LARGE, num_kv_heads=128)
    mine = large_geometry(64, layout)
    with pytest.raises(PeerRefused, match="messages"):
        DevicePlan(mine, large_geometry(64, layout, pad=0))
    with pytest.raises(PeerRefused, match="messages"):
        DevicePlan(large_geometry(4, keys="SHD"), large_geometry(2, keys="HSD"))
    same = large_geometry(4, keys="SHD")
    assert len(DevicePlan(same, same).moves([0], [1], 8192).lengths) == (4 + 8) * 80


@pytest.mark.parametrize("keys", ["HSD", "HDS"])
@pytest.mark.parametrize("num_kv_heads", [8, 128])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16, 32, 64])
def test_devices_as_large_as_there_are_pair(num_ranks, num_kv_heads, keys):
    layout = replace(LARGE, num_kv_heads=num_kv_heads)
    ends = [large_geometry(count, layout, keys=keys) for count in (num_ranks, 64)]
    for plan in (DevicePlan(*ends), DevicePlan(*reversed(ends))):
        assert len(plan.moves([0], [1], 8192).lengths) <= 2 * 80 * num_kv_heads


def test_what_a_region_costs_is_bounded(monkeypatch):
    """By what this worker's own slot is, however many replicas the peer has; nobody fills them."""
    made = []
    real = planner.sheets_of
    monkeypatch.setattr(
        planner,
        "sheets_of",
        lambda *ends, **fields: made.append(len(ends[2].layer)) or real(*ends, **fields),
    )
    most = (1 << 16) // 80
    heads = [[(rank + i) % 8 for i in range(3)] for rank in range(256)]
    mine = large_geometry(32)
    DevicePlan(mine, device_geometry(large_region(heads, pad=0), LARGE)).moves([0], [1], 1000)
    assert made == [80 * 8]
    heads = [[rank % 8] * 16 for rank in range(most // 16 + 1)]
    with pytest.raises(RemoteProtocolError, match="more KV heads"):
        device_geometry(large_region(heads), LARGE)
