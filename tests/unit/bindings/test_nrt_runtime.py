"""The runtime of a process: who starts it, who ends it, and what it knows of its instance."""

import mmap
import os
import threading

import numpy as np
import pytest
from nrt_sim import neff
from nrt_steering import until

from neuron_di_bindings.nrt import (
    AsyncQueue,
    InstanceInfo,
    MemoryStats,
    NrtMisuse,
    NrtModel,
    NrtRequestError,
    NrtRetry,
    NrtRuntime,
    NrtStatus,
    NrtUnsupported,
    TensorSet,
    barrier,
    build_global_communicator,
    init_global_communicator,
    network_plugin,
)


def test_counts_are_there_before_the_start(library, sim):
    runtime = NrtRuntime(library)
    assert (runtime.total_cores(), runtime.visible_cores()) == (32, 2)
    assert sim.calls("nrt_init") == 0


def test_counts_of_logical_cores(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_INSTANCE", "trn2.48xlarge")
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "3")
    with NrtRuntime(load()).init() as runtime:
        assert (runtime.total_cores(), runtime.visible_cores()) == (64, 3)
        assert runtime.instance().family == "TRN2"


def test_nothing_else_is(library):
    runtime = NrtRuntime(library)
    with pytest.raises(NrtRequestError) as caught:
        runtime.allocate(64, 0, "early")
    assert caught.value.status == NrtStatus.UNINITIALIZED


def test_what_it_runs_on(runtime):
    assert runtime.instance() == InstanceInfo("TRN1", "32xl", "trn1", "")
    assert runtime.host_device_id(1) == 1
    assert runtime.routing_ids() == tuple(range(16))
    with pytest.raises(NrtRequestError):
        runtime.host_device_id(16)


@pytest.mark.parametrize(
    ("instance", "family", "size"),
    [("inf2.48xlarge", "INF2", "48xl"), ("trn1.2xlarge", "TRN1", "2xl")],
)
def test_families_and_sizes_have_names(load, monkeypatch, instance, family, size):
    monkeypatch.setenv("NRT_SIM_INSTANCE", instance)
    with NrtRuntime(load()).init() as runtime:
        assert (runtime.instance().family, runtime.instance().size) == (family, size)


def test_it_is_started_once(runtime, library, sim):
    with pytest.raises(NrtMisuse, match="started before"):
        NrtRuntime(library).init()
    assert sim.calls("nrt_init") == 1


def test_a_failed_start_can_be_made_again(library, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "31-32")
    runtime = NrtRuntime(library)
    with pytest.raises(NrtRequestError) as caught:
        runtime.init()
    assert caught.value.status == NrtStatus.INVALID
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "30,31")
    with runtime.init():
        assert runtime.visible_cores() == 2


def test_cores_of_another_process_are_busy(runtime, load, monkeypatch):
    """Each copy of the simulator has a process's state; all share the host's cores."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0")
    with pytest.raises(NrtRetry) as caught:
        NrtRuntime(load()).init()
    assert caught.value.status == NrtStatus.EXEC_NC_BUSY


def test_it_can_be_started_again_after_its_end(library, sim):
    for _ in range(2):
        with NrtRuntime(library).init() as runtime:
            runtime.allocate(64, 0, "left").write(0, bytes(64))
    assert sim.calls("nrt_init") == sim.calls("nrt_close") == 2
    assert sim.num_live() == 0


def test_a_second_close_does_nothing_and_nothing_is_used_after_it(library, sim):
    runtime = NrtRuntime(library).init()
    tensor = runtime.allocate(64, 0, "kv")
    runtime.close()
    runtime.close()
    assert sim.calls("nrt_close") == sim.calls("nrt_tensor_free") == 1
    calls = sim.calls("nrt_tensor_read")
    for use in (tensor.read, tensor.write):
        with pytest.raises(NrtMisuse):
            use(0, bytearray(8))
    with pytest.raises(NrtMisuse, match="the runtime is closed"):
        runtime.visible_cores()
    with pytest.raises(NrtMisuse, match="the runtime is closed"):
        runtime.init()
    tensor.free()
    assert sim.calls("nrt_tensor_read") == calls
    assert sim.calls("nrt_tensor_free") == 1


def test_what_is_left_ends_with_it_in_the_right_order(library, sim):
    with NrtRuntime(library).init() as runtime:
        inputs = TensorSet(runtime)
        whole = runtime.allocate(4096, 0, "whole")
        part = whole.slice(0, 64, "part")
        inputs.add("in", part)
        NrtModel.load(runtime, neff.copy(64), 0)
        assert sim.num_live() == 4
    assert sim.num_live() == 0
    assert sim.violation() == ""


def test_it_lives_on_what_somebody_else_started(library, sim):
    """As in a process where torch has started the runtime."""
    ours = NrtRuntime(library)
    theirs = NrtRuntime(library).init()
    with ours.allocate(64, 1, "ours") as tensor:
        tensor.write(0, bytes(range(64)))
        with pytest.raises(NrtMisuse, match="another NrtRuntime has 1 tensors"):
            theirs.close()
    kept = ours.allocate(64, 1, "kept")
    ours.close()
    assert sim.calls("nrt_close") == 0
    assert sim.num_live() == 0
    with pytest.raises(NrtMisuse):
        kept.read(0, bytearray(1))
    theirs.close()
    assert sim.calls("nrt_close") == 1


def test_it_stays_while_a_call_runs(runtime, sim):
    """The call waits before it reaches the library, where nobody else can hold it up."""
    inside, may_leave = threading.Event(), threading.Event()
    plain = runtime.library.call

    def waiting(name, *arguments):
        inside.set()
        assert may_leave.wait(20)
        return plain(name, *arguments)

    runtime.library.call = waiting
    thread = threading.Thread(target=runtime.memory_stats, args=(0,))
    thread.start()
    assert inside.wait(20)
    with pytest.raises(NrtMisuse, match="1 calls are running"):
        runtime.close()
    may_leave.set()
    thread.join(20)
    runtime.library.call = plain
    assert sim.calls("nrt_close") == 0


def test_what_is_made_while_it_ends_ends_with_it(library, sim):
    runtime = NrtRuntime(library).init()
    plain = library.call

    def ending(name, *arguments):
        plain(name, *arguments)
        if name == "nrt_tensor_allocate":  # another thread's close, right after the call
            runtime._num_calls -= 1
            runtime.close()
            runtime._num_calls += 1

    library.call = ending
    with pytest.raises(NrtMisuse, match="tensor 'late': the runtime is closed"):
        runtime.allocate(64, 0, "late")
    assert sim.num_live() == 0


def test_memory_is_counted_per_core(runtime, monkeypatch):
    assert runtime.memory_stats(0) == MemoryStats(0, 256 << 20)
    with runtime.allocate(1 << 20, 1, "kv"):
        assert runtime.memory_stats(0).bytes_used == 0
        assert runtime.memory_stats(1).bytes_used == 1 << 20
    assert runtime.memory_stats(1).bytes_used == 0


def test_more_memory_than_there_is_is_refused(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_HBM_BYTES", str(1 << 20))
    with NrtRuntime(load()).init() as runtime:
        runtime.allocate(3 << 18, 0, "most")
        with pytest.raises(NrtRequestError) as caught:
            runtime.allocate(3 << 18, 0, "too much")
        assert caught.value.status == NrtStatus.RESOURCE
        runtime.allocate(3 << 18, 1, "of another core")
        runtime.allocate(1 << 18, 0, "the rest")
        with pytest.raises(OverflowError):
            runtime.allocate(-1, 0, "less than nothing")
        with pytest.raises(OverflowError):
            runtime.allocate(2**63, 0, "more than there can be")
        with pytest.raises(NrtRequestError):
            runtime.allocate(0, 0, "nothing")


def test_the_adapter_next_to_a_device(runtime, load, monkeypatch):
    with runtime.allocate(64, 0, "kv") as tensor:
        assert runtime.attached_efa(tensor.address) == "0000:10:1a.0"
    assert runtime.attached_efa(4096) is None
    monkeypatch.setenv("NRT_SIM_INSTANCE", "trn1.2xlarge")
    monkeypatch.setenv("NRT_SIM_HOST", "127.0.0.2")
    with NrtRuntime(load(3)).init() as without, without.allocate(64, 0, "kv") as tensor:
        assert without.attached_efa(tensor.address) is None


def test_an_older_library_does_not_know_the_adapter(load):
    with NrtRuntime(load(2)).init() as runtime, runtime.allocate(64, 0, "kv") as tensor:
        assert not runtime.library.has("nrt_get_attached_efa_bdf")
        assert runtime.attached_efa(tensor.address) is None


def test_another_answer_about_the_adapter_is_an_error(runtime, sim):
    sim.fault("nrt_get_attached_efa_bdf", NrtStatus.RESOURCE)
    with pytest.raises(NrtRequestError), runtime.allocate(64, 0, "kv") as tensor:
        runtime.attached_efa(tensor.address)


def test_a_dmabuf_is_a_descriptor_of_the_memory(runtime):
    with runtime.allocate(8192, 0, "kv") as tensor:
        tensor.write(4096, b"seen through the descriptor")
        descriptor = runtime.dmabuf_fd(tensor.address, 8192)
        try:
            start = os.lseek(descriptor, 0, os.SEEK_CUR)  # the simulator's own way to say where
            with mmap.mmap(descriptor, 8192, offset=start, access=mmap.ACCESS_READ) as memory:
                assert memory[4096:4123] == b"seen through the descriptor"
        finally:
            os.close(descriptor)
        with pytest.raises(NrtRequestError):
            runtime.dmabuf_fd(tensor.address + 1, 8192)
    with pytest.raises(NrtUnsupported):
        runtime.dmabuf_place(4096, 4096)


def test_the_host_window_is_refused_as_the_simulator_has_none(runtime, sim):
    with pytest.raises(NrtRequestError) as caught:
        runtime.hbm_window(0, 0)
    assert caught.value.status == NrtStatus.INVALID
    sim.fault("nrt_get_hbm_mmap_va", NrtStatus.INVALID_HANDLE)
    assert runtime.hbm_window(0, 9) is None


def test_bytes_go_to_a_device_address(runtime):
    with runtime.allocate(64, 0, "kv") as tensor:
        runtime.copy_to_device(tensor.address + 8, b"written")
        found = bytearray(7)
        tensor.read(8, found)
        assert found == b"written"


def test_host_memory_is_a_tensor_and_stays(runtime):
    memory = np.arange(64, dtype=np.uint8)
    tensor = runtime.wrap(memory, 0, "host")
    assert (tensor.num_bytes, tensor.size_in_library()) == (64, 64)
    assert tensor.address == memory.ctypes.data
    del memory
    found = bytearray(64)
    tensor.read(0, found)
    assert found == bytes(range(64))
    with runtime.allocate(64, 0, "device") as device:
        tensor.copy_to(device)
        device.fill(7, 0, 32)
        device.copy_to(tensor)
    tensor.read(0, found)
    assert found == bytes([7] * 32) + bytes(range(32, 64))


def test_a_wrapped_tensor_that_cannot_be_is_ended(runtime, sim):
    sim.fault("nrt_tensor_attach_buffer", NrtStatus.INVALID)
    with pytest.raises(NrtRequestError):
        runtime.wrap(bytearray(64), 0, "host")
    assert sim.num_live() == 0


def test_host_placement(runtime):
    with runtime.allocate(64, 1, "host", placement="host") as tensor:
        tensor.write(0, bytes(range(64)))
        assert runtime.memory_stats(1).bytes_used == 0
        assert tensor.core == 1


def test_a_group_of_one_meets_itself(runtime):
    build_global_communicator(runtime, 0, 0, 1)
    init_global_communicator(runtime, 0, 0, 1)
    barrier(runtime, 1, 0, 1)
    with pytest.raises(NrtRequestError):
        barrier(runtime, 1, 0, 2)
    with pytest.raises(NrtRequestError) as caught:
        network_plugin(runtime)
    assert caught.value.__notes__ == ["the simulator has no network plugin"]


def test_scheduled_work_keeps_it(library, sim):
    runtime = NrtRuntime(library).init()
    tensor = runtime.allocate(64, 0, "kv")
    queue = AsyncQueue(runtime, 0)
    sim.hold_queues(True)
    pending = queue.write(tensor, 0, bytes(64))
    with pytest.raises(NrtMisuse, match="1 are pending on a queue of core 0"):
        runtime.close()
    sim.hold_queues(False)
    until(pending.is_done)
    runtime.close()
