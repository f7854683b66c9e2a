"""Work that runs later, with the functions of both generations."""

import contextlib
import gc
import os
import select
import threading
import weakref

import numpy as np
import pytest
from nrt_sim import neff
from nrt_steering import Steering, patched_call, until

from neuron_di_bindings.nrt import (
    AsyncQueue,
    NrtLibrary,
    NrtMisuse,
    NrtModel,
    NrtRequestError,
    NrtRetry,
    NrtRuntime,
    NrtStatus,
    NrtUnsupported,
    NrtWorkerError,
    TensorSet,
    Unit,
)

WAIT_MS = 20_000


@pytest.fixture(params=[2, 3])
def library(load, request) -> NrtLibrary:
    return load(request.param)


@pytest.fixture
def sim(library):
    return Steering(library)


@pytest.fixture
def queue(runtime):
    with contextlib.closing(AsyncQueue(runtime, 0)) as made:
        yield made


@pytest.fixture
def tensor(runtime):
    with runtime.allocate(256, 0, "kv") as made:
        made.write(0, bytes(range(256)))
        yield made


def wait(pending):
    """Until it is over, by its descriptor."""
    descriptor = pending.completion_fd()
    try:
        watch = select.poll()
        watch.register(descriptor, select.POLLIN)
        assert watch.poll(WAIT_MS)
    finally:
        os.close(descriptor)
    assert pending.is_done()


def test_bytes_go_in_and_out_in_order(queue, tensor):
    found = bytearray(4)
    writing = queue.write(tensor, 8, b"data")
    wait(writing)
    reading = queue.read(tensor, 8, found)
    wait(reading)
    writing.result()
    reading.result()
    assert found == b"data"
    assert reading.is_done()


def test_a_copy_on_the_device(queue, tensor):
    wait(queue.copy(tensor, 10, tensor, 200, 3))
    found = bytearray(3)
    tensor.read(200, found)
    assert found == b"\x0a\x0b\x0c"


def test_a_model_runs(queue, runtime):
    model = NrtModel.load(runtime, neff.add(2), 0)
    inputs, outputs = TensorSet(runtime), TensorSet(runtime)
    tensors = {name: runtime.allocate(8, 0, name) for name in ("left", "right", "sum")}
    for name, tensor in tensors.items():
        tensor.write(0, np.array([1, 2], np.float32))
        (outputs if name == "sum" else inputs).add(name, tensor)
    pending = queue.execute(model, inputs, outputs)
    wait(pending)
    pending.result()
    found = np.empty(2, np.float32)
    tensors["sum"].read(0, found)
    assert found.tolist() == [2, 4]
    assert queue.last_done(Unit.COMPUTE) == pending.sequence


def test_sequence_numbers_grow_and_name_their_unit(queue, tensor):
    first = queue.write(tensor, 0, b"1")
    second = queue.write(tensor, 1, b"2")
    assert second.sequence == first.sequence + 1
    wait(second)
    unit = Unit.TENSOR_WRITE if queue.generation == 2 else Unit.TENSOR_OP
    assert queue.last_done(unit) == second.sequence
    assert first.is_done()
    later = AsyncQueue(queue.runtime, 1)  # the top 16 bits of this one's numbers are not 0
    with queue.runtime.allocate(8, 1, "far") as far:
        pending = later.write(far, 0, b"x")
        wait(pending)
        assert pending.sequence >> 48 != second.sequence >> 48
        pending.result()
    later.close()


def test_units_are_numbered_by_generation():
    assert [unit.number(2) for unit in Unit] == [0, 1, 2, 3, 4]
    assert [unit.number(3) for unit in Unit] == [0, 0, 0, 1, 2]


def test_what_is_not_over_has_no_result(queue, tensor, sim):
    sim.hold_queues(True)
    pending = queue.write(tensor, 0, b"later")
    assert not pending.is_done()
    assert queue.num_pending() == 1
    with pytest.raises(NrtMisuse, match="asked for before it is over"):
        pending.result()
    with pytest.raises(NrtMisuse, match="closed with 1 pending"):
        queue.close()
    sim.hold_queues(False)
    wait(pending)
    pending.result()
    assert queue.num_pending() == 0


def test_a_full_queue_is_back_pressure(load, monkeypatch):
    monkeypatch.setenv("NRT_SIM_QUEUE_DEPTH", "2")
    for api in (2, 3):
        library = load(api)
        sim = Steering(library)
        with NrtRuntime(library).init() as runtime:
            queue = AsyncQueue(runtime, 0)
            tensor = runtime.allocate(64, 0, "kv")
            sim.hold_queues(True)
            works = [queue.write(tensor, place, b"x") for place in range(2)]
            with pytest.raises(NrtRetry) as caught:
                queue.write(tensor, 2, b"x")
            assert caught.value.status == NrtStatus.QUEUE_FULL
            assert queue.num_pending() == 2
            sim.hold_queues(False)
            wait(works[1])
            again = queue.write(tensor, 2, b"x")
            wait(again)
            assert [work.result() for work in (*works, again)] == [None] * 3
            queue.close()


def test_an_error_comes_with_the_result_of_its_own_work(queue, tensor, sim):
    sim.hold_queues(True)
    sim.fault("queues.run", NrtStatus.EXEC_OOB)
    failing, fine = queue.write(tensor, 0, b"a"), queue.write(tensor, 1, b"b")
    sim.hold_queues(False)
    wait(fine)
    fine.result()
    for _ in range(2):
        with pytest.raises(NrtRequestError, match=r"nrta_tensor_write: NRT_EXEC_OOB \(1006\)"):
            failing.result()
    sim.fault("queues.run", NrtStatus.NC_UE)
    broken = queue.write(tensor, 0, b"a")
    wait(broken)
    with pytest.raises(NrtWorkerError):
        broken.result()


def test_errors_are_kept_no_longer_than_their_work(queue, tensor, sim):
    sim.fault("queues.run", NrtStatus.EXEC_OOB, times=3)
    works = [queue.write(tensor, place, b"x") for place in range(4)]
    wait(works[3])
    assert queue.num_pending() == 0
    wait(queue.write(tensor, 0, b"x"))
    assert queue._errors == {}
    for work in works[:3]:
        with pytest.raises(NrtRequestError):
            work.result()


def test_a_closed_queue_is_forgotten(runtime):
    queue = AsyncQueue(runtime, 0)
    watched = weakref.ref(queue)
    queue.close()
    del queue
    gc.collect()
    assert watched() is None


def test_what_can_not_be_scheduled_is_not_kept(queue, runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    sim.fault("nrta_tensor_write", NrtStatus.INVALID)
    with pytest.raises(NrtRequestError):
        queue.write(tensor, 0, b"x")
    assert queue.num_pending() == 0
    tensor.free()
    assert sim.num_tensors() == 0


def test_bounds_and_cores_are_checked_before(queue, runtime, tensor, sim):
    with runtime.allocate(64, 1, "far") as far:
        for use in (
            lambda: queue.write(tensor, 255, b"ab"),
            lambda: queue.read(tensor, -1, bytearray(1)),
            lambda: queue.copy(tensor, 0, tensor, 250, 7),
            lambda: queue.read(tensor, 0, b"not writable"),
            lambda: queue.write(far, 0, b"x"),
            lambda: queue.read(far, 0, bytearray(1)),
            lambda: queue.copy(tensor, 0, far, 0, 1),
            lambda: queue.copy(far, 0, tensor, 0, 1),
        ):
            with pytest.raises(ValueError, match=r"not within|host memory|on a queue of core 0"):
                use()
    names = ("nrta_tensor_write", "nrta_tensor_read", "nrta_tensor_copy")
    assert [sim.calls(name) for name in names] == [0, 0, 0]


def test_tensors_and_host_memory_stay_until_it_is_over(queue, runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    memory = np.zeros(64, np.uint8)
    watched = weakref.ref(memory)
    sim.hold_queues(True)
    queue.read(tensor, 0, memory)  # nobody keeps what it gives
    tensor.free()
    del memory
    gc.collect()
    assert watched() is not None
    assert sim.calls("nrt_tensor_free") == 0
    with pytest.raises(NrtMisuse):
        tensor.read(0, bytearray(1))
    sim.hold_queues(False)
    until(lambda: not queue.num_pending())
    assert sim.calls("nrt_tensor_free") == 1
    gc.collect()
    assert watched() is None


def test_what_was_scheduled_as_ctrl_c_came_stays_until_it_is_over(queue, runtime, tensor, sim):
    plain = runtime.library.call

    def interrupted(*arguments):
        plain(*arguments)
        raise KeyboardInterrupt

    memory = np.zeros(64, np.uint8)
    watched = weakref.ref(memory)
    sim.hold_queues(True)
    with patched_call(runtime.library, interrupted), pytest.raises(KeyboardInterrupt):
        queue.read(tensor, 0, memory)
    del memory
    gc.collect()
    assert watched() is not None
    assert queue.num_pending() == 1
    sim.hold_queues(False)
    until(lambda: not queue.num_pending())
    gc.collect()
    assert watched() is None


def test_what_ctrl_c_kept_from_being_scheduled_is_forgotten(queue, runtime, tensor, sim):
    def interrupted(*_):
        raise KeyboardInterrupt

    with patched_call(runtime.library, interrupted), pytest.raises(KeyboardInterrupt):
        queue.write(tensor, 0, b"x")
    assert queue.num_pending() == 0
    wait(queue.write(tensor, 0, b"y"))
    assert sim.calls("nrta_tensor_write") == 1


def test_a_set_stays_as_it_is_until_what_runs_with_it_is_over(queue, runtime, sim):
    model = NrtModel.load(runtime, neff.copy(8), 0)
    inputs, outputs = TensorSet(runtime, "inputs"), TensorSet(runtime, "outputs")
    first, second = (runtime.allocate(8, 0, name) for name in ("first", "second"))
    inputs.add("in", first)
    outputs.add("out", second)
    sim.hold_queues(True)
    pending = queue.execute(model, inputs, outputs)
    with pytest.raises(NrtMisuse, match="inputs is changed while an execution uses it"):
        inputs.add("in", second)
    sim.hold_queues(False)
    wait(pending)
    inputs.add("in", second)


def test_a_model_runs_on_its_own_core(queue, runtime, sim):
    model = NrtModel.load(runtime, neff.copy(8), 1)
    with (
        TensorSet(runtime) as empty,
        pytest.raises(ValueError, match="of core 1 on a queue of core 0"),
    ):
        queue.execute(model, empty, empty)
    assert sim.calls("nrta_execute_schedule") == 0


def test_what_nobody_asks_for_is_let_go_by_later_work(queue, runtime, sim):
    tensor = runtime.allocate(64, 0, "kv")
    for _ in range(200):  # more than a queue takes at once
        with contextlib.suppress(NrtRetry):
            last = queue.write(tensor, 0, b"x")
    wait(last)
    wait(queue.write(tensor, 0, b"x"))
    assert len(queue._working) == 0


def test_a_closed_queue_takes_nothing(runtime, tensor, sim):
    queue = AsyncQueue(runtime, 0)
    wait(queue.write(tensor, 0, b"x"))
    queue.close()
    queue.close()
    with pytest.raises(NrtMisuse, match="the queue is closed"):
        queue.write(tensor, 0, b"x")
    assert sim.calls("nrta_tensor_write") == 1
    assert sim.calls("nrta_error_tracker_destroy") == (queue.generation == 2)


def test_nothing_is_scheduled_between_the_count_and_the_end(runtime, tensor):
    queue = AsyncQueue(runtime, 0)
    lock, refused = queue._lock, []

    class OthersComeNext:
        def __enter__(self):
            lock.acquire()

        def __exit__(self, *_):
            queue._lock = lock
            lock.release()
            try:
                queue.write(tensor, 0, b"x")
            except NrtMisuse:
                refused.append(queue)

    queue._lock = OthersComeNext()
    queue.close()
    assert refused == [queue]
    assert queue.objection() is None


def test_a_queue_that_is_not_there(runtime):
    with pytest.raises(NrtRequestError), runtime.allocate(64, 0, "kv") as tensor:
        AsyncQueue(runtime, 0, queue=7).write(tensor, 0, b"x")


def test_many_threads_schedule(queue, tensor):
    works = []

    def work(place):
        for number in range(20):
            while True:
                try:
                    works.append(queue.write(tensor, place, bytes([number])))
                    break
                except NrtRetry:
                    queue.num_pending()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    until(lambda: not queue.num_pending())
    assert len({each.sequence for each in works}) == 80
    assert [each.result() for each in works] == [None] * 80
    found = bytearray(4)
    tensor.read(0, found)
    assert found == bytes([19] * 4)


def test_without_the_functions_there_is_no_queue(runtime, monkeypatch):
    monkeypatch.setattr(runtime.library, "async_api", None)
    with pytest.raises(NrtUnsupported, match="nrta"):
        AsyncQueue(runtime, 0)


def test_without_a_descriptor_one_asks(queue, tensor, monkeypatch):
    has = queue.runtime.library.has
    gone = ("nrta_get_completion_handle", "nrta_event_register_seq_id_completion")
    monkeypatch.setattr(queue.runtime.library, "has", lambda name: name not in gone and has(name))
    pending = queue.write(tensor, 0, b"x")
    assert pending.completion_fd() is None
    until(pending.is_done)
