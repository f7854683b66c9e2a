"""A KV pool in GPU memory, and the CUDA runtime library it needs."""

import os
import threading
from contextlib import closing

import pytest
from contract.cuda_pair import NUM_SMALL, SMALL
from contract.fake_cuda import WHY_NOT, Steering, fake_runtime, library_path, make_pool
from contract.numbered_blocks import bytes_of

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv import KvLayout, device_copies
from neuron_di.kv.device_pool import DevicePool, open_runtime
from neuron_di.transfer import make_engines
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.cuda_runtime import CudaError, CudaMissing, load_cuda

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

OWN = Incarnation("own")
NO_MEMORY, INSUFFICIENT_DRIVER, NOT_SUPPORTED = 2, 35, 801


@pytest.fixture
def pool():
    with closing(make_pool(SMALL, NUM_SMALL, OWN)) as pool:
        yield pool


def test_blocks_are_zeros_at_first(pool):
    assert pool.memory().num_bytes == NUM_SMALL * SMALL.block_bytes
    assert not bytes_of(pool.device_memory()).any()  # the simulator gives other bytes


def test_exported_memory_shares_no_page_with_anything_else(pool):
    base, num_bytes = pool.runtime.extent(pool.device_address)
    assert num_bytes % (2 << 20) == 0
    assert base <= pool.device_address
    assert pool.device_address + pool.memory().num_bytes <= base + num_bytes


def test_giving_blocks_up_shows_in_their_generations(pool):
    assert pool.generations([BlockId(2), BlockId(3)]) == [0, 0]
    pool.retire([BlockId(3)])
    assert pool.generations([BlockId(2), BlockId(3)]) == [0, 1]


@pytest.mark.parametrize("staging_bytes", [1, 4 * SMALL.block_bytes, 8 << 20])
def test_blocks_are_read_on_the_host_through_bounded_memory(monkeypatch, staging_bytes):
    monkeypatch.setattr(device_copies, "STAGING_BYTES", staging_bytes)
    with closing(make_pool(SMALL, NUM_SMALL, OWN)) as pool:
        blocks = bytes_of(pool.device_memory()).reshape(NUM_SMALL, -1)
        for n in range(NUM_SMALL):
            blocks[n] = n + 1
        block_ids = [BlockId(n) for n in (7, 3, 3, 0, 15, 14, 13)]
        found = [bytes(block) for block in pool.read_blocks(block_ids)]
    assert found == [bytes([n + 1]) * SMALL.block_bytes for n in block_ids]


def test_blocks_are_read_after_the_kernels_that_were_recorded(pool):
    runtime, steering = pool.runtime, Steering.of()
    stream = runtime.create_stream()
    steering.hold(stream)
    runtime.fill(pool.device_address, 9, SMALL.block_bytes, stream)
    pool.record(stream)
    found, num_stuck = [], steering.waiting()
    reading = threading.Thread(
        target=lambda: found.extend(bytes(block) for block in pool.read_blocks([BlockId(0)]))
    )
    reading.start()
    while steering.waiting() == num_stuck:
        reading.join(0.001)
    assert not found
    steering.release()
    reading.join()
    assert found == [bytes([9]) * SMALL.block_bytes]
    runtime.destroy_stream(stream)


@pytest.mark.parametrize("block_id", [-1, NUM_SMALL])
def test_a_block_outside_of_the_pool_is_not_read(pool, block_id):
    with pytest.raises(LocalProtocolError):
        list(pool.read_blocks([BlockId(block_id)]))


def test_kernels_of_two_streams_are_not_recorded(pool):
    streams = [pool.runtime.create_stream() for _ in range(2)]
    pool.record(streams[0])
    pool.record(streams[0])
    with pytest.raises(LocalProtocolError):
        pool.record(streams[1])
    for stream in streams:
        pool.runtime.destroy_stream(stream)


def test_a_closed_pool_has_given_its_memory_back():
    pool = make_pool(SMALL, NUM_SMALL, OWN)
    list(pool.read_blocks([BlockId(0)]))
    calls = {name: Steering.of().calls(name) for name in ("cudaFree", "cudaFreeHost")}
    pool.close()
    pool.close()
    assert all(Steering.of().calls(name) == before + 1 for name, before in calls.items())


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("cudaMalloc", NO_MEMORY),
        ("cudaMallocHost", NO_MEMORY),
        ("cudaStreamCreateWithFlags", NO_MEMORY),
        ("cudaMemsetAsync", NOT_SUPPORTED),
        ("cudaGetDeviceCount", NOT_SUPPORTED),
    ],
)
def test_a_pool_that_cannot_be_had_says_why_and_leaves_nothing(function, code):
    make_pool(SMALL, NUM_SMALL, OWN).close()
    counted = ("cudaMalloc", "cudaFree", "cudaEventCreateWithFlags", "cudaEventDestroy")
    before = [Steering.of().calls(name) for name in counted]
    num_open = len(os.listdir("/proc/self/fd"))
    Steering.of().fail(function, code)
    with pytest.raises(ConfigError, match=f"cannot allocate .*{function}"):
        make_pool(SMALL, NUM_SMALL, OWN)
    allocated, freed, created, destroyed = (
        Steering.of().calls(name) - start for name, start in zip(counted, before, strict=True)
    )
    assert (allocated - int(function == "cudaMalloc"), created) == (freed, destroyed)
    assert len(os.listdir("/proc/self/fd")) == num_open
    make_pool(SMALL, NUM_SMALL, OWN).close()


@pytest.mark.parametrize(
    "function", ["cudaIpcGetMemHandle", "cudaIpcGetEventHandle", "cudaDeviceGetAttribute"]
)
def test_memory_that_nobody_else_can_open_is_a_pool_all_the_same(function):
    Steering.of().fail(function, NOT_SUPPORTED)
    with closing(make_pool(SMALL, NUM_SMALL, OWN)) as pool:
        assert function in pool.not_shared
        with pytest.raises(ConfigError, match=function):
            CudaIpcEngine(pool)
        lacking = {}
        engines = make_engines(pool, TransferOptions(), "127.0.0.1", on_lacking=lacking.__setitem__)
        assert [engine.name for engine in engines] == ["tcp"]
        assert function in lacking["cuda_ipc"]
        for engine in engines:
            engine.close()


@pytest.mark.parametrize(
    ("names", "keeps_mirror"),
    [(("auto",), False), (("tcp",), False), (("shm",), True), (("cuda_ipc", "shm"), True)],
)
def test_engines_of_a_gpus_pool(pool, names, keeps_mirror):
    engines = make_engines(pool, TransferOptions(transfer=names), "127.0.0.1")
    expected = ("cuda_ipc", "tcp") if names == ("auto",) else names
    assert tuple(engine.name for engine in engines) == expected
    assert pool.keeps_mirror == keeps_mirror
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("device", [-1, 1])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(ConfigError, match=f"no CUDA device {device}"):
        DevicePool.create(SMALL, 1, OWN, runtime=fake_runtime(), device=device)


def test_a_layout_that_no_memory_holds_is_refused():
    huge = KvLayout(
        num_layers=4096, num_kv_heads=4096, head_dim=65536, block_size=1 << 20, dtype="float32"
    )
    with pytest.raises(ConfigError):
        make_pool(huge, 1 << 20, OWN)


def test_without_the_library_the_extra_is_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"pip install '.\[cuda\]'.*NEURON_DI_CUDART"):
        open_runtime("/nowhere/libcudart.so.12")
    monkeypatch.setenv("NEURON_DI_CUDART", "/nowhere/libcudart.so.12")
    with pytest.raises(ConfigError, match="nowhere"):
        open_runtime()
    monkeypatch.setenv("NEURON_DI_CUDART", str(library_path()))
    assert open_runtime().version == fake_runtime().version


def test_a_library_that_is_none_or_too_old_is_refused():
    with pytest.raises(CudaMissing):
        load_cuda("libc.so.6")
    with pytest.raises(CudaMissing, match="11080"):
        load_cuda(str(library_path(11080)))


def test_a_library_that_is_newer_than_the_driver_is_not_taken():
    Steering.of().fail("cudaGetDeviceCount", INSUFFICIENT_DRIVER)
    with pytest.raises(CudaMissing, match="cudaGetDeviceCount"):
        load_cuda(str(library_path()))


def test_an_error_has_cudas_name(pool):
    Steering.of().fail("cudaMalloc", NO_MEMORY)
    with pytest.raises(CudaError, match="cudaMalloc: cudaErrorMemoryAllocation") as caught:
        pool.runtime.allocate(1)
    assert (caught.value.code, caught.value.name) == (NO_MEMORY, "cudaErrorMemoryAllocation")
