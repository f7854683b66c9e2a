"""What the engine does with CUDA, whatever CUDA answers. What it moves, tests/contract says."""

import os
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager

import msgspec
import numpy as np
import pytest
from contract.cuda_pair import NUM_SMALL, PEER, SMALL, UNTOUCHED, cuda_decode, cuda_peer, ended
from contract.fake_cuda import WHY_NOT, make_pool

from neuron_di.errors import ConfigError, PeerError, PeerGone, PeerRefused
from neuron_di.kv import KvPool, Memory
from neuron_di.transfer import cuda_run_copier
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import Incarnation
from neuron_di.wire import Offer
from neuron_di_bindings import cuda_copy_kernel

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

NEWER_DRIVER_NEEDED, NOT_SUPPORTED, MAP_FAILED, LAUNCH_FAILURE = 36, 801, 205, 719
SCATTERED = ([9, 3, 12, 0], [1, 7, 5, 3])


@pytest.fixture(scope="module")
def peer():
    with cuda_peer() as peer:
        yield peer


@pytest.fixture
def decode():
    with cuda_decode() as decode:
        yield decode


def check_scattered(decode):
    source_ids, block_ids = SCATTERED
    assert decode.move(source_ids, block_ids) is None
    expected = np.full(NUM_SMALL, UNTOUCHED)
    expected[block_ids] = np.array(source_ids) + 1
    assert decode.values().tolist() == expected.tolist()


COPIES = ("cuLaunchKernel", "cudaMemcpyBatchAsync", "cudaMemcpyAsync")


@contextmanager
def counted(decode):
    """How often each of COPIES was called meanwhile."""
    before = [decode.steering.calls(name) for name in COPIES]
    found = []
    yield found
    found += [decode.steering.calls(name) - n for name, n in zip(COPIES, before, strict=True)]


@contextmanager
def without_kernel(decode):
    """A connection that is made meanwhile finds a driver that takes no kernel."""
    decode.steering.fail("cuModuleLoadData", NOT_SUPPORTED)
    yield


@pytest.mark.parametrize("version", [12060, 12090, 13000])
def test_scattered_blocks_are_one_launch(peer, version):
    with cuda_decode(version=version) as decode:
        decode.connect(peer.region)
        with counted(decode) as found:
            check_scattered(decode)
        assert found == [1, 0, 1]  # the copy is of the table


def test_one_run_needs_no_kernel(peer, decode):
    decode.connect(peer.region)
    with counted(decode) as found:
        assert decode.move([3, 4, 5], [6, 7, 8]) is None
    assert found == [0, 0, 1]
    assert decode.values()[6:9].tolist() == [4, 5, 6]


def test_long_runs_go_by_the_copy_engines(peer, decode, monkeypatch):
    decode.connect(peer.region)
    monkeypatch.setattr(cuda_run_copier, "LONG_RUN_BYTES", SMALL.block_bytes)
    with counted(decode) as found:
        check_scattered(decode)
    assert found == [0, 1, 0]


@pytest.mark.parametrize("item_bytes", [4096, SMALL.block_bytes // 4])
def test_one_run_that_is_longer_than_all_others_is_copied_whole(
    peer, decode, monkeypatch, item_bytes
):
    """Of small items it would be too many for each of the others: so it is cut."""
    monkeypatch.setattr(cuda_copy_kernel, "_ITEM_BYTES", item_bytes)
    source_ids, block_ids = list(range(16)), [6, 5, 4, 3, 2, 1, 0, *range(7, 16)]
    decode.connect(peer.region)
    with counted(decode) as found:
        assert decode.move(source_ids, block_ids) is None
    assert found == [1, 0, 1]
    expected = np.full(NUM_SMALL, UNTOUCHED)
    expected[block_ids] = np.array(source_ids) + 1
    assert (decode.received == expected[:, None]).all()


def test_more_runs_than_the_table_has_room_for_are_several_launches(peer, decode, monkeypatch):
    monkeypatch.setattr(cuda_run_copier, "RUNS_MAX", 3)
    decode.connect(peer.region)
    with counted(decode) as found:
        check_scattered(decode)
    assert found == [2, 0, 2]


@pytest.mark.parametrize(("version", "batches"), [(12060, 0), (12090, 1), (13000, 1)])
def test_without_the_kernel_it_is_one_batch_where_cuda_has_batches(peer, version, batches):
    with cuda_decode(version=version) as decode:
        with without_kernel(decode):
            decode.connect(peer.region)
        with counted(decode) as found:
            check_scattered(decode)
        assert found == [0, batches, 0 if batches else 4]


def test_a_driver_that_knows_no_batches_copies_run_by_run(peer):
    with cuda_decode(version=13000) as decode:
        with without_kernel(decode):
            decode.connect(peer.region)
        runtime = decode.pool.runtime
        decode.steering.fail("cudaMemcpyBatchAsync", NEWER_DRIVER_NEEDED)
        try:
            check_scattered(decode)
            before = decode.steering.calls("cudaMemcpyBatchAsync")
            check_scattered(decode)
            assert decode.steering.calls("cudaMemcpyBatchAsync") == before
        finally:
            runtime._has_batch = True


def test_what_was_opened_for_the_kernel_serves_the_next_peer_and_goes_at_the_end(peer, decode):
    names = ("cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cuModuleUnload")
    before = [decode.steering.calls(name) for name in names]
    for _ in range(3):
        decode.connect(peer.region)
        check_scattered(decode)
        decode.engine.disconnect(PEER)
        for thread in decode.engine._readers._ending:
            thread.join()
    assert [decode.steering.calls(name) for name in names[1::2]] == before[1::2]
    decode.engine.close()
    after = [decode.steering.calls(name) for name in names]
    assert [n - m for n, m in zip(after, before, strict=True)] == [1] * 5


@pytest.mark.parametrize("function", ["cuModuleGetFunction", "cudaMallocHost"])
def test_a_kernel_that_is_had_in_part_only_is_given_back(peer, decode, function):
    names = ("cuModuleLoadData", "cuModuleUnload", "cudaMalloc", "cudaFree")
    before = [decode.steering.calls(name) for name in names]
    decode.steering.fail(function, NOT_SUPPORTED)
    decode.connect(peer.region)
    loads, unloads, allocations, frees = (
        decode.steering.calls(name) - n for name, n in zip(names, before, strict=True)
    )
    assert (loads, unloads) == (1, 1)
    assert allocations == frees
    check_scattered(decode)


@pytest.mark.parametrize(
    "function",
    ["cudaEventQuery", "cudaEventRecord", "cudaMemcpyAsync", "cudaEventSynchronize"],
)
def test_a_copy_that_fails_breaks_the_connection_until_it_is_made_anew(peer, function):
    with cuda_decode(version=12060) as decode:
        decode.connect(peer.region)
        decode.steering.fail(function, LAUNCH_FAILURE)
        assert isinstance(decode.move([0], [0]), PeerGone)
        assert isinstance(decode.move([0], [0]), PeerGone)
        decode.received[:] = UNTOUCHED
        decode.connect(peer.region)
        check_scattered(decode)


@pytest.mark.parametrize(
    "function",
    [
        "cudaIpcOpenMemHandle",
        "cudaIpcOpenEventHandle",
        "cudaStreamCreateWithFlags",
        "cudaEventCreateWithFlags",
        "cudaGetDriverEntryPointByVersion",
        "cudaMemcpyAsync",
        "cudaSetDevice",
    ],
)
def test_what_cannot_be_opened_is_no_connection_and_says_why(peer, decode, function):
    decode.steering.fail(function, MAP_FAILED)
    with pytest.raises(PeerGone, match="cudaErrorMapBufferObjectFailed"):
        decode.connect(peer.region)
    opened = "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"
    decode.connect(peer.region)
    check_scattered(decode)
    decode.engine.close()
    assert decode.steering.calls(opened[0]) - int(function == opened[0]) >= 1


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_handle": bytes(64)},
        {"memory_handle": b"\xff" * 64},
        {"event_handle": bytes(64)},
        {"event_handle": b"\xff" * 64},
        {"nonce": bytes(32)},
        {"host": "another"},
        {"offset": 0},
        {"offset": 4095},
        {"offset": 8192},
        {"offset": 2 << 20},
        {"offset": 1 << 40},
        {"num_bytes": 1},
        {"num_bytes": SMALL.block_bytes * (NUM_SMALL - 1)},
        {"num_bytes": 1 << 40},
    ],
    ids=str,
)
def test_a_region_that_is_not_the_peers_pool_is_no_connection(peer, decode, changes):
    with pytest.raises(PeerError):
        decode.connect(msgspec.structs.replace(peer.region, **changes))
    assert isinstance(decode.move([0], [0]), PeerGone)
    decode.connect(peer.region)
    check_scattered(decode)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": -1},
        {"pid": os.getpid()},
        {"pid": 2**70},
        {"fd": 0},
        {"fd": 2**31},
        {"incarnation": Incarnation("another")},
        {"num_blocks": 0},
        {"num_blocks": -1},
        {"num_blocks": NUM_SMALL * 2},
        {"num_blocks": 2**62},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_generations_that_are_not_the_peers_are_no_connection(peer, decode, changes):
    head = msgspec.structs.replace(peer.region.head, **changes)
    region = msgspec.structs.replace(peer.region, head=head)
    if "num_blocks" in changes and changes["num_blocks"] > 0:  # it must fit to something
        num_bytes = changes["num_blocks"] * SMALL.block_bytes
        region = msgspec.structs.replace(region, num_bytes=num_bytes)
    with pytest.raises(PeerError):
        decode.connect(region)


def test_a_pool_that_claims_more_blocks_than_memory_is_refused(peer, decode):
    """Else a copy would leave the mapping, and the device would end this process's work for good.

    The peer writes its own header: here it is this process.
    """
    with closing(make_pool(SMALL, 1 << 13, PEER)) as pool, closing(CudaIpcEngine(pool)) as other:
        region = msgspec.structs.replace(
            other.local_region(PEER),
            memory_handle=peer.region.memory_handle,
            event_handle=peer.region.event_handle,
            nonce=peer.region.nonce,
        )
        with pytest.raises(PeerRefused, match="smaller than it says"):
            decode.connect(region)


def test_another_workers_memory_is_not_taken_for_the_peers(peer, decode):
    with cuda_peer(Incarnation("other")) as other:
        region = msgspec.structs.replace(
            peer.region, memory_handle=other.region.memory_handle, nonce=other.region.nonce
        )
        with pytest.raises(PeerError, match="not of the worker"):
            decode.connect(region)


@pytest.mark.parametrize("can_access_peer", [True, False])
def test_another_gpu_is_read_where_the_hardware_can(peer, decode, can_access_peer):
    decode.steering.devices(2, can_access_peer=can_access_peer)
    try:
        with cuda_decode(device=1) as other:  # the peer's is 0
            if can_access_peer:
                other.connect(peer.region)
                check_scattered(other)
            else:
                with pytest.raises(PeerRefused, match="GPU 1 does not reach the memory of GPU 0"):
                    other.connect(peer.region)
    finally:
        decode.steering.devices(1)


@pytest.mark.parametrize("can_be_pinned", [True, False])
def test_landing_memory_is_pinned_while_the_engine_lives(peer, decode, can_be_pinned):
    landing = np.full(16 * SMALL.block_bytes, UNTOUCHED, np.uint8)
    memory = Memory(landing.ctypes.data, len(landing))
    if not can_be_pinned:
        decode.steering.fail("cudaHostRegister", NOT_SUPPORTED)
    decode.engine.register(memory)
    runtime = decode.pool.runtime
    assert runtime.memory_kind(memory.address) == ("host" if can_be_pinned else "unregistered")
    decode.connect(peer.region)
    batches_before = decode.steering.calls("cudaMemcpyBatchAsync")
    assert ended(decode.post(decode.receive_of(*SCATTERED, memory))).error() is None
    num_batches = decode.steering.calls("cudaMemcpyBatchAsync") - batches_before
    assert num_batches == int(can_be_pinned)  # batches take no unpinned memory
    landed = landing.reshape(16, -1)
    for source, place in zip(*SCATTERED, strict=True):
        assert (landed[place] == source + 1).all()
    decode.engine.close()
    assert runtime.memory_kind(memory.address) == "unregistered"


def test_a_region_goes_over_the_wire(peer):
    assert Offer.of("cuda_ipc", peer.region).read() == peer.region
    assert "handle" not in repr(peer.region)


def test_a_pool_on_the_host_is_no_pool_of_a_gpu():
    with (
        closing(KvPool.create(SMALL, 1, PEER)) as pool,
        pytest.raises(ConfigError, match="NVIDIA GPU"),
    ):
        CudaIpcEngine(pool)


def test_cuda_is_loaded_only_by_who_has_a_pool_there():
    program = (
        "import neuron_di.transfer.cuda_ipc_engine, pathlib, sys;"
        "maps = pathlib.Path('/proc/self/maps').read_text();"
        "sys.exit('cudart' in maps)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_engine_that_is_closed_connects_no_more(peer, decode):
    decode.engine.close()
    with pytest.raises(PeerGone, match="closed"):
        decode.connect(peer.region)


def test_what_connects_while_it_is_closed_leaves_no_memory_of_the_device(peer, decode):
    names = ("cudaMalloc", "cudaFree", "cudaMallocHost", "cudaFreeHost", "cuModuleUnload")
    steering = decode.steering
    before = [steering.calls(name) for name in names]
    opened = steering.calls("cudaIpcOpenMemHandle")
    steering.delay(300_000)  # until it has read the peer's mark
    try:
        thread = threading.Thread(target=decode.connect, args=(peer.region,))
        thread.start()
        while steering.calls("cudaIpcOpenMemHandle") == opened:
            time.sleep(0.001)
        decode.engine.close()
        thread.join()
    finally:
        steering.delay(0)
    after = [steering.calls(name) for name in names]
    assert [n - m for n, m in zip(after, before, strict=True)] == [1] * 5
