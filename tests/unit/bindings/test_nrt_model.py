"""Models of the simulator: loaded, told of their tensors, run, with state that changes in place."""

import threading

import numpy as np
import pytest
from nrt_sim import neff
from nrt_steering import held_up, until

from neuron_di_bindings.nrt import (
    NrtMisuse,
    NrtModel,
    NrtRequestError,
    NrtStatus,
    NrtType,
    NrtWorkerError,
    TensorInfo,
    TensorSet,
)

CHAIN = neff.hash_chain(
    num_layers=1,
    num_slots=2,
    num_heads=2,
    max_length=16,
    head_elements=8,
    vocabulary=1000,
    num_tokens=4,
)
TOKENS = np.array([[5, 6, 7, 8]], np.int32)


def sets_of(runtime, model):
    """Tensors for all that a model declares; a name that is in both sets is one tensor."""
    inputs, outputs = TensorSet(runtime, "inputs"), TensorSet(runtime, "outputs")
    tensors = {}
    for info in model.tensor_infos():
        if info.name not in tensors:
            tensors[info.name] = runtime.allocate(info.num_bytes, 0, info.name)
            tensors[info.name].fill(0)
        (inputs if info.usage == "input" else outputs).add(info.name, tensors[info.name])
    return inputs, outputs, tensors


def values(tensor, dtype):
    found = np.empty(tensor.num_bytes // np.dtype(dtype).itemsize, dtype)
    tensor.read(0, found)
    return found


def test_a_model_adds(runtime):
    with NrtModel.load(runtime, neff.add(4), 0) as model:
        assert model.num_cores() == 1
        assert model.tensor_infos() == (
            TensorInfo("left", "input", 16, NrtType.FP32, (4,)),
            TensorInfo("right", "input", 16, NrtType.FP32, (4,)),
            TensorInfo("sum", "output", 16, NrtType.FP32, (4,)),
        )
        inputs, outputs, tensors = sets_of(runtime, model)
        tensors["left"].write(0, np.array([1, 2, 3, 4], np.float32))
        tensors["right"].write(0, np.array([10, 20, 30, 40], np.float32))
        model.execute(inputs, outputs)
        assert values(tensors["sum"], np.float32).tolist() == [11, 22, 33, 44]
        tensors["sum"].wait_for_output(1, 1.0)


def test_shapes_and_types_of_every_dimension(runtime):
    with NrtModel.load(runtime, CHAIN, None) as model:
        infos = {(info.name, info.usage): info for info in model.tensor_infos()}
    key = infos["kv_mgr.past_key_values.0", "input"]
    assert (key.dtype, key.shape, key.num_bytes) == (NrtType.BF16, (2, 2, 144, 8), 9216)
    assert infos["kv_mgr.past_key_values.1", "output"].shape == (2, 2, 144, 8)
    assert infos["seq_ids", "input"].dtype == NrtType.INT32
    assert infos["partials", "output"].dtype == NrtType.UINT64


def test_state_changes_in_place_and_every_byte_of_it_counts(runtime):
    with NrtModel.load(runtime, CHAIN, 0) as model:
        inputs, outputs, tensors = sets_of(runtime, model)
        tensors["input_ids"].write(0, TOKENS)
        tensors["position_ids"].write(0, np.arange(4, dtype=np.int32))
        tensors["seq_ids"].write(0, np.array([1], np.int32))
        model.execute(inputs, outputs)
        key = tensors["kv_mgr.past_key_values.0"]
        written = values(key, np.uint8).reshape(2, 2, 144, 16)
        assert np.all(written[1, :, :4].any(axis=2))
        assert not written[1, :, 5:].any()

        def step():
            tensors["input_ids"].write(0, np.array([[9, 0, 0, 0]], np.int32))
            tensors["position_ids"].write(0, np.array([[4, -1, -1, -1]], np.int32))
            model.execute(inputs, outputs)
            return values(tensors["partials"], np.uint64).tolist()

        partials = step()
        assert step() == partials
        place = key.slice((2 + 1) * 144 * 16 + 3 * 16, 1, "a byte of position 3, slot 1, head 1")
        place.write(0, bytes([values(place, np.uint8)[0] ^ 1]))
        assert step() != partials


def test_execution_counts_outputs(runtime):
    with NrtModel.load(runtime, neff.copy(64), 1) as model:
        inputs, outputs = TensorSet(runtime), TensorSet(runtime)
        source, target = runtime.allocate(64, 1, "in"), runtime.allocate(64, 1, "out")
        inputs.add("in", source)
        outputs.add("out", target)
        model.execute(inputs, outputs, num_times=3)
        target.wait_for_output(3, 0.0)
        with pytest.raises(ValueError, match="0 times"):
            model.execute(inputs, outputs, num_times=0)


def test_what_is_no_model_is_refused(runtime, sim):
    with pytest.raises(NrtRequestError) as caught:
        NrtModel.load(runtime, b"NEFF of a real compiler", 0)
    assert caught.value.status == NrtStatus.UNSUPPORTED_NEFF_VERSION
    with pytest.raises(NrtRequestError):
        NrtModel.load(runtime, neff.copy(64), 2)
    with pytest.raises(ValueError, match="core -1"):
        NrtModel.load(runtime, neff.copy(64), -1)
    assert sim.num_live() == 0


def test_a_model_of_a_group(runtime, sim):
    with NrtModel.load_collectives(runtime, neff.copy(64), 0, 0, 1) as model:
        assert len(model.tensor_infos()) == 2
    assert sim.calls("nrt_load_collectives") == 1


def test_a_set_names_tensors(runtime, sim):
    with TensorSet(runtime) as names:
        first, second = runtime.allocate(64, 0, "first"), runtime.allocate(64, 0, "second")
        names.add("in", first)
        names.add("state", second)
        assert names.get("in") is first
        assert names.names() == ("in", "state")
        names.add("in", second)
        assert names.get("in") is second
        first.free()
        assert sim.num_tensors() == 1
        with pytest.raises(NrtRequestError):
            names.get("nothing")
        with pytest.raises(ValueError, match="NUL"):
            names.add("a\0b", second)
        second.free()
        assert sim.num_tensors() == 1
    assert sim.num_live() == 0


def test_a_tensor_that_a_set_refuses_is_not_kept(runtime, sim):
    with TensorSet(runtime) as names:
        tensor = runtime.allocate(64, 0, "kv")
        sim.fault("nrt_add_tensor_to_tensor_set", NrtStatus.INVALID)
        with pytest.raises(NrtRequestError):
            names.add("in", tensor)
        tensor.free()
        assert sim.num_tensors() == 0
        with pytest.raises(NrtMisuse, match="'kv'"):
            names.add("in", tensor)


def test_nothing_is_used_after_its_end(runtime, sim):
    model = NrtModel.load(runtime, neff.copy(64), 0)
    inputs, outputs = TensorSet(runtime, "inputs"), TensorSet(runtime, "outputs")
    outputs.destroy()
    outputs.destroy()
    with pytest.raises(NrtMisuse, match="outputs is used after"):
        model.execute(inputs, outputs)
    with pytest.raises(NrtMisuse, match="outputs is used after"):
        outputs.add("a", runtime.allocate(64, 0, "kv"))
    model.unload()
    model.unload()
    for use in (model.tensor_infos, model.num_cores, lambda: model.execute(inputs, inputs)):
        with pytest.raises(NrtMisuse, match="a model of core 0 is used after"):
            use()
    assert sim.calls("nrt_unload") == sim.calls("nrt_destroy_tensor_set") == 1
    assert sim.calls("nrt_execute") == 0


def test_a_model_that_is_unloaded_during_a_run_ends_after_it(runtime, sim):
    model = NrtModel.load(runtime, neff.copy(64), 0)
    inputs, outputs, _ = sets_of(runtime, model)
    inside, may_leave = threading.Event(), threading.Event()
    plain = runtime.library.call

    def waiting(name, *arguments):
        if name == "nrt_execute":
            inside.set()
            assert may_leave.wait(20)
        return plain(name, *arguments)

    runtime.library.call = waiting
    thread = threading.Thread(target=model.execute, args=(inputs, outputs))
    thread.start()
    assert inside.wait(20)
    model.unload()
    inputs.destroy()
    assert sim.calls("nrt_unload") == sim.calls("nrt_destroy_tensor_set") == 0
    may_leave.set()
    thread.join(20)
    assert sim.calls("nrt_execute") == sim.calls("nrt_unload") == 1
    assert sim.calls("nrt_destroy_tensor_set") == 1


def test_a_set_stays_as_it_is_during_a_run(runtime, sim):
    """What it held until then might be freed under the run."""
    model = NrtModel.load(runtime, neff.copy(64), 0)
    inputs, outputs, tensors = sets_of(runtime, model)
    other = runtime.allocate(64, 0, "other")
    with held_up(runtime.library, "nrt_execute") as has_come:
        thread = threading.Thread(target=model.execute, args=(inputs, outputs))
        thread.start()
        assert has_come.wait(20)
        with pytest.raises(NrtMisuse, match="inputs is changed while an execution uses it"):
            inputs.add("in", other)
        tensors["in"].free()
        assert sim.calls("nrt_tensor_free") == 0
    thread.join(20)
    inputs.add("in", other)
    assert sim.calls("nrt_tensor_free") == 1
    model.execute(inputs, outputs)


def test_a_run_begins_when_a_change_of_its_set_is_through(runtime, sim):
    model = NrtModel.load(runtime, neff.copy(64), 0)
    inputs, outputs, _ = sets_of(runtime, model)
    other = runtime.allocate(64, 0, "other")
    with held_up(runtime.library, "nrt_add_tensor_to_tensor_set") as has_come:
        changing = threading.Thread(target=inputs.add, args=("in", other))
        changing.start()
        assert has_come.wait(20)
        running = threading.Thread(target=model.execute, args=(inputs, outputs))
        running.start()
        until(model.handle.is_used)
        assert not outputs.handle.is_used()  # it waits for the inputs
        assert sim.calls("nrt_execute") == 0
    for thread in (changing, running):
        thread.join(20)
    assert sim.calls("nrt_execute") == 1


def test_what_a_run_says_is_sorted_by_what_to_do(runtime, sim):
    with NrtModel.load(runtime, neff.copy(64), 0) as model:
        inputs, outputs, tensors = sets_of(runtime, model)
        sim.fault("nrt_execute", NrtStatus.EXEC_BAD_INPUT)
        with pytest.raises(NrtRequestError):
            model.execute(inputs, outputs)
        tensors["in"].write(0, b"still works")
        model.execute(inputs, outputs)
        assert bytes(values(tensors["out"], np.uint8)[:11]) == b"still works"
        sim.fault("nrt_execute", NrtStatus.EXEC_UNIT_UNRECOVERABLE)
        with pytest.raises(NrtWorkerError, match=r"NRT_EXEC_UNIT_UNRECOVERABLE \(101\)"):
            model.execute(inputs, outputs)


def test_infos_are_given_back(runtime, sim):
    with NrtModel.load(runtime, neff.copy(64), 0) as model:
        model.tensor_infos()
    assert sim.calls("nrt_get_model_tensor_info") == sim.calls("nrt_free_model_tensor_info") == 1
