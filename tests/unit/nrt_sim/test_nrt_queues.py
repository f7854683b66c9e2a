"""The asynchronous functions of both generations, on the simulator of libnrt."""

import ctypes
from ctypes import byref, c_bool, c_int, c_uint64, c_void_p

import pytest
from nrt_queue_kit import (
    NUM_QUEUES,
    UNITS,
    cleared,
    copier,
    last_completed,
    open_queues,
    reopen,
)
from nrt_sim.plain import (
    CLOSED,
    FAILURE,
    HOST,
    INVALID,
    INVALID_HANDLE,
    SUCCESS,
    UNINITIALIZED,
)
from nrt_sim.plain_models import BAD_INPUT, QUEUE_FULL, PlainModels
from nrt_sim.plain_queues import NOT_SET, Pending, PlainQueues


@pytest.fixture(params=[2, 3])
def queues(request, load, monkeypatch):
    with open_queues(load, monkeypatch, request.param) as queues:
        yield queues


@pytest.fixture
def queues3(load, monkeypatch):
    with open_queues(load, monkeypatch, 3) as queues:
        yield queues


# ---- What is scheduled runs ----------------------------------------------------------------------


def test_bytes_there_and_back(queues):
    models = queues.models
    first, second = cleared(models, 16), cleared(models, 16)
    assert queues.result(queues.write(first, 4, b"abcdef")) == SUCCESS
    assert queues.result(queues.copy((first, 5), (second, 0), 3)) == SUCCESS
    assert models.read(second, 0, 4) == b"bcd\0"
    read = queues.read(first, 3, 8)
    assert queues.result(read) == SUCCESS
    assert read.buffer.raw == b"\0abcdef\0"


def test_an_execution_runs_with_what_was_in_its_sets(queues):
    models = queues.models
    model, sets, (source, target) = copier(models)
    models.write(source, 0, b"12345678")
    assert queues.result(queues.execute(model, *sets)) == SUCCESS
    assert models.read(target, 0, 8) == b"12345678"
    assert models.nrt_tensor_check_output_completion(target, 0, 1) == SUCCESS


def test_a_queue_keeps_the_order(queues):
    models = queues.models
    tensor = cleared(models, 4)
    with models.queues_held():
        writes = [queues.write(tensor, 0, bytes([i] * 4)) for i in range(4)]
        assert not any(models.is_completed(write.sequence) for write in writes)
        assert models.read(tensor, 0, 4) == bytes(4)
    queues.wait(writes[-1])
    assert all(models.is_completed(write.sequence) for write in writes)
    assert models.read(tensor, 0, 4) == bytes([3] * 4)


def test_the_status_is_there_before_the_request_counts_as_over(queues3):
    models = queues3.models
    tensor = models.allocated(4)
    with models.queues_held():
        write = queues3.scheduled(queues3.write(tensor, 0, b"abcd"))
        assert write.slot.value == NOT_SET
        models.nrt_sim_delay(b"queues.finish", 200_000, 1)
    while not models.nrt_sim_calls(b"queues.finish"):
        pass
    assert write.slot.value == SUCCESS
    assert models.read(tensor, 0, 4) == b"abcd"
    queues3.wait(write)


# ---- Sequence numbers ----------------------------------------------------------------------------


def test_a_number_names_its_queue_and_counts(queues):
    models = queues.models
    write_unit, _, copy_unit, compute = UNITS[models.api]
    tensor, other = models.allocated(8, 0), models.allocated(8, 1)
    model, sets, _ = copier(models)
    made = {
        ("write", write_unit, 0, 0): lambda: queues.write(tensor, 0, b"ab"),
        ("copy", copy_unit, 1, 0): lambda: queues.copy((tensor, 2), (tensor, 4), 2, queue=1),
        ("execute", compute, 0, 0): lambda: queues.execute(model, *sets),
    }
    if models.api == 3:
        made["other", write_unit, 0, 1] = lambda: queues.write(other, 0, b"ab", lnc=1)
    names = set()
    for (_, unit, queue, lnc), schedule in made.items():
        before = last_completed(models, unit, queue, lnc)
        assert before & (2**48 - 1) == 0
        numbers = []
        for _ in range(3):
            pending = schedule()
            queues.wait(pending)
            numbers.append(pending.sequence)
            assert last_completed(models, unit, queue, lnc) == pending.sequence
        assert numbers == [before + 1, before + 2, before + 3]
        names.add(before >> 48)
    assert len(names) == len(made)


def test_only_numbers_that_were_given_out_are_valid(queues):
    models = queues.models
    tensor, done = models.allocated(8), c_bool()
    write = queues.write(tensor, 0, b"ab")
    queues.wait(write)
    wrong = [0, write.sequence + 1, write.sequence - 1, write.sequence | 2 << 56, 2**64 - 1]
    wrong.append(write.sequence | 15 << 48)
    for sequence in wrong:
        assert models.nrta_is_completed(sequence, byref(done)) == INVALID
    assert models.nrta_is_completed(write.sequence, None) == INVALID
    models.nrt_close()
    models.open()
    assert models.nrta_is_completed(write.sequence, byref(done)) == INVALID
    queues.track() if models.api == 2 else None
    again = queues.write(models.allocated(8), 0, b"ab")
    assert queues.scheduled(again).sequence == write.sequence + 1


def test_arguments_of_get_sequence(queues):
    models, number = queues.models, c_uint64()
    get = models.nrta_get_sequence
    assert get(0, 0, 0, None) == INVALID
    assert get(2, 0, 0, byref(number)) == INVALID
    assert get(0, -1, 0, byref(number)) == INVALID
    for unit, num_queues in enumerate(NUM_QUEUES[models.api]):
        assert get(0, unit, -1, byref(number)) == INVALID
        assert get(0, unit, num_queues - 1, byref(number)) == SUCCESS
        assert get(0, unit, num_queues, byref(number)) == INVALID
    assert get(0, len(NUM_QUEUES[models.api]), 0, byref(number)) == INVALID


# ---- Back-pressure and arguments -----------------------------------------------------------------


def test_a_full_queue_takes_no_more(queues):
    models = queues.models
    tensor = models.allocated(8)
    with models.queues_held():
        writes = [queues.scheduled(queues.write(tensor, 0, b"a")) for _ in range(4)]
        refused = queues.write(tensor, 0, b"b")
        assert (refused.status, refused.sequence) == (QUEUE_FULL, 0)
        assert refused.slot.value == NOT_SET
        if models.api == 3:  # each queue for itself
            queues.scheduled(queues.write(tensor, 4, b"c", queue=1))
    queues.wait(writes[-1])
    assert queues.result(queues.write(tensor, 0, b"b")) == SUCCESS
    assert models.read(tensor, 0, 1) == b"b"


@pytest.mark.parametrize("depth", ["0", "-1", "65537", "x"])
def test_a_depth_must_be_a_number(load, monkeypatch, depth):
    monkeypatch.setenv("NRT_SIM_QUEUE_DEPTH", depth)
    assert load().nrt_init(1, b"", b"") == INVALID


def test_what_is_scheduled_must_be_right(queues):
    models = queues.models
    tensor, host = models.allocated(8), models.allocated(8, -1, HOST)
    statuses = {
        "range": queues.write(tensor, 5, b"abcd").status,
        "range of a read": queues.read(tensor, 8, 1).status,
        "host": queues.write(host, 0, b"ab").status,
        "host source": queues.copy((host, 0), (tensor, 0), 2).status,
        "queue": queues.write(tensor, 0, b"ab", queue=2).status,
        "negative queue": queues.read(tensor, 0, 1, queue=-1).status,
        "cores": queues.copy((tensor, 0), (models.allocated(8, 1), 0), 2).status,
    }
    assert statuses == dict.fromkeys(statuses, INVALID)
    assert queues.write(models.tensor_set({}), 0, b"ab").status == INVALID_HANDLE
    assert queues.write(None, 0, b"ab").status == INVALID_HANDLE
    assert queues.copy((tensor, 0), (None, 0), 2).status == INVALID_HANDLE
    assert queues.read(tensor, 0, 8).status == SUCCESS


def test_pointers_are_needed(queues3):
    models = queues3.models
    tensor, buffer = models.allocated(8), ctypes.create_string_buffer(8)
    slot, number = c_int(), c_uint64()
    write = models.nrta_tensor_write
    assert write(tensor, None, 0, 8, 0, 0, byref(slot), byref(number)) == INVALID
    assert write(tensor, buffer, 0, 8, 0, 0, None, byref(number)) == INVALID
    assert write(tensor, buffer, 0, 8, 0, 0, byref(slot), None) == INVALID
    model, sets, _ = copier(models)
    execute = models.nrta_execute_schedule
    assert execute(model, *sets, 0, None, byref(number)) == INVALID
    assert execute(model, *sets, 0, byref(slot), None) == INVALID


def test_the_core_named_is_the_tensor_s(queues3):
    models = queues3.models
    tensor = models.allocated(8, 1)
    assert queues3.write(tensor, 0, b"ab", lnc=0).status == INVALID
    assert queues3.read(tensor, 0, 2, lnc=-1).status == INVALID
    assert queues3.copy((models.allocated(8), 0), (tensor, 0), 2, lnc=1).status == INVALID
    assert queues3.copy((tensor, 0), (models.allocated(8), 0), 2, lnc=1).status == INVALID
    assert queues3.result(queues3.write(tensor, 0, b"ab", lnc=1)) == SUCCESS


def test_an_execution_is_checked_when_it_is_scheduled(queues):
    models = queues.models
    model, (inputs, outputs), _ = copier(models)
    assert queues.execute(outputs, inputs, outputs).status == INVALID_HANDLE
    assert queues.execute(model, outputs, outputs).status == BAD_INPUT
    assert queues.execute(model, inputs, outputs, queue=1).status == INVALID
    assert queues.execute(model, inputs, outputs).status == SUCCESS


def test_the_lifecycle_holds_for_queues(load):
    models = PlainModels(load())
    queues, number = PlainQueues(models), c_uint64()
    calls = [
        lambda: queues.write(None, 0, b"ab").status,
        lambda: queues.read(None, 0, 2).status,
        lambda: queues.copy((None, 0), (None, 0), 2).status,
        lambda: queues.execute(None, None, None).status,
        lambda: models.nrta_is_completed(1, byref(c_bool())),
        lambda: models.nrta_get_sequence(0, 0, 0, byref(number)),
        lambda: models.nrta_event_register_seq_id_completion(1, -1),
        lambda: models.nrta_event_register_xu_completion(0, 0, 0, -1),
    ]
    assert [call() for call in calls] == [UNINITIALIZED] * len(calls)
    models.open()
    models.nrt_close()
    assert [call() for call in calls] == [CLOSED] * len(calls)


def test_the_implicit_mode_excludes_the_explicit_one(queues3, monkeypatch):
    monkeypatch.setenv("NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS", "2")
    queues, models = queues3, queues3.models
    reopen(queues)
    tensor = models.allocated(8)
    model, sets, _ = copier(models)
    assert queues.write(tensor, 0, b"ab").status == FAILURE
    assert queues.execute(model, *sets).status == FAILURE
    assert models.nrta_get_sequence(0, 0, 0, byref(c_uint64())) == FAILURE
    assert models.nrta_is_completed(1, byref(c_bool())) == FAILURE
    assert models.nrta_event_register_seq_id_completion(1, -1) == FAILURE
    assert models.nrta_event_register_xu_completion(0, 0, 0, -1) == FAILURE
    assert models.nrt_execute(model, *sets) == SUCCESS


def test_each_generation_has_its_own_functions(load):
    events = "nrta_event_register_seq_id_completion", "nrta_event_register_xu_completion"
    tracking = (
        "nrta_error_tracker_create",
        "nrta_error_tracker_destroy",
        "nrta_error_tracker_get_list",
        "nrta_get_completion_handle",
    )
    libraries = load(2).library, load(3).library
    has = [[hasattr(library, name) for name in (*events, *tracking)] for library in libraries]
    assert has == [[False, False, True, True, True, True], [True, True, *[False] * 4]]


def test_collectives_outside_of_a_model_are_not_simulated(queues3, capfd):
    models, context, some = queues3.models, c_void_p(), ctypes.create_string_buffer(64)
    assert models.nrta_cc_prepare(some, some, some, 8, 3, 2, byref(context)) == FAILURE
    for unknown in ((0, 0, 0), (16, 0, 0), (8, 4, 0), (8, 0, 3), (-1, 0, 0), (8, -1, 0)):
        assert models.nrta_cc_prepare(some, some, some, *unknown, byref(context)) == INVALID
    assert models.nrta_cc_prepare(None, some, some, 8, 0, 0, byref(context)) == INVALID
    pending = Pending()
    schedule = models.nrta_cc_schedule
    assert schedule(byref(context), 0, byref(pending.slot), byref(pending.number)) == FAILURE
    assert schedule(None, 0, byref(pending.slot), byref(pending.number)) == INVALID
    assert capfd.readouterr().err.count("outside of a model are not simulated") == 2
