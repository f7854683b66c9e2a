"""A Neuron worker's pool: what is on the device, what the mirror has, and who brings it where."""

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from kv_kit import numbers, pool_numbers, rank_tensors, tensors_of, view, write_request

from neuron_di.errors import BackendLost, ConfigError, LocalProtocolError
from neuron_di.kv import (
    DeviceKv,
    KvIdentity,
    KvLayout,
    KvPool,
    NeuronPool,
    PeerPool,
    block_digests,
)
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di_bindings.block_runs import are_words
from neuron_di_bindings.nrt import NrtStatus, NrtWorkerError

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=16, dtype="bfloat16")
NUM_BLOCKS, PAD = 3, 8
INCARNATION = Incarnation("ab" * 16)
LENGTHS = (1, 5, 15, 16)
ORDERS = [("HSD", "HSD"), ("HDS", "HSD"), ("SHD", "SHD"), ("HDS", "HDS")]
RANKS = [1, 2, 4, 8, 3]  # 2 heads: replicas on 4 and 8, padding and twice on one rank with 3


class HostTensor:
    """A device's tensor in an array of the test; counts what is copied."""

    core, nrt = 0, None

    def __init__(self, array):
        self.array = array
        self.num_bytes = array.nbytes
        self.bytes_read = self.bytes_written = 0

    def read(self, offset, into):
        assert 0 <= offset <= self.num_bytes - len(into)
        into[:] = self.array[offset : offset + len(into)]
        self.bytes_read += len(into)

    def write(self, offset, data):
        assert 0 <= offset <= self.num_bytes - len(data)
        self.array[offset : offset + len(data)] = data
        self.bytes_written += len(data)


def make_device(num_ranks=2, orders=ORDERS[0], **changed):
    fields = {"block_size": LAYOUT.block_size + PAD, "num_blocks": NUM_BLOCKS + 1, **changed}
    geometry = rank_tensors(num_ranks, keys=orders[0], values=orders[1], **fields)
    tensors = [HostTensor(array) for array in tensors_of(geometry, 1)]
    return DeviceKv(tensors=tensors, geometry=geometry, lncs=tuple(range(num_ranks)))


def make_pool(device=None, layout=LAYOUT, num_blocks=NUM_BLOCKS):
    return NeuronPool.create(layout, num_blocks, INCARNATION, device or make_device())


@pytest.fixture
def pool():
    with closing(make_pool()) as pool:
        yield pool


def arrays_of(device):
    return [tensor.array for tensor in device.tensors]


def kv_of(num_tokens, seed):
    shape = (LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, num_tokens, LAYOUT.head_dim)
    return numbers(shape, LAYOUT.dtype, seed)


def mirror_of(pool):
    """[N, L, C, K, S, D], the mirror itself."""
    whole = np.frombuffer(pool._view, np.uint8)[-NUM_BLOCKS * LAYOUT.block_bytes :]
    return pool_numbers(LAYOUT, whole)[:, 0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("orders", ORDERS, ids="/".join)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_slot_comes_to_the_mirror_with_the_used_tokens_and_each_head_once(
    num_ranks, orders, num_tokens
):
    device, kv = make_device(num_ranks, orders), kv_of(num_tokens, 3)
    write_request(device.geometry, arrays_of(device), [2], kv)
    with closing(make_pool(device)) as pool:
        pool.to_host(2, num_tokens)
        mirror = mirror_of(pool)
        assert (mirror[2][:, :, :, :num_tokens] == kv).all()
        assert not mirror[2][:, :, :, num_tokens:].any()
        assert not mirror[:2].any()
        del mirror
    read = sum(tensor.bytes_read for tensor in device.tensors)
    assert read == num_tokens * device.geometry.token_bytes


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("orders", ORDERS, ids="/".join)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_block_comes_to_every_replica_of_its_slot_and_nothing_else_changes(
    num_ranks, orders, num_tokens
):
    device, kv = make_device(num_ranks, orders), kv_of(num_tokens, 4)
    before = [array.copy() for array in arrays_of(device)]
    write_request(device.geometry, before, [1], kv)  # what is expected
    with closing(make_pool(device)) as pool:
        mirror_of(pool)[1][:, :, :, :num_tokens] = kv
        assert not pool.is_on_device(1)
        pool.to_device(1, num_tokens)
        assert pool.is_on_device(1)
        assert not pool.is_on_device(0)
    for array, expected in zip(arrays_of(device), before, strict=True):
        assert (array == expected).all()


def test_replicas_are_read_in_turn_layer_by_layer():
    """The ones that a link brings a head to, so that what is verified is what came."""
    device = make_device(8)
    holders = device.geometry.holders()[0]  # of head 0: (rank, place)
    for layer in range(LAYOUT.num_layers):
        rank, place = holders[layer % len(holders)]
        view(device.geometry, arrays_of(device), rank, layer, 0)[0, place, :16] = 7 + layer
    with closing(make_pool(device)) as pool:
        pool.to_host(0, 16)
        for layer in range(LAYOUT.num_layers):
            assert (mirror_of(pool)[0, layer, 0, 0] == 7 + layer).all()


@pytest.mark.parametrize("is_in_mirror", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_came_for_one_replica_is_brought_to_the_others(num_ranks, is_in_mirror):
    device, kv = make_device(num_ranks, ("HDS", "HSD")), kv_of(9, 8)
    before = [array.copy() for array in arrays_of(device)]
    write_request(device.geometry, before, [1], kv)  # what is expected
    for head, holders in enumerate(device.geometry.holders()):
        for layer in range(LAYOUT.num_layers):
            rank, place = holders[layer % len(holders)]
            for c in (0, 1):
                part = view(device.geometry, arrays_of(device), rank, layer, c)
                part[1, place, :9] = kv[layer, c, head]
    with closing(make_pool(device)) as pool:
        pool.mark_on_device([1])
        if is_in_mirror:
            pool.to_host(1, 9)
        read = [tensor.bytes_read for tensor in device.tensors]
        assert pool.fill_replicas([1], 9) is None
        is_read_again = read != [tensor.bytes_read for tensor in device.tensors]
        assert is_read_again == (num_ranks > 2 and not is_in_mirror)
        assert pool.is_on_device(1)
    assert any(tensor.bytes_written for tensor in device.tensors) == (num_ranks > 2)
    for array, expected in zip(arrays_of(device), before, strict=True):
        assert (array == expected).all()


def test_digests_are_of_the_device_where_a_block_is_there_and_of_the_mirror_else():
    identity = KvIdentity(
        worker_id=WorkerId("p"),
        incarnation=INCARNATION,
        request_id=RequestId("r"),
        attempt=0,
        layout_digest=LAYOUT.digest(),
    )
    device, kv = make_device(), kv_of(LAYOUT.block_size + 3, 5)
    write_request(replace(device.geometry, block_size=16), arrays_of(device), [2, 0], kv)
    with (
        closing(make_pool(device)) as pool,
        closing(KvPool.create(LAYOUT, NUM_BLOCKS, INCARNATION)) as plain,
    ):
        plain_numbers = pool_numbers(
            LAYOUT, np.frombuffer(plain._view, np.uint8)[-3 * LAYOUT.block_bytes :]
        )
        plain_numbers[2, 0] = kv[:, :, :, :16]
        plain_numbers[0, 0][:, :, :, :3] = kv[:, :, :, 16:]
        expected = plain.digests([2, 0], identity, 19, first_place=1)
        assert expected == block_digests(
            plain.memory(), [2, 0], identity, LAYOUT, 19, first_place=1
        )
        for block_id in (2, 0):
            assert pool.digests([2, 0], identity, 19, first_place=1) != expected
            pool.mark_on_device([block_id])
        assert pool.digests([2, 0], identity, 19, first_place=1) == expected
        num_read = sum(tensor.bytes_read for tensor in device.tensors)
        pool.retire([2, 0])
        assert pool.digests([2, 0], identity, 19, first_place=1) == expected
        assert sum(tensor.bytes_read for tensor in device.tensors) == num_read
        del plain_numbers


def test_a_block_that_is_given_up_is_not_on_the_device_any_more(pool):
    pool.mark_on_device([1, 2])
    before = pool.generations([1])
    assert pool.retire([1]) is False
    assert not pool.is_on_device(1)
    assert pool.is_on_device(2)
    assert pool.generations([1]) == [before[0] + 1]


def test_the_mirror_takes_no_memory_until_it_is_used():
    """Nor when a peer maps it."""
    layout = replace(LAYOUT, block_size=1 << 14)
    device = make_device(block_size=1 << 14, num_blocks=NUM_BLOCKS)
    with closing(make_pool(device, layout)) as pool:
        before = os.fstat(pool.region().fd).st_blocks * 512
        assert before < layout.block_bytes // 4
        pool.to_host(1, 16)
        PeerPool.open(pool.region(), layout)
        assert os.fstat(pool.region().fd).st_blocks * 512 < layout.block_bytes // 4


def test_peers_of_the_host_map_the_mirror():
    device, kv = make_device(), kv_of(16, 6)
    write_request(device.geometry, arrays_of(device), [0], kv)
    with closing(make_pool(device)) as pool:
        pool.to_host(0, 16)
        peer = PeerPool.open(pool.region(), LAYOUT)
        assert are_words(peer.words, [0], pool.generations([0]))
        assert peer.num_blocks == pool.num_blocks


def test_who_watches_learns_once_that_the_device_is_lost(pool):
    first, second, told = [], [], []
    pool.watch_loss(first.append)
    pool.watch_loss(second.append)
    assert pool.lost is None
    error = BackendLost("a peer is gone")
    pool.lose(error)
    pool.lose(BackendLost("later"))
    pool.watch_loss(told.append)
    assert (first, second, told) == ([], [error], [error])
    assert pool.lost is error


def test_a_device_that_fails_is_lost(pool):
    def fail(offset, into):
        raise NrtWorkerError("nrt_tensor_read", NrtStatus.HW_ERROR, "NRT_HW_ERROR")

    pool.device.tensors[3].read = fail
    told = []
    pool.watch_loss(told.append)
    with pytest.raises(BackendLost, match="NRT_HW_ERROR"):
        pool.to_host(0, 4)
    assert [type(error) for error in told] == [BackendLost]


@pytest.mark.parametrize(("block_id", "num_tokens"), [(-1, 1), (NUM_BLOCKS, 1), (0, 17), (0, -1)])
def test_what_is_no_part_of_the_pool_is_not_copied(pool, block_id, num_tokens):
    for copy in (pool.to_host, pool.to_device):
        with pytest.raises(LocalProtocolError):
            copy(block_id, num_tokens)
    assert not pool.is_on_device(block_id)


def test_nothing_is_copied_from_or_to_a_closed_pool(pool):
    pool.close()
    for copy in (pool.to_host, pool.to_device):
        with pytest.raises(LocalProtocolError, match="closed"):
            copy(0, 4)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 8},
        {"dtype": "float32"},
        {"block_size": LAYOUT.block_size + PAD + 1},
        {"num_ranks": 2},
    ],
    ids=str,
)
def test_a_layout_that_is_not_the_devices_is_refused(changed):
    with pytest.raises(ConfigError):
        make_pool(layout=replace(LAYOUT, **changed))


def test_more_blocks_than_slots_are_refused():
    with pytest.raises(ConfigError, match="slots"):
        make_pool(num_blocks=NUM_BLOCKS + 2)


def test_tensors_that_do_not_fit_the_geometry_are_refused():
    device = make_device()
    for tensors in (device.tensors[:-1], [*device.tensors, device.tensors[0]]):
        with pytest.raises(ConfigError, match="KV tensors"):
            replace(device, tensors=tensors)
    short = HostTensor(device.tensors[0].array[:-1])
    with pytest.raises(ConfigError, match="KV tensor 0"):
        replace(device, tensors=[short, *device.tensors[1:]])
    for lncs in ((0,), (0, 0), (0, 1, 2)):
        with pytest.raises(ConfigError, match="cores"):
            replace(device, lncs=lncs)


class Handle:
    """As a tensor of the runtime: several runs in one call."""

    def __init__(self, array):
        self.plain = HostTensor(array)
        self.num_bytes, self.core = array.nbytes, 5
        self.calls = []

    def read(self, offset, into):
        self.calls.append("read")
        self.plain.read(offset, into)

    def write(self, offset, data):
        self.calls.append("write")
        self.plain.write(offset, data)

    def read_many(self, parts):
        self.calls.append("read_many")
        for offset, part in parts:
            self.plain.read(offset, part)

    def write_many(self, parts):
        self.calls.append("write_many")
        for offset, part in parts:
            self.plain.write(offset, part)


def test_a_tensor_with_a_handle_is_copied_in_one_call():
    device, kv = make_device(orders=("HDS", "HSD")), kv_of(9, 7)
    handles = [Handle(array) for array in arrays_of(device)]
    for tensor, handle in zip(device.tensors, handles, strict=True):
        tensor.nrt = handle
    with closing(make_pool(device)) as pool:
        mirror_of(pool)[1][:, :, :, :9] = kv
        pool.to_device(1, 9)
        mirror_of(pool)[1] = 0
        pool.to_host(1, 9)
        assert (mirror_of(pool)[1][:, :, :, :9] == kv).all()
    assert all(handle.calls == ["write_many", "read_many"] for handle in handles)
