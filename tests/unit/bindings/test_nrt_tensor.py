"""Bytes in and out of tensors, and whose memory is there how long."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from nrt_sim.build import library_path

from neuron_di_bindings.nrt import (
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtRuntime,
    NrtStatus,
    NrtWorkerError,
    read_tensors,
    write_tensors,
)


@pytest.fixture
def tensor(runtime):
    with runtime.allocate(256, 0, "kv") as made:
        made.write(0, bytes(range(256)))
        yield made


def test_it_is_what_was_asked_for(tensor, runtime):
    assert (tensor.num_bytes, tensor.core, tensor.name) == (256, 0, "kv")
    assert tensor.size_in_library() == 256
    assert repr(tensor) == "NrtTensor('kv', 256 bytes, core 0)"
    info = tensor.allocation_info()
    assert (info.num_bytes, info.hbm_index) == (256, 0)
    assert info.physical_address != 0


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda size: memoryview(bytearray(size)),
        lambda size: np.empty(size, np.uint8),
        lambda size: np.empty(size // 8, np.float64),
        lambda size: memoryview(np.empty((2, size // 4), np.int16)),
        lambda size: np.empty((3, size), np.uint8)[1],
    ],
)
def test_any_run_of_host_memory_is_read_into(tensor, make):
    into = make(32)
    tensor.read(16, into)
    assert bytes(memoryview(into).cast("B") if memoryview(into).nbytes else b"") == bytes(
        range(16, 48)
    )


@pytest.mark.parametrize(
    "data", [b"12345678", bytearray(b"12345678"), memoryview(b"12345678"), np.arange(4, dtype="<H")]
)
def test_any_run_of_host_memory_is_written(tensor, data):
    tensor.write(100, data)
    found = bytearray(10)
    tensor.read(99, found)
    assert found == b"\x63" + bytes(memoryview(data).cast("B")) + b"\x6c"


def test_numbers_of_numpy_are_numbers(tensor):
    found = bytearray(2)
    tensor.read(np.int64(7), found)
    assert found == b"\x07\x08"
    tensor.read_many([(np.uint16(9), memoryview(found)[1:])])
    assert found == b"\x07\x09"


def test_memory_that_cannot_be_written_or_has_holes_is_refused(tensor, sim):
    for wrong in (b"12345678", memoryview(b"12345678"), np.arange(16, dtype=np.uint8)[::2]):
        with pytest.raises(ValueError, match="host memory"):
            tensor.read(0, wrong)
    with pytest.raises(ValueError, match="one run"):
        tensor.write(0, np.zeros((4, 4), np.uint8)[:, :2])
    assert sim.calls("nrt_tensor_read") == 0


@pytest.mark.parametrize(
    ("offset", "count"), [(-1, 4), (253, 4), (256, 1), (257, 0), (2**63, 1), (2**64, 1), (0, 257)]
)
def test_what_is_not_within_it_never_arrives(tensor, sim, offset, count):
    before = {name: sim.calls(f"nrt_tensor_{name}") for name in ("read", "write", "memset", "copy")}
    buffer = bytearray(count)
    for use in (
        lambda: tensor.read(offset, buffer),
        lambda: tensor.write(offset, buffer),
        lambda: tensor.read_many([(0, bytearray(4)), (offset, buffer)]),
        lambda: tensor.write_many([(0, bytes(4)), (offset, buffer)]),
        lambda: tensor.fill(0, offset, count),
        lambda: tensor.copy_to(tensor, offset=offset, num_bytes=count),
        lambda: tensor.copy_to(tensor, destination_offset=offset, num_bytes=count),
        lambda: tensor.slice(offset, count, "part"),
    ):
        with pytest.raises(ValueError, match="are not within the 256 of tensor 'kv'"):
            use()
    assert before == {name: sim.calls(f"nrt_tensor_{name}") for name in before}
    assert sim.calls("nrt_tensor_read_batch") == sim.calls("nrt_tensor_write_batch") == 0


def test_the_library_refuses_it_as_well(runtime, tensor):
    """What Python checks is what the library would say."""
    found = bytearray(1)
    address = np.frombuffer(found, np.uint8).ctypes.data
    with tensor.handle.use() as pointer, pytest.raises(NrtRequestError) as caught:
        runtime.call("nrt_tensor_read", pointer, address, 256, 1)
    assert caught.value.status == NrtStatus.INVALID


def test_nothing_is_no_error(tensor):
    tensor.read(256, bytearray())
    tensor.write(0, b"")
    tensor.read_many([])
    tensor.write_many([])
    found = bytearray(256)
    tensor.read(0, found)
    assert found == bytes(range(256))


def test_many_runs_go_in_one_call(tensor, sim):
    tensor.write_many([(0, b"ab"), (250, np.array([1, 2, 3], np.uint8)), (100, b"")])
    first, second = bytearray(3), np.zeros(3, np.uint8)
    tensor.read_many([(0, first), (250, second)])
    assert (bytes(first), bytes(second)) == (b"ab\x02", b"\x01\x02\x03")
    assert sim.calls("nrt_tensor_write_batch") == sim.calls("nrt_tensor_read_batch") == 1
    assert sim.calls("nrt_tensor_read") == 0


def test_many_runs_of_many_tensors_go_in_one_call(runtime, tensor, sim):
    with runtime.allocate(64, 1, "other") as other:
        write_tensors([(tensor, [(8, b"first")]), (other, [(0, b"one"), (61, b"two")])])
        founds = [bytearray(5), bytearray(3), bytearray(3)]
        read_tensors(
            [(tensor, [(8, founds[0])]), (other, [(0, founds[1]), (61, founds[2])]), (tensor, [])]
        )
    assert founds == [b"first", b"one", b"two"]
    assert sim.calls("nrt_tensor_write_batch") == sim.calls("nrt_tensor_read_batch") == 1


def test_a_library_without_batches_is_called_for_each_run(runtime, tensor, sim, monkeypatch):
    has = runtime.library.has
    monkeypatch.setattr(runtime.library, "has", lambda name: "batch" not in name and has(name))
    before = sim.calls("nrt_tensor_write")
    tensor.write_many([(0, b"ab"), (4, b"cd")])
    found = bytearray(6)
    tensor.read_many([(0, memoryview(found)[:2]), (2, memoryview(found)[2:])])
    assert found == b"ab\x02\x03cd"
    assert sim.calls("nrt_tensor_write") == before + 2
    assert sim.calls("nrt_tensor_read") == 2


def test_a_batch_that_fails_lets_go_of_its_tensors(runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    sim.fault("nrt_tensor_read_batch", NrtStatus.DMA_ABORT)
    with pytest.raises(NrtWorkerError):
        tensor.read_many([(0, bytearray(8))])
    tensor.free()
    assert sim.num_tensors() == 0


def test_fill_and_copy_on_the_device(tensor, sim):
    tensor.fill(9, 10, 2)
    tensor.copy_to(tensor, offset=8, destination_offset=200, num_bytes=4)
    found = bytearray(4)
    tensor.read(200, found)
    assert found == b"\x08\x09\x09\x09"
    tensor.fill(255, 254)
    tensor.read(252, found)
    assert found == b"\xfc\xfd\xff\xff"
    for wrong in (-1, 256):
        with pytest.raises(ValueError, match="no byte"):
            tensor.fill(wrong)


def test_a_copy_to_another_core_is_refused_by_the_library(tensor, runtime):
    with runtime.allocate(256, 1, "far") as far, pytest.raises(NrtRequestError) as caught:
        tensor.copy_to(far)
    assert caught.value.status == NrtStatus.INVALID


def test_a_slice_is_the_same_memory(tensor):
    with tensor.slice(64, 32, "part") as part:
        assert (part.num_bytes, part.core, part.name) == (32, 0, "part")
        assert part.address == tensor.address + 64
        part.write(0, b"from the slice")
        with part.slice(5, 9, "part of it") as smaller:
            found = bytearray(9)
            smaller.read(0, found)
        assert found == b"the slice"
    tensor.read(69, found)
    assert found == b"the slice"


def test_a_slice_keeps_the_memory_of_a_tensor_that_was_freed(runtime, sim):
    whole = runtime.allocate(4096, 0, "whole")
    whole.write(0, b"kept")
    part = whole.slice(0, 4, "part")
    whole.free()
    assert sim.calls("nrt_tensor_free") == 0
    with pytest.raises(NrtMisuse, match="tensor 'whole' is used after it was given up"):
        whole.read(0, bytearray(4))
    found = bytearray(4)
    part.read(0, found)
    assert found == b"kept"
    part.free()
    assert sim.calls("nrt_tensor_free") == 2
    assert sim.num_tensors() == 0
    assert runtime.memory_stats(0).bytes_used == 0


def test_a_freed_tensor_is_used_by_nobody(runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    other = runtime.allocate(64, 0, "other")
    tensor.free()
    tensor.free()
    assert sim.calls("nrt_tensor_free") == 1
    for use in (
        lambda: tensor.read(0, bytearray(1)),
        lambda: tensor.write(0, b"1"),
        lambda: tensor.read_many([(0, bytearray(1))]),
        lambda: tensor.fill(0),
        lambda: tensor.copy_to(other),
        lambda: other.copy_to(tensor),
        lambda: tensor.slice(0, 1, "part"),
        lambda: tensor.address,
        tensor.allocation_info,
        tensor.size_in_library,
        tensor.reset_output,
        lambda: tensor.wait_for_output(0, 0),
    ):
        with pytest.raises(NrtMisuse, match="tensor 'kv' is used after it was given up"):
            use()
    other.free()
    assert sim.num_tensors() == 0


def test_a_tensor_that_is_freed_during_a_call_ends_after_it(runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    inside, may_leave = threading.Event(), threading.Event()
    plain = runtime.library.call

    def waiting(name, *arguments):
        if name == "nrt_tensor_read":
            inside.set()
            assert may_leave.wait(20)
        return plain(name, *arguments)

    runtime.library.call = waiting
    thread = threading.Thread(target=tensor.read, args=(0, bytearray(64)))
    thread.start()
    assert inside.wait(20)
    tensor.free()
    assert sim.calls("nrt_tensor_free") == 0
    may_leave.set()
    thread.join(20)
    assert sim.calls("nrt_tensor_free") == 1
    assert sim.calls("nrt_tensor_read") == 1


def test_host_memory_of_a_tensor_lives_as_long_as_the_library_has_it(runtime):
    memory = np.zeros(64, np.uint8)
    watched = weakref.ref(memory)
    tensor = runtime.wrap(memory, 0, "host")
    part = tensor.slice(0, 8, "part")
    tensor.free()
    del memory, tensor
    gc.collect()
    assert watched() is not None
    part.free()
    del part
    gc.collect()
    assert watched() is None


def test_outputs_are_counted(tensor):
    tensor.wait_for_output(0, 0.0)
    with pytest.raises(NrtRetry) as caught:
        tensor.wait_for_output(1, 0.001)
    assert caught.value.status == NrtStatus.TIMEOUT
    with pytest.raises(ValueError, match="time-out"):
        tensor.wait_for_output(1, -1.0)
    tensor.reset_output()


def test_a_tensor_without_an_address_is_an_error(runtime, sim, tensor):
    sim.fault("nrt_tensor_get_va", NrtStatus.FAILURE)
    with pytest.raises(NrtRequestError, match="nrt_tensor_get_va"):
        _ = tensor.address


def test_many_threads_use_one_tensor(tensor):
    """Each its own bytes, as the header promises nothing else."""
    wrong = []

    def work(place):
        for number in range(50):
            tensor.write(place * 8, bytes([number] * 8))
            found = bytearray(8)
            tensor.read(place * 8, found)
            if found != bytes([number] * 8):
                wrong.append((place, number))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_a_device_address_is_not_for_the_host(simulated):
    """Who looks there dies of it, as a read over the bus would be wrong on a device."""
    script = (
        "import ctypes\n"
        "from neuron_di_bindings.nrt import NrtRuntime, load_nrt\n"
        f"runtime = NrtRuntime(load_nrt({str(library_path())!r})).init()\n"
        "print(runtime.allocate(64, 0, 'kv').address, flush=True)\n"
        "ctypes.string_at(runtime.allocate(64, 0, 'kv').address, 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ)
    )
    assert int(done.stdout) > 0
    assert done.returncode == -signal.SIGSEGV


def test_tensors_of_an_attached_runtime_end_with_it(library, sim):
    with NrtRuntime(library).init():
        with NrtRuntime(library) as attached:
            attached.allocate(64, 0, "left")
        assert sim.num_tensors() == 0
