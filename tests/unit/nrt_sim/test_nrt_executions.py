"""Executions on the simulator of libnrt: what is checked, who has the core, what errors leave."""

import struct
import threading
from ctypes import byref, c_void_p

import pytest
from nrt_sim import neff
from nrt_sim.plain import FAILURE, HOST, INVALID, INVALID_HANDLE, NC_BUSY, RESOURCE, SUCCESS
from nrt_sim.plain_models import BAD_INPUT, DMA_ABORT, NUMERICAL_ERROR, UNRECOVERABLE, PlainModels

COPY = neff.copy(8)


@pytest.fixture
def models(nrt):
    return PlainModels(nrt)


class Copier:
    """A loaded copy of 8 bytes with its tensors in their sets."""

    def __init__(self, models, vnc=0, content=COPY):
        self.models = models
        self.model = models.loaded(content, vnc)
        self.source, self.target = models.allocated(8, vnc), models.allocated(8, vnc)
        self.inputs = models.tensor_set({"in": self.source})
        self.outputs = models.tensor_set({"out": self.target})

    def run(self):
        return self.models.nrt_execute(self.model, self.inputs, self.outputs)


class Held:
    """nrt_execute in a thread that stops with the core in hand."""

    def __init__(self, copier):
        self.models = copier.models
        self.status = None
        self.thread = threading.Thread(target=lambda: setattr(self, "status", copier.run()))

    def __enter__(self):
        before = self.models.nrt_sim_calls(b"models.execute")
        self.models.nrt_sim_hold_executions(True)
        self.thread.start()
        while self.models.nrt_sim_calls(b"models.execute") == before:
            self.thread.join(0.001)
            assert self.thread.is_alive()
        return self

    def __exit__(self, *_):
        self.models.nrt_sim_hold_executions(False)
        self.thread.join(60)


def test_a_copy(models):
    copier = Copier(models)
    models.write(copier.source, 0, b"12345678")
    assert models.nrt_tensor_check_output_completion(copier.target, 0, 1) != SUCCESS
    assert copier.run() == SUCCESS
    assert models.read(copier.target, 0, 8) == b"12345678"
    assert models.nrt_tensor_check_output_completion(copier.target, 0, 1) == SUCCESS


@pytest.mark.parametrize(
    ("dtype", "letter", "left", "right", "expected", "status"),
    [
        (neff.DType.INT32, "i", [1, -2, 2**31 - 1], [10, 5, 1], [11, 3, -(2**31)], SUCCESS),
        (neff.DType.FLOAT32, "f", [0.5, -2.0, 1.0], [1.0, 0.25, 2.0], [1.5, -1.75, 3.0], SUCCESS),
        (
            neff.DType.FLOAT32,
            "f",
            [1.0, float("inf"), 2.0],
            [1.0, float("-inf"), 2.0],
            [2.0, None, 4.0],
            NUMERICAL_ERROR,
        ),
    ],
)
def test_a_sum(models, dtype, letter, left, right, expected, status):
    model = models.loaded(neff.add(3, dtype))
    tensors = [models.allocated(12) for _ in range(3)]
    models.write(tensors[0], 0, struct.pack(f"<3{letter}", *left))
    models.write(tensors[1], 0, struct.pack(f"<3{letter}", *right))
    inputs = models.tensor_set({"left": tensors[0], "right": tensors[1]})
    outputs = models.tensor_set({"sum": tensors[2]})
    assert models.nrt_execute(model, inputs, outputs) == status
    total = struct.unpack(f"<3{letter}", models.read(tensors[2], 0, 12))
    assert [None if number != number else number for number in total] == expected


def test_handles_of_an_execution_must_live(models):
    copier = Copier(models)
    run = models.nrt_execute
    assert run(copier.inputs, copier.inputs, copier.outputs) == INVALID_HANDLE
    assert run(copier.model, copier.model, copier.outputs) == INVALID_HANDLE
    assert run(copier.model, copier.inputs, None) == INVALID_HANDLE
    models.nrt_tensor_free(byref(copier.target))
    assert copier.run() == INVALID_HANDLE


@pytest.mark.parametrize(
    ("name", "num_bytes", "vnc", "placement"),
    [
        ("out", 7, 0, 0),
        ("out", 9, 0, 0),
        ("out", 8, 1, 0),
        ("out", 8, -1, HOST),
        ("out", 8, 0, HOST),
        ("ouT", 8, 0, 0),
    ],
)
def test_a_tensor_of_the_wrong_name_size_or_place(models, name, num_bytes, vnc, placement):
    copier = Copier(models)
    wrong = models.tensor_set({name: models.allocated(num_bytes, vnc, placement)})
    assert models.nrt_execute(copier.model, copier.inputs, wrong) == BAD_INPUT
    named_in = "in" if name == "out" else "iN"
    wrong = models.tensor_set({named_in: models.allocated(num_bytes, vnc, placement)})
    assert models.nrt_execute(copier.model, wrong, copier.outputs) == BAD_INPUT
    assert copier.run() == SUCCESS


def test_a_tensor_without_memory_is_no_input(models):
    copier, empty = Copier(models), c_void_p()
    assert models.nrt_tensor_allocate_empty(b"empty", byref(empty)) == SUCCESS
    wrong = models.tensor_set({"in": empty})
    assert models.nrt_execute(copier.model, wrong, copier.outputs) == BAD_INPUT


def test_tensors_of_any_core_of_the_model(models):
    copier = Copier(models, content=neff.copy(8, num_cores=2))
    other = models.tensor_set({"out": models.allocated(8, 1)})
    assert models.nrt_execute(copier.model, copier.inputs, other) == SUCCESS


def test_an_alias_is_the_very_same_tensor(models):
    spec = neff.TensorSpec(name="state", dtype=neff.DType.UINT8, shape=(8,), alias="state")
    content = neff.container(2, [spec], [spec])
    model, state, other = models.loaded(content), models.allocated(8), models.allocated(8)
    view = models.sliced(state, 0, 8)
    right, wrong, viewed = (models.tensor_set({"state": t}) for t in (state, other, view))
    assert models.nrt_execute(model, right, right) == SUCCESS
    assert models.nrt_execute(model, right, wrong) == BAD_INPUT
    assert models.nrt_execute(model, right, viewed) == BAD_INPUT


def test_an_output_shares_no_byte_with_anything_else(models):
    copier = Copier(models, content=neff.copy(4))
    whole = models.allocated(12)
    parts = [models.sliced(whole, first, 4) for first in (0, 3, 4)]
    sets = [models.tensor_set({"in": part, "out": part}) for part in parts]
    run = models.nrt_execute
    assert run(copier.model, sets[0], sets[0]) == BAD_INPUT
    assert run(copier.model, sets[0], sets[1]) == BAD_INPUT
    assert run(copier.model, sets[2], sets[1]) == BAD_INPUT
    assert run(copier.model, sets[0], sets[2]) == SUCCESS


def test_repeated_executions_count(models):
    copier = Copier(models)

    def repeat(number):
        return models.nrt_execute_repeat(copier.model, copier.inputs, copier.outputs, number)

    assert repeat(0) == repeat(-1) == INVALID
    before = models.nrt_sim_calls(b"models.execute")
    assert repeat(3) == SUCCESS
    assert models.nrt_sim_calls(b"models.execute") == before + 3
    assert models.nrt_tensor_check_output_completion(copier.target, 0, 3) == SUCCESS
    models.nrt_sim_schedule(b"function=models.execute call=2 status=1003")
    assert repeat(5) == NUMERICAL_ERROR
    assert models.nrt_sim_calls(b"models.execute") == before + 3 + 2


def test_a_core_runs_one_execution_at_a_time(models):
    copier, other = Copier(models), Copier(models, vnc=1)
    with Held(copier) as held:
        assert copier.run() == NC_BUSY
    assert held.status == SUCCESS
    assert copier.run() == SUCCESS
    with Held(copier) as held:
        thread = Held(other)
        with thread:
            assert other.run() == NC_BUSY
        assert thread.status == SUCCESS
    assert held.status == SUCCESS


def test_what_an_execution_uses_stays_until_it_is_over(models):
    copier = Copier(models)
    with Held(copier):
        assert models.nrt_unload(copier.model) == FAILURE
        assert models.nrt_sim_last_violation().startswith(b"a model is unloaded")
        add = models.nrt_add_tensor_to_tensor_set
        assert add(copier.inputs, b"in", copier.target) == FAILURE
        assert models.nrt_sim_last_violation().startswith(b"a tensor set is changed")
        again = c_void_p(copier.outputs.value)
        models.nrt_destroy_tensor_set(byref(again))
        assert models.nrt_sim_last_violation().startswith(b"a tensor set is destroyed")
    assert models.nrt_sim_violations() == 3
    assert models.nrt_unload(copier.model) == SUCCESS
    assert add(copier.inputs, b"in", copier.target) == SUCCESS


@pytest.mark.parametrize("function", [b"models.execute", b"nrt_execute"])
@pytest.mark.parametrize("status", [UNRECOVERABLE, DMA_ABORT])
def test_an_error_of_the_unit_stays_until_the_next_init(models, function, status):
    copier, other = Copier(models), Copier(models, vnc=1)
    models.nrt_sim_fault(function, status, 1)
    assert copier.run() == status
    repeat = models.nrt_execute_repeat
    assert [copier.run() for _ in range(3)] == [UNRECOVERABLE] * 3
    assert repeat(copier.model, copier.inputs, copier.outputs, 2) == UNRECOVERABLE
    assert other.run() == SUCCESS
    models.nrt_close()
    models.open()
    assert Copier(models).run() == SUCCESS


@pytest.mark.parametrize("status", [RESOURCE, BAD_INPUT, 1004, 1205])
def test_other_errors_are_of_one_execution_only(models, status):
    copier = Copier(models)
    models.nrt_sim_fault(b"models.execute", status, 1)
    assert copier.run() == status
    assert models.nrt_tensor_check_output_completion(copier.target, 0, 1) != SUCCESS
    assert copier.run() == SUCCESS
