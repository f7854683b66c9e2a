"""The end of a runtime: what keeps it, what it waits for, and who else may have ended it."""

import ctypes
import gc
import os
import threading
import weakref

import numpy as np
import pytest
from nrt_steering import held_up, patched_call, until

from neuron_di_bindings.nrt import (
    AsyncQueue,
    NrtMisuse,
    NrtRequestError,
    NrtRuntime,
    NrtStatus,
    SendReceive,
)
from neuron_di_bindings.nrt import runtime as runtime_module


class Torch:
    """Somebody else who starts and ends the runtime of the process, past our bindings."""

    def __init__(self, library):
        self._library = ctypes.CDLL(library.path)
        assert self._library.nrt_init(3, b"", b"") == 0

    def close(self):
        self._library.nrt_close()


@pytest.fixture
def torch(library):
    return Torch(library)


def test_what_a_thread_is_about_to_use_keeps_it(library, sim, monkeypatch):
    """It holds the tensor, and is not in a call yet."""
    monkeypatch.setattr(runtime_module, "_END_TIMEOUT_S", 0.0)
    runtime = NrtRuntime(library).init()
    tensor = runtime.allocate(64, 0, "kv")
    with tensor.handle.use():
        with pytest.raises(NrtMisuse, match="in use are still tensor 'kv'"):
            runtime.close()
        assert sim.calls("nrt_close") == sim.calls("nrt_tensor_free") == 0
        with pytest.raises(NrtMisuse, match="the runtime is closed"):
            runtime.memory_stats(0)
    runtime.close()
    assert sim.calls("nrt_close") == sim.calls("nrt_tensor_free") == 1


def test_it_ends_once_the_thread_is_through(library, sim, monkeypatch):
    monkeypatch.setattr(runtime_module, "_END_TIMEOUT_S", 1000.0)
    runtime = NrtRuntime(library).init()
    tensor = runtime.allocate(64, 0, "kv")
    tensor.handle.hold()
    closing = threading.Thread(target=runtime.close, daemon=True)
    closing.start()
    until(lambda: runtime._lock._waiters)
    tensor.handle.release()
    closing.join(20)
    assert sim.calls("nrt_close") == sim.calls("nrt_tensor_free") == 1


def test_what_the_library_still_ends_is_not_forgotten(runtime):
    """Else the runtime could be closed during that call."""
    plain, known = runtime.library.call, []

    def watching(name, *arguments):
        known.append((name, runtime.num_handles))
        return plain(name, *arguments)

    tensor = runtime.allocate(64, 0, "kv")
    with patched_call(runtime.library, watching):
        tensor.free()
    assert known == [("nrt_tensor_free", 1)]
    assert runtime.num_handles == 0


def test_what_everybody_forgets_stays_while_the_library_may_write_to_it(library, sim):
    def forget():
        runtime = NrtRuntime(library).init()
        memory = np.zeros(64, np.uint8)
        AsyncQueue(runtime, 0).read(runtime.allocate(64, 0, "kv"), 0, memory)
        return weakref.ref(runtime), weakref.ref(memory)

    sim.hold_queues(True)
    watched, memory = forget()
    gc.collect()
    assert memory() is not None
    sim.hold_queues(False)
    until(lambda: not watched().queues[0].num_pending())
    watched().close()
    gc.collect()
    assert memory() is None
    assert watched() is None


def test_what_is_over_and_nobody_asked_for_does_not_keep_it(library, sim):
    runtime = NrtRuntime(library).init()
    pending = AsyncQueue(runtime, 0).write(runtime.allocate(64, 0, "kv"), 0, b"data")
    done = ctypes.c_bool()

    def is_over():
        library.call("nrta_is_completed", pending.sequence, ctypes.byref(done))
        return done.value

    until(is_over)
    runtime.close()
    assert sim.calls("nrt_close") == 1


def test_an_open_core_of_another_one_keeps_it(gates, library, sim):
    owner, other = NrtRuntime(library).init(), NrtRuntime(library)
    SendReceive(other).open(0)
    with pytest.raises(NrtMisuse, match="the send and receive of core 0 is open"):
        owner.close()
    assert sim.calls("nrt_close") == 0
    SendReceive(other).close(0)
    owner.close()


def test_a_running_call_of_another_one_keeps_it(library, sim):
    owner, other = NrtRuntime(library).init(), NrtRuntime(library)
    with held_up(library, "nrt_get_vnc_memory_stats") as has_come:
        thread = threading.Thread(target=other.memory_stats, args=(0,))
        thread.start()
        assert has_come.wait(20)
        with pytest.raises(NrtMisuse, match="closed: 1 calls are running"):
            owner.close()
    thread.join(20)
    owner.close()
    assert sim.calls("nrt_close") == 1


def test_what_another_one_has_scheduled_keeps_it(library, sim):
    owner, other = NrtRuntime(library).init(), NrtRuntime(library)
    tensor = owner.allocate(64, 0, "kv")
    queue = AsyncQueue(other, 0)
    sim.hold_queues(True)
    queue.write(tensor, 0, b"data")
    with pytest.raises(NrtMisuse, match="1 are pending on a queue of core 0"):
        owner.close()
    sim.hold_queues(False)
    until(lambda: not queue.num_pending())
    owner.close()


def test_who_starts_what_is_started_learns_why_not(library, torch, sim):
    with pytest.raises(NrtRequestError) as caught:
        NrtRuntime(library).init()
    assert caught.value.status == NrtStatus.FAILURE
    assert "use NrtRuntime without init" in caught.value.__notes__[0]
    sim.forget_violations()
    torch.close()


def test_after_somebody_elses_end_nothing_is_freed(library, torch, sim):
    runtime = NrtRuntime(library)
    first, _ = (runtime.allocate(64, 0, name) for name in ("first", "second"))
    torch.close()
    first.free()
    runtime.close()
    assert sim.calls("nrt_tensor_free") == 0
    assert runtime.num_handles == 0


def test_before_somebody_elses_end_everything_is(library, torch, sim):
    with NrtRuntime(library) as runtime:
        runtime.allocate(64, 0, "kv")
    assert sim.calls("nrt_tensor_free") == 1
    assert sim.calls("nrt_close") == 0
    torch.close()


def answer_of_a_child(use):
    """What `use` says in a forked child, or that it was refused."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            answer = str(use())
        except NrtMisuse as error:
            answer = str(error)
        finally:
            os.write(writing, answer.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return answer


@pytest.mark.parametrize("has_objects", [True, False])
def test_a_forked_child_uses_nothing_that_somebody_else_started(library, torch, has_objects):
    runtime = NrtRuntime(library)
    if has_objects:
        runtime.allocate(64, 0, "kv")
    for use in (lambda: runtime.memory_stats(0), runtime.visible_cores):
        answer = answer_of_a_child(use)
        assert answer.endswith("the runtime was started before this process was forked")
    assert "was started before" in answer_of_a_child(NrtRuntime(library).init)
    runtime.close()
    torch.close()


@pytest.mark.parametrize("was_started", [True, False])
def test_a_forked_child_starts_a_runtime_of_its_own_where_none_runs(library, sim, was_started):
    if was_started:
        with NrtRuntime(library).init() as runtime:
            assert runtime.visible_cores() == 2

    def use():
        with NrtRuntime(library).init() as runtime:
            return runtime.memory_stats(0).bytes_used

    assert answer_of_a_child(use) == "0"
    assert sim.num_live() == 0
