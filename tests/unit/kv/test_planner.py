"""Any geometry into any other: bytes arrive where attention reads them, in the fewest runs."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_kit import (
    NUM_BLOCKS,
    SLOT,
    converted,
    memory_of,
    move,
    noise,
    numbers,
    rank_tensors,
    tensors_of,
    write_request,
)

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv import (
    DTYPE_BYTES,
    KvGeometry,
    KvLayout,
    KvMap,
    Planner,
    place_on_host,
    transfer_sequences,
)

ORDERS = ("HSD", "SHD", "HDS")
TOKENS_MAX = 20


@st.composite
def geometries(draw, num_kv_heads, num_layers, head_dim, dtype):
    """Pools of any number of ranks, tensors of any number of ranks, paged or slots."""
    block_size = draw(st.sampled_from([1, 3, 4, 8, TOKENS_MAX + 3]))
    num_blocks = draw(st.integers(TOKENS_MAX, NUM_BLOCKS))
    ranks = draw(st.integers(1, 64))
    if draw(st.booleans()) and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0):
        layout = KvLayout(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            num_ranks=ranks,
        )
        return KvGeometry.of_layout(layout, num_blocks)
    return rank_tensors(
        ranks,
        num_kv_heads,
        num_layers=num_layers,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        keys=draw(st.sampled_from(ORDERS)),
        values=draw(st.sampled_from(ORDERS)),
    )


def random_kv(geometry, num_tokens, seed=0):
    shape = (geometry.num_layers, 2, geometry.num_kv_heads, num_tokens, geometry.head_dim)
    return numbers(shape, geometry.dtype, seed)


def carry_out(plan, source_tensors, destination_tensors):
    """What both workers do with a plan."""
    if plan.placement is None:
        move(plan.runs, source_tensors, destination_tensors)
    else:
        landing = noise(plan.landing_bytes, 9)
        move(plan.runs, source_tensors, [landing])
        memories = [memory_of(tensor) for tensor in destination_tensors]
        place_on_host(plan.placement, memory_of(landing), memories)
    move(plan.fills, destination_tensors, destination_tensors)


@pytest.mark.parametrize("theirs", ORDERS)
@pytest.mark.parametrize("ours", ORDERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_order_can_become_every_other(theirs, ours, dtype):
    source = rank_tensors(1, keys=theirs, values=theirs)
    destination = rank_tensors(2, keys=ours, values=ours, dtype=dtype)
    kv = random_kv(source, 7)
    source_tensors, own = tensors_of(source, 1), tensors_of(destination, 1000)
    write_request(source, source_tensors, [5, 2], kv)
    expected = [tensor.copy() for tensor in own]
    write_request(destination, expected, [3, 9], converted(kv, source.dtype, dtype))
    carry_out(Planner(source, destination).plan([5, 2], [3, 9], 7), source_tensors, own)
    assert all(map(np.array_equal, own, expected))


def bytes_written(runs):
    """How often each byte is written."""
    written = Counter()
    rows = zip(runs.destination_tensors, runs.destination_offsets, runs.lengths, strict=True)
    for tensor, offset, length in rows:
        written.update((int(tensor), int(offset) + i) for i in range(length))
    return written


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=120)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_bytes_arrive_where_attention_reads_them(data, seed):
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 8]), label="KV heads")
    layers, dims = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    dtypes = [data.draw(st.sampled_from(list(DTYPE_BYTES))) for _ in range(2)]
    source, destination = (
        data.draw(geometries(heads, layers, dims, dtype), label=dtype) for dtype in dtypes
    )
    replicas = data.draw(st.sampled_from(["once", "each"]))
    num_tokens = data.draw(st.integers(0, TOKENS_MAX))
    chooser = random.Random(seed)
    source_ids, destination_ids = (
        chooser.sample(range(side.num_blocks), side.num_blocks_for(num_tokens))
        for side in (source, destination)
    )
    kv = random_kv(source, num_tokens, seed)
    source_tensors = tensors_of(source, 1)
    write_request(source, source_tensors, source_ids, kv)
    own = tensors_of(destination, 1000)
    expected = [tensor.copy() for tensor in own]
    write_request(destination, expected, destination_ids, converted(kv, *dtypes))

    planner = Planner(source, destination, replicas)
    plan = planner.plan(source_ids, destination_ids, num_tokens)
    carry_out(plan, source_tensors, own)
    for tensor, should_be in zip(own, expected, strict=True):
        assert np.array_equal(tensor, should_be)
    if replicas == "once" or plan.placement is not None:
        assert plan.runs.num_bytes == num_tokens * source.token_bytes
    written = bytes_written(plan.runs)
    assert set(written.values()) <= {1}
    if plan.placement is None:
        assert not written.keys() & bytes_written(plan.fills).keys()


def fewest_possible(source, destination, source_ids, destination_ids, num_tokens):
    """By the definition: where bytes that follow each other at the destination do not at the
    source, a run begins. For geometries without replicas, of which one mapping is possible."""
    item = DTYPE_BYTES[source.dtype]
    came_from = {}
    places = [
        {head: (rank, i) for rank, row in enumerate(side.heads) for i, head in enumerate(row)}
        for side in (source, destination)
    ]

    def address(side, ids, where, layer, c, token, dim):
        rank, place = where
        strides = side.strides[c]
        block, position = divmod(token, side.block_size)
        offset = (
            int(side.offsets[rank, layer, c])
            + ids[block] * strides.block
            + place * strides.head
            + position * strides.token
            + dim * strides.dim
        )
        return int(side.tensors[rank, layer, c]), offset

    shape = (source.num_layers, 2, source.num_kv_heads, num_tokens, source.head_dim)
    for layer, c, head, token, dim in np.ndindex(*shape):
        start = address(source, source_ids, places[0][head], layer, c, token, dim)
        end = address(destination, destination_ids, places[1][head], layer, c, token, dim)
        came_from[end] = start
    return sum(
        came_from.get((tensor, offset - item)) != (source_tensor, source_offset - item)
        for (tensor, offset), (source_tensor, source_offset) in came_from.items()
    )


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_there_are_no_fewer_runs(data):
    heads = data.draw(st.sampled_from([2, 4]))
    sides = []
    orders = data.draw(st.sampled_from([("HSD", "SHD"), ("HDS", "HSD"), ("SHD", "SHD")]))
    for _ in range(2):
        kind = {
            "block_size": data.draw(st.sampled_from([2, 4, 12])),
            "head_dim": 2,
            "keys": orders[0],
            "values": orders[1],
        }
        ranks = data.draw(st.sampled_from([ranks for ranks in (1, 2, 4) if ranks <= heads]))
        sides.append(rank_tensors(ranks, heads, **kind))
    source, destination = sides
    num_tokens = data.draw(st.integers(1, 12))
    ids = [
        data.draw(st.permutations(range(side.num_blocks)) | st.just(range(side.num_blocks)))
        for side in sides
    ]
    source_ids, destination_ids = (
        list(own)[: side.num_blocks_for(num_tokens)] for own, side in zip(ids, sides, strict=True)
    )
    plan = Planner(source, destination).plan(source_ids, destination_ids, num_tokens)
    expected = fewest_possible(source, destination, source_ids, destination_ids, num_tokens)
    assert plan.placement is None
    assert len(plan.fills) == 0
    assert len(plan.runs) == expected


def pool(**changed):
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, **changed}
    return KvGeometry.of_layout(KvLayout(dtype="float32", **fields), NUM_BLOCKS)


@pytest.mark.parametrize(
    ("source", "destination", "num_tokens", "expected"),
    [
        (pool(), pool(), 12, 1),
        (pool(num_ranks=2), pool(num_ranks=2), 12, 1),
        (rank_tensors(2), rank_tensors(2), 12, 2 * 2 * 2),  # one per tensor
        (rank_tensors(2, keys="SHD"), rank_tensors(2, keys="SHD"), 12, 2 * 2 * 2),
        (rank_tensors(1, **SLOT), rank_tensors(1, **SLOT), 16, 2 * 2),  # a whole slot
        (rank_tensors(1, **SLOT), rank_tensors(1, **SLOT), 15, 2 * 2 * 2),  # per head
        (rank_tensors(2, **SLOT), rank_tensors(1, **SLOT), 9, 2 * 2 * 2),
        (rank_tensors(1, **SLOT, values="HDS"), rank_tensors(2, **SLOT, values="HDS"), 9, 4 + 16),
        (rank_tensors(2, **SLOT), rank_tensors(2), 9, 2 * 2 * 2),  # slots into paged blocks
    ],
)
def test_neighbours_are_joined(source, destination, num_tokens, expected):
    ids = [range(side.num_blocks_for(num_tokens)) for side in (source, destination)]
    assert len(Planner(source, destination).plan(*ids, num_tokens).runs) == expected


def test_a_pool_of_a_layout_is_where_the_layout_says():
    """Against torch's view of a real pool."""
    from neuron_di.kv import KvPool
    from neuron_di.types import Incarnation

    for ranks in (1, 2, 4):
        layout = KvLayout(
            num_layers=2, num_kv_heads=2, head_dim=3, block_size=4, dtype="float32", num_ranks=ranks
        )
        geometry = KvGeometry.of_layout(layout, 3)
        real = KvPool.create(layout, 3, Incarnation("i"))
        kv = random_kv(geometry, 10)
        image = np.zeros(3 * layout.block_bytes, np.uint8)
        write_request(geometry, [image], [2, 0, 1], kv)
        for rank in range(ranks):
            tensor = real.tensor(rank)  # [N, L, C, K, S, D]
            for token in range(10):
                block, position = [2, 0, 1][token // 4], token % 4
                for place, head in enumerate(layout.heads_of(rank)):
                    vector = np.ascontiguousarray(kv[:, :, head, token]).view(np.float32)
                    tensor[block, :, :, place, position] = tensor.new_tensor(vector)
            del tensor
        own = np.concatenate([np.frombuffer(real.view(n), np.uint8) for n in range(3)])
        assert np.array_equal(own, image)
        real.close()


@pytest.mark.parametrize(
    ("keys", "shape"), [("HSD", (5, 2, 4, 3)), ("SHD", (5, 4, 2, 3)), ("HDS", (5, 2, 3, 4))]
)
def test_rank_tensors_are_dense_arrays_in_the_order_of_the_seed(keys, shape):
    geometry = rank_tensors(3, 6, num_blocks=5, head_dim=3, keys=keys, dtype="float32")
    item = 4
    dense = np.empty(shape, np.uint32)
    axes = [0] + [1 + keys.index(name) for name in "HSD"]
    strides = tuple(dense.strides[axis] for axis in axes)
    own = geometry.strides[0]
    assert (own.block, own.head, own.token, own.dim) == strides
    assert geometry.tensor_bytes() == dict.fromkeys(range(2 * 2 * 3), dense.size * item)
    # [dev0_l0_k, dev1_l0_k, dev2_l0_k, dev0_l0_v, …, dev0_l1_k, …]
    assert geometry.tensors[:, 0, 0].tolist() == [0, 1, 2]
    assert geometry.tensors[:, 0, 1].tolist() == [3, 4, 5]
    assert geometry.tensors[:, 1, 0].tolist() == [6, 7, 8]
    assert geometry.rank_of_tensor() == {number: number % 3 for number in range(12)}


LLAMA_70B = {"num_layers": 80, "head_dim": 128, "block_size": 8192 + 128, "num_blocks": 4}


def test_a_70b_request_moves_its_used_tokens_once():
    """Where the reference moves 21.8 GB: each rank's whole slot."""
    geometry = rank_tensors(64, 8, **LLAMA_70B)
    whole_slots = sum(geometry.tensor_bytes().values()) // geometry.num_blocks
    plan = Planner(geometry, geometry).plan([2], [1], 1024)
    assert whole_slots == 21_810_380_800
    assert plan.runs.num_bytes == 1024 * 320 * 1024 == 335_544_320
    assert plan.fills.num_bytes == 7 * plan.runs.num_bytes
    assert len(plan.runs) == 80 * 2 * 8
    # And every rank carries an equal share.
    for tensors in (plan.runs.source_tensors, plan.runs.destination_tensors):
        shares = np.bincount(tensors % 64, weights=plan.runs.lengths)
        assert set(shares) == {plan.runs.num_bytes // 64}


@pytest.mark.parametrize(("senders", "receivers"), [(64, 8), (8, 64), (64, 16), (16, 64), (8, 8)])
def test_all_ranks_share_the_work(senders, receivers):
    source, destination = (rank_tensors(ranks, 8, **LLAMA_70B) for ranks in (senders, receivers))
    plan = Planner(source, destination).plan([2], [1], 100)
    for tensors, ranks in (
        (plan.runs.source_tensors, senders),
        (plan.runs.destination_tensors, receivers),
    ):
        shares = np.bincount(tensors % ranks, weights=plan.runs.lengths, minlength=ranks)
        assert set(shares) == {plan.runs.num_bytes / ranks}


@pytest.mark.parametrize(
    ("senders", "receivers", "expected"),
    [
        (8, 2, [0, 4]),  # fewer receivers: neighbours' links are spared
        (2, 8, [0, 1, 0, 1, 0, 1, 0, 1]),
        (4, 4, [0, 1, 2, 3]),
        (6, 4, [0, 1, 2, 3]),
    ],
)
def test_every_replica_can_have_its_own_copy(senders, receivers, expected):
    """One head: which sender each receiver hears, by the document's rule."""
    source, destination = (rank_tensors(ranks, 1) for ranks in (senders, receivers))
    plan = Planner(source, destination, "each").plan([3], [4], 4)
    assert len(plan.fills) == 0
    _, receive = transfer_sequences(plan.runs, source, destination)
    heard = {
        (tensor % receivers, sender)
        for tensor, sender in zip(receive.tensors, receive.peer_devices, strict=True)
    }
    assert heard == set(enumerate(expected))


def test_slots_that_only_some_ranks_hold_are_refused():
    kv_map = KvMap(((0,), (0,)), seq_ids=((0, 1), (2, 3)))
    fields = {"num_layers": 1, "head_dim": 2, "dtype": "float16"}
    with pytest.raises(ConfigError, match="seq_ids"):
        KvGeometry.of_rank_tensors(kv_map, **fields, **SLOT)


def test_padding_is_neither_sent_nor_written():
    kv_map = KvMap(((0, 1), (2, -1)))
    fields = {"num_layers": 1, "head_dim": 2, "block_size": 4, "num_blocks": 2, "dtype": "float16"}
    padded = KvGeometry.of_rank_tensors(kv_map, **fields)
    plan = Planner(padded, padded).plan([0], [1], 4)
    assert plan.runs.num_bytes == 3 * 2 * 4 * 2 * 2
    head_bytes = 4 * 2 * 2
    of_rank_1 = plan.runs.destination_tensors % 2 == 1
    assert set(plan.runs.lengths[of_rank_1]) == {head_bytes}


def test_a_staged_plan_lands_in_the_sources_own_form():
    """Keys transposed at one end only: no run is a single number."""
    source = rank_tensors(2, keys="HDS", block_size=16, num_blocks=3)
    destination = rank_tensors(2, block_size=16, num_blocks=3)
    planner = Planner(source, destination)
    plan = planner.plan([2], [0], 9)
    assert planner.is_staged
    assert plan.landing_bytes == plan.runs.num_bytes == 9 * source.token_bytes
    assert set(plan.runs.lengths) == {9 * 2, 9 * 4 * 2}  # a dim's tokens, a head's tokens
    assert not Planner(source, source).is_staged


@pytest.mark.parametrize(
    "other", [{"num_layers": 3}, {"num_kv_heads": 4}, {"head_dim": 8}], ids=lambda one: str(one)
)
def test_kv_of_another_model_is_refused(other):
    with pytest.raises(ConfigError, match=next(iter(other))):
        Planner(rank_tensors(2), rank_tensors(2, **other))


def test_a_head_that_nobody_holds_is_refused():
    whole = rank_tensors(2)
    with pytest.raises(ConfigError, match="no rank holds"):
        Planner(replace(whole, heads=((0,), (0,))), whole)


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "num_tokens"),
    [
        ([0], [0, 1], 5),
        ([0, 1], [0], 5),
        ([0, NUM_BLOCKS], [0, 1], 5),
        ([0, 1], [0, -1], 5),
        ([], [], -1),
        ([0, 1 << 62], [0, 1], 5),
    ],
)
def test_blocks_that_do_not_fit_are_refused(source_ids, destination_ids, num_tokens):
    geometry = rank_tensors(2)
    with pytest.raises(LocalProtocolError):
        Planner(geometry, geometry).plan(source_ids, destination_ids, num_tokens)
