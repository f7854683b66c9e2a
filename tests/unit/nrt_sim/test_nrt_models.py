"""Loading models, tensor sets and executions on the simulator of libnrt."""

import ctypes
from ctypes import byref, c_uint32, c_void_p

import pytest
from nrt_sim import neff
from nrt_sim.plain import (
    CLOSED,
    FAILURE,
    INVALID,
    INVALID_HANDLE,
    LOAD_NOT_ENOUGH_NC,
    SUCCESS,
    UNINITIALIZED,
)
from nrt_sim.plain_models import (
    BAD_INPUT,
    MODEL_KIND,
    TENSOR_SET_KIND,
    UNSUPPORTED_NEFF_VERSION,
    PlainModels,
    TensorInfo,
    TensorInfoArray,
)

COPY = neff.copy(8)


@pytest.fixture
def models(nrt, monkeypatch):
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    return PlainModels(nrt)


def test_the_lifecycle_holds_for_every_call(load):
    models = PlainModels(load())
    out = c_void_p()
    calls = [
        (models.nrt_load, COPY, len(COPY), 0, -1, byref(out)),
        (models.nrt_load_collectives, COPY, len(COPY), 0, -1, 0, 1, byref(out)),
        (models.nrt_unload, None),
        (models.nrt_get_model_vnc_count, None, byref(c_uint32())),
        (models.nrt_allocate_tensor_set, byref(out)),
        (models.nrt_add_tensor_to_tensor_set, None, b"in", None),
        (models.nrt_get_tensor_from_tensor_set, None, b"in", byref(out)),
        (models.nrt_execute, None, None, None),
        (models.nrt_execute_repeat, None, None, None, 1),
        (models.nrt_get_model_tensor_info, None, byref(ctypes.POINTER(TensorInfoArray)())),
    ]
    assert [call(*arguments) for call, *arguments in calls] == [UNINITIALIZED] * len(calls)
    models.open()
    model, tensors = models.loaded(COPY), models.tensor_set({})
    assert models.nrt_sim_num_live(MODEL_KIND) == models.nrt_sim_num_live(TENSOR_SET_KIND) == 1
    models.nrt_close()
    assert [call(*arguments) for call, *arguments in calls] == [CLOSED] * len(calls)
    assert models.nrt_sim_num_live(MODEL_KIND) == models.nrt_sim_num_live(TENSOR_SET_KIND) == 0
    models.open()
    assert models.nrt_unload(model) == INVALID_HANDLE
    assert models.nrt_execute(model, tensors, tensors) == INVALID_HANDLE


def test_a_container_that_is_whole_and_right_loads(models):
    assert models.load_status(COPY) == SUCCESS
    assert models.load_status(neff.add(3, neff.DType.INT32)) == SUCCESS


@pytest.mark.parametrize(
    "content",
    [
        b"\x02" + bytes(1023) + b"a real NEFF has a header of 1024 bytes and an archive behind it",
        b"SIM-NEFF",
        COPY[:-1],
        COPY + b"\0",
        b"SIM-NEFT" + COPY[8:],
    ],
)
def test_what_is_no_container_is_of_an_unsupported_version(models, content):
    assert models.load_status(content) == UNSUPPORTED_NEFF_VERSION


@pytest.mark.parametrize("position", range(0, len(COPY), 37))
def test_a_damaged_container_is_refused(models, position):
    damaged = bytearray(COPY)
    damaged[position] ^= 4
    assert models.load_status(bytes(damaged)) == UNSUPPORTED_NEFF_VERSION


@pytest.mark.parametrize(("position", "status"), [(7, 10), (8, 10), (None, SUCCESS)])
def test_magic_and_version_count_even_when_the_digest_is_right(models, position, status):
    body = bytearray(COPY[:-8])
    if position is not None:
        body[position] ^= 1
    sealed = body + neff._digest(body).to_bytes(8, "little")
    assert models.load_status(bytes(sealed)) == status


def spec(name, shape=(8,), dtype=neff.DType.UINT8, alias=None):
    return neff.TensorSpec(name=name, dtype=dtype, shape=shape, alias=alias)


@pytest.mark.parametrize(
    ("inputs", "outputs", "more"),
    [
        ([spec("in")], [spec("out", (4,))], {}),
        ([spec("in"), spec("in")], [spec("out")], {}),
        ([spec("")], [spec("out")], {}),
        ([spec("in", (0,))], [spec("out", (0,))], {}),
        ([spec("in", (1 << 31, 1 << 31))], [spec("out", (1 << 31, 1 << 31))], {}),
        ([spec("in", alias="out")], [spec("out", (2, 4))], {}),
        ([spec("in")], [spec("out"), spec("more")], {}),
        ([spec("left"), spec("right")], [spec("sum")], {}),
        ([spec("in")], [spec("out")], {"num_cores": 0}),
        ([spec("in")], [spec("out")], {"program": 3}),
    ],
)
def test_a_container_whose_tensors_do_not_suit_is_refused(models, inputs, outputs, more):
    given = {"program": 2, **more}
    content = neff.container(given.pop("program"), inputs, outputs, **given)
    assert models.load_status(content) == UNSUPPORTED_NEFF_VERSION


def test_arguments_of_load(models):
    out = c_void_p()
    assert models.nrt_load(None, 8, 0, -1, byref(out)) == INVALID
    assert models.nrt_load(COPY, 0, 0, -1, byref(out)) == INVALID
    assert models.nrt_load(COPY, len(COPY), 0, -1, None) == INVALID
    assert models.load_status(COPY, vnc_count=2) == INVALID
    assert models.load_status(COPY, vnc_count=1) == SUCCESS


@pytest.mark.parametrize("vnc", [2, -2, 127, 1 << 30])
def test_a_core_that_is_not_this_process_s_is_not_enough(models, vnc):
    assert models.load_status(COPY, vnc) == LOAD_NOT_ENOUGH_NC


def test_a_model_needs_all_its_cores(models):
    two = neff.copy(8, num_cores=2)
    assert models.load_status(two, 1) == LOAD_NOT_ENOUGH_NC
    assert models.load_status(neff.copy(8, num_cores=3), 0) == LOAD_NOT_ENOUGH_NC
    number = c_uint32()
    assert models.nrt_get_model_vnc_count(models.loaded(two), byref(number)) == SUCCESS
    assert number.value == 2
    assert models.nrt_get_model_vnc_count(c_void_p(16), byref(number)) == INVALID_HANDLE


def test_without_a_core_the_first_free_one_is_taken(models):
    on_core_0, _on_core_1 = models.loaded(COPY, -1), models.loaded(COPY, -1)
    assert models.load_status(COPY, -1) == LOAD_NOT_ENOUGH_NC
    named = models.loaded(COPY, 0)  # a named core takes any number of models
    assert models.nrt_unload(on_core_0) == SUCCESS
    assert models.load_status(COPY, -1) == LOAD_NOT_ENOUGH_NC
    assert models.nrt_unload(named) == SUCCESS
    assert models.load_status(COPY, -1) == SUCCESS


def test_a_model_runs_where_it_was_placed(models):
    models.loaded(COPY, 0)
    model = models.loaded(COPY, -1)  # so it is on core 1
    for vnc, status in ((0, BAD_INPUT), (1, SUCCESS)):
        inputs = models.tensor_set({"in": models.allocated(8, vnc)})
        outputs = models.tensor_set({"out": models.allocated(8, vnc)})
        assert models.nrt_execute(model, inputs, outputs) == status


def test_unload_ends_the_handle(models):
    model = models.loaded(COPY)
    assert models.nrt_unload(model) == SUCCESS
    assert models.nrt_unload(model) == INVALID_HANDLE
    assert models.nrt_unload(models.allocated(8)) == INVALID_HANDLE


def test_collectives_need_a_rank_and_a_place_to_meet(models, monkeypatch):
    def load(rank, num_ranks):
        return models.nrt_load_collectives(
            COPY, len(COPY), 0, -1, rank, num_ranks, byref(c_void_p())
        )

    assert load(1, 1) == INVALID
    assert load(0, 2) == SUCCESS  # both ranks may be in this process
    assert load(0, 3) == FAILURE
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "127.0.0.1:1")
    assert load(0, 3) == SUCCESS


def test_a_model_tells_its_tensors(models):
    infos = ctypes.POINTER(TensorInfoArray)()
    model = models.loaded(
        neff.hash_chain(
            num_layers=1, num_slots=2, num_heads=3, max_length=5, head_elements=4, vocabulary=9
        )
    )
    assert models.nrt_get_model_tensor_info(model, byref(infos)) == SUCCESS
    first = ctypes.addressof(infos.contents) + TensorInfoArray.tensor_array.offset
    array = (TensorInfo * infos.contents.tensor_count).from_address(first)
    told = [
        (info.name.decode(), info.usage, info.size, info.dtype, info.shape[: info.ndim])
        for info in array
    ]
    state = [2, 3, 5 + 128, 4]
    num_bytes = 2 * 2 * 3 * 133 * 4
    states = [f"kv_mgr.past_key_values.{i}" for i in range(2)]
    assert told == [
        ("input_ids", 0, 4, neff.DType.INT32, [1, 1]),
        ("position_ids", 0, 4, neff.DType.INT32, [1, 1]),
        ("seq_ids", 0, 4, neff.DType.INT32, [1]),
        *[(name, 0, num_bytes, neff.DType.BFLOAT16, state) for name in states],
        ("next_tokens", 1, 4, neff.DType.INT32, [1]),
        ("partials", 1, 8, neff.DType.UINT64, [1]),
        *[(name, 1, num_bytes, neff.DType.BFLOAT16, state) for name in states],
    ]
    models.nrt_close()
    assert models.nrt_free_model_tensor_info(infos) == SUCCESS  # plain memory: after close, too
    assert models.nrt_free_model_tensor_info(infos) == INVALID_HANDLE
