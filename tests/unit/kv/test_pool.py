"""A pool and the processes that read it: here the reader, in a spawned process the owner."""

import gc
import multiprocessing
import os
import socket
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from neuron_di.errors import ConfigError, PeerGone, StaleIncarnation
from neuron_di.kv import KvLayout, KvPool, PeerPool, segment_bytes
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import ShmRegion
from neuron_di_bindings.block_runs import are_words

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
NUM_BLOCKS = 600  # their generations take more than a page
INCARNATION = Incarnation("ab" * 16)
SPAWN = multiprocessing.get_context("spawn")


def make_pool(num_blocks=NUM_BLOCKS, incarnation=INCARNATION):
    return KvPool.create(LAYOUT, num_blocks, incarnation)


@pytest.fixture
def pool():
    pool = make_pool()
    yield pool
    pool.close()


def own_a_pool(connection):
    """Another process: block n holds n. Retires the blocks that it is told to."""
    pool = make_pool()
    tensor = pool.tensor()
    for block_id in range(NUM_BLOCKS):
        tensor[block_id] = block_id
    connection.send(pool.region())
    while (block_ids := connection.recv()) is not None:
        pool.retire(block_ids)
        connection.send("retired")
    del tensor
    pool.close()
    connection.send("closed")
    connection.recv()


@contextmanager
def owner_process():
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=own_a_pool, args=(theirs,))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def block_of(peer: PeerPool, block_id: int) -> np.ndarray:
    offset = segment_bytes(LAYOUT, peer.num_blocks) - peer.num_blocks * LAYOUT.block_bytes
    offset += block_id * LAYOUT.block_bytes
    return np.frombuffer(peer._view, np.float32, LAYOUT.block_bytes // 4, offset)


def test_the_tensor_is_the_segment():
    pool = make_pool()
    tensor = pool.tensor()
    assert tensor.shape == (NUM_BLOCKS, 2, 2, 2, 4, 4)
    assert tensor.data_ptr() == pool.base_address
    assert tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    tensor[-1] = 3.0
    assert (block_of(PeerPool.open(pool.region(), LAYOUT), NUM_BLOCKS - 1) == 3.0).all()
    pool.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_tensor_has_the_layouts_dtype(dtype):
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype=str(dtype).split(".")[1]
    )
    pool = KvPool.create(layout, 3, INCARNATION)
    assert pool.tensor().dtype == dtype
    pool.close()


def test_a_peer_process_sees_blocks_and_generations():
    with owner_process() as (_, connection):
        peer = PeerPool.open(connection.recv(), LAYOUT)
        assert all((block_of(peer, n) == n).all() for n in range(NUM_BLOCKS))
        assert are_words(peer.words, range(NUM_BLOCKS), [0] * NUM_BLOCKS)
        for block_ids in ([0, NUM_BLOCKS - 1], [NUM_BLOCKS - 1]):
            connection.send(block_ids)
            assert connection.recv() == "retired"
        assert are_words(peer.words, [0, 1, NUM_BLOCKS - 2, NUM_BLOCKS - 1], [1, 0, 0, 2])


def shared_files():
    """Of this machine, but for what other tests may have beside: UCX's, and semaphores."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("ucx_", "sem."))}


def test_a_killed_owner_leaves_nothing_and_the_reader_can_read_on():
    before = shared_files()
    with owner_process() as (process, connection):
        region = connection.recv()
        peer = PeerPool.open(region, LAYOUT)
        process.kill()
        process.join()
        assert (block_of(peer, NUM_BLOCKS - 1) == NUM_BLOCKS - 1).all()
        with pytest.raises(PeerGone):
            PeerPool.open(region, LAYOUT)
    assert shared_files() == before


def test_a_closed_pool_cannot_be_mapped_any_more():
    with owner_process() as (_, connection):
        region = connection.recv()
        connection.send(None)
        assert connection.recv() == "closed"
        with pytest.raises(PeerGone):
            PeerPool.open(region, LAYOUT)


def test_the_map_of_a_peer_is_read_only(pool):
    peer = PeerPool.open(pool.region(), LAYOUT)
    with pytest.raises(TypeError):
        peer._view[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        peer._generations[0] += 1


@pytest.mark.parametrize(
    "fields",
    [
        {"pid": 2**22 + 1},
        {"pid": -1},
        {"pid": 0},
        {"pid": 2**63},
        {"fd": 1_000_000},
        {"fd": -1},
        {"num_blocks": NUM_BLOCKS - 1},
        {"num_blocks": NUM_BLOCKS + 1},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": 2**62},
    ],
    ids=str,
)
def test_a_wrong_number_is_refused(pool, fields):
    with pytest.raises(PeerGone):
        PeerPool.open(msgspec.structs.replace(pool.region(), **fields), LAYOUT)


@pytest.mark.parametrize("incarnation", ["ab" * 15, "", "cd" * 16, "ab" * 17, "é" * 100])
def test_another_incarnation_is_refused(pool, incarnation):
    with pytest.raises(StaleIncarnation):
        PeerPool.open(msgspec.structs.replace(pool.region(), incarnation=incarnation), LAYOUT)


def test_the_block_count_in_the_header_must_agree(pool):
    pool._view[72:80] = (5).to_bytes(8, "little")
    with pytest.raises(PeerGone, match="5 blocks"):
        PeerPool.open(pool.region(), LAYOUT)


def open_descriptor(region: ShmRegion, fd: int) -> PeerPool:
    return PeerPool.open(msgspec.structs.replace(region, fd=fd), LAYOUT)


def test_a_file_of_the_right_size_and_content_is_refused(pool, tmp_path):
    path = tmp_path / "memfd:pool"
    path.write_bytes(bytes(pool._view))
    with path.open("rb") as file, pytest.raises(PeerGone, match="not shared memory"):
        open_descriptor(pool.region(), file.fileno())


def test_a_socket_and_a_pipe_are_refused(pool):
    with socket.socket() as listener, pytest.raises(PeerGone, match="not shared memory"):
        open_descriptor(pool.region(), listener.fileno())
    reading, writing = os.pipe()
    with pytest.raises(PeerGone, match="not shared memory"):
        open_descriptor(pool.region(), reading)
    os.close(reading)
    os.close(writing)


def test_a_segment_that_could_shrink_under_the_reader_is_refused(pool):
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(pool._view))
    with pytest.raises(PeerGone, match="may shrink"):
        open_descriptor(pool.region(), fd)
    os.close(fd)


def test_nobody_can_resize_a_pool(pool):
    for size_bytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(pool._fd, size_bytes)


def test_close_twice_and_no_descriptor_is_left():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    pool = make_pool()
    peer = PeerPool.open(pool.region(), LAYOUT)
    pool.close()
    pool.close()
    assert Path("/proc/self/maps").read_text().count("/memfd:neuron-di-kv") >= 1
    del pool, peer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_pool_keeps_no_memory_whoever_maps_it():
    pool = make_pool()
    tensor, peer = pool.tensor(), PeerPool.open(pool.region(), LAYOUT)
    tensor.fill_(7.0)
    fd = os.dup(pool._fd)
    before = os.fstat(fd).st_blocks * 512
    pool.close()
    left = os.fstat(fd).st_blocks * 512
    assert left <= before - NUM_BLOCKS * LAYOUT.block_bytes
    # Who reads on finds zeros, and that every block was given up.
    assert not block_of(peer, 3).any()
    assert not tensor.any()
    assert are_words(peer.words, range(NUM_BLOCKS), [1] * NUM_BLOCKS)
    pool.retire([BlockId(3)])
    assert are_words(peer.words, [3], [1])
    os.close(fd)


def test_a_closed_pool_is_mapped_no_more_although_it_is_known():
    before = num_maps()
    pool = make_pool()
    assert num_maps() == before + 1
    pool.close()
    assert num_maps() == before
    assert pool.num_blocks == NUM_BLOCKS


def num_maps():
    return Path("/proc/self/maps").read_text().count("/memfd:neuron-di-kv")


def test_generations_and_retire():
    pool = make_pool(num_blocks=4)
    pool.retire([BlockId(1), BlockId(3)])
    pool.retire([BlockId(3)])
    assert pool.generations([BlockId(n) for n in (3, 2, 1, 0)]) == [2, 0, 1, 0]
    pool.close()


def test_a_pool_beyond_all_memory_is_a_config_error():
    for num_blocks in (1 << 40, 1 << 58):
        with pytest.raises(ConfigError, match="bytes of shared memory"):
            make_pool(num_blocks=num_blocks)
