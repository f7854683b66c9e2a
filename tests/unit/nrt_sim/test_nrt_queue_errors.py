"""What goes wrong in the simulator's queues, and what a caller may not do to them."""

from ctypes import byref, c_void_p
from threading import Thread
from time import sleep

import pytest
from nrt_queue_kit import NUM_QUEUES, UNITS, cleared, copier, open_queues, reopen
from nrt_sim import neff
from nrt_sim.plain import CLOSED, FAILURE, NC_BUSY, RESOURCE, SUCCESS
from nrt_sim.plain_models import DMA_ABORT, UNRECOVERABLE


@pytest.fixture(params=[2, 3])
def queues(request, load, monkeypatch):
    with open_queues(load, monkeypatch, request.param) as queues:
        yield queues


def test_an_error_is_of_one_request(queues):
    models = queues.models
    tensor = cleared(models, 8)
    models.nrt_sim_schedule(b"function=queues.run call=2 status=4")
    writes = [queues.write(tensor, i, b"x") for i in range(3)]
    assert [queues.result(write) for write in writes] == [SUCCESS, RESOURCE, SUCCESS]
    assert models.read(tensor, 0, 4) == b"x\0x\0"


def test_an_error_of_a_unit_stays_until_the_next_init(queues):
    models = queues.models
    tensor = cleared(models, 8)
    model, sets, _ = copier(models)
    models.nrt_sim_fault(b"queues.run", DMA_ABORT, 1)
    with models.queues_held():
        writes = [queues.scheduled(queues.write(tensor, i, b"x")) for i in range(3)]
    expected = [DMA_ABORT, UNRECOVERABLE, UNRECOVERABLE]
    assert [queues.result(write) for write in writes] == expected
    assert queues.write(tensor, 0, b"x").status == UNRECOVERABLE
    assert models.read(tensor, 0, 8) == bytes(8)
    assert queues.result(queues.execute(model, *sets)) == SUCCESS  # another unit
    reopen(queues)
    assert queues.result(queues.write(models.allocated(8), 0, b"x")) == SUCCESS


def test_an_execution_that_kills_the_core_kills_its_queue(queues):
    models = queues.models
    model, sets, (source, _) = copier(models)
    models.nrt_sim_fault(b"models.execute", UNRECOVERABLE, 1)
    assert queues.result(queues.execute(model, *sets)) == UNRECOVERABLE
    assert queues.execute(model, *sets).status == UNRECOVERABLE
    assert models.nrt_execute(model, *sets) == UNRECOVERABLE
    assert queues.result(queues.write(source, 0, b"x")) == SUCCESS


def test_a_call_that_finds_its_unit_dead_leaves_it_dead(queues):
    models = queues.models
    tensor = models.allocated(8)
    model, sets, _ = copier(models)
    calls = {
        b"nrta_tensor_write": lambda: queues.write(tensor, 0, b"x").status,
        b"nrta_tensor_read": lambda: queues.read(tensor, 0, 1).status,
        b"nrta_tensor_copy": lambda: queues.copy((tensor, 0), (tensor, 1), 1).status,
        b"nrta_execute_schedule": lambda: queues.execute(model, *sets).status,
    }
    for name, call in calls.items():
        models.nrt_sim_fault(name, UNRECOVERABLE, 1)
        assert [call(), call()] == [UNRECOVERABLE] * 2
        reopen(queues)
        tensor = models.allocated(8)
        model, sets, _ = copier(models)
        assert call() == SUCCESS
        queues.drain()


def test_a_core_that_is_dead_takes_no_execution(queues):
    models = queues.models
    model, sets, _ = copier(models)
    models.nrt_sim_fault(b"nrt_execute", UNRECOVERABLE, 1)
    assert models.nrt_execute(model, *sets) == UNRECOVERABLE
    assert queues.execute(model, *sets).status == UNRECOVERABLE


def test_a_queued_execution_waits_for_its_core(queues):
    models = queues.models
    model, sets, _ = copier(models)
    _, other_sets, _ = copier(models)
    models.nrt_sim_hold_executions(True)
    pending = queues.scheduled(queues.execute(model, *sets))
    while not models.nrt_sim_calls(b"models.execute"):
        assert not models.is_completed(pending.sequence)
    assert models.nrt_execute(model, *other_sets) == NC_BUSY
    models.nrt_sim_hold_executions(False)
    assert queues.result(pending) == SUCCESS


def test_a_queued_execution_waits_for_another_one(queues):
    models = queues.models
    model, sets, _ = copier(models)
    _, other_sets, _ = copier(models)
    statuses = []
    models.nrt_sim_hold_executions(True)
    thread = Thread(target=lambda: statuses.append(models.nrt_execute(model, *sets)))
    thread.start()
    while not models.nrt_sim_calls(b"models.execute"):
        sleep(0.001)
    pending = queues.scheduled(queues.execute(model, *other_sets))
    while not models.nrt_sim_calls(b"queues.run"):
        sleep(0.001)
    for _ in range(50):  # one that does not wait would be over in no time
        assert not models.is_completed(pending.sequence)
        sleep(0.001)
    models.nrt_sim_hold_executions(False)
    thread.join(60)
    assert statuses == [SUCCESS]
    assert queues.result(pending) == SUCCESS


def test_what_a_request_needs_stays_until_it_is_over(queues):
    models = queues.models
    model, (inputs, outputs), (source, _) = copier(models)
    again = c_void_p(outputs.value)
    with models.queues_held():
        pending = queues.scheduled(queues.execute(model, inputs, outputs))
        assert models.nrt_unload(model) == FAILURE
        assert models.nrt_add_tensor_to_tensor_set(inputs, b"in", source) == FAILURE
        models.nrt_destroy_tensor_set(byref(again))
        assert models.nrt_sim_violations() == 3
        models.nrt_tensor_free(byref(source))
        assert models.nrt_sim_violations() == 4
    assert queues.result(pending) == SUCCESS
    assert models.nrt_unload(model) == SUCCESS


def test_nobody_frees_a_tensor_before_its_request_is_over(queues):
    models = queues.models
    tensor = models.allocated(8)
    again = c_void_p(tensor.value)
    with models.queues_held():
        write = queues.scheduled(queues.write(tensor, 0, b"x"))
        models.nrt_tensor_free(byref(again))
        assert models.nrt_sim_violations() == 1
    assert queues.result(write) == SUCCESS


def test_two_queues_have_no_order(queues):
    models = queues.models
    copy_unit = UNITS[models.api][2]
    assert NUM_QUEUES[models.api][copy_unit] == 2
    tensor = models.allocated(16)
    with models.queues_held():
        queues.scheduled(queues.copy((tensor, 0), (tensor, 4), 4, queue=0))
        for offset, status in ((8, SUCCESS), (7, FAILURE), (4, FAILURE), (0, SUCCESS)):
            made = queues.copy((tensor, offset), (tensor, 12), 4, queue=1)
            assert made.status == status, offset
        assert queues.copy((tensor, 8), (tensor, 0), 1, queue=1).status == FAILURE
        assert queues.copy((tensor, 4), (tensor, 6), 1, queue=0).status == SUCCESS
    assert models.nrt_sim_violations() == 3


def test_an_execution_has_no_order_with_a_write_of_its_input(queues):
    models = queues.models
    model, sets, (source, target) = copier(models)
    with models.queues_held():
        first = queues.scheduled(queues.execute(model, *sets))
        assert queues.write(source, 0, b"x").status == FAILURE
        assert queues.read(target, 0, 1).status == FAILURE
        second = queues.scheduled(queues.read(source, 0, 1))
    queues.wait(first)
    queues.wait(second)
    assert queues.write(source, 0, b"x").status == SUCCESS


def test_state_may_be_read_and_written_beside_an_execution(queues):
    """Other slots of the same tensor are in use elsewhere all the time."""
    models = queues.models
    spec = neff.TensorSpec(name="state", dtype=neff.DType.UINT8, shape=(8,), alias="state")
    model, state = models.loaded(neff.container(2, [spec], [spec])), models.allocated(8)
    both = models.tensor_set({"state": state})
    with models.queues_held():
        queues.scheduled(queues.execute(model, both, both))
        assert queues.write(state, 0, b"x").status == SUCCESS
    assert models.nrt_sim_violations() == 0


def test_close_does_not_wait_for_what_is_queued(queues):
    models = queues.models
    tensor = models.allocated(8)
    models.nrt_sim_hold_queues(True)
    writes = [queues.scheduled(queues.write(tensor, 0, b"x")) for _ in range(2)]
    models.nrt_close()
    assert models.nrt_sim_violations() == 1
    assert models.nrt_sim_last_violation().startswith(b"nrt_close while 2 requests")
    if models.api == 3:
        assert [write.slot.value for write in writes] == [CLOSED, CLOSED]


def test_close_after_everything_is_over_is_right(queues):
    models = queues.models
    queues.wait(queues.write(models.allocated(8), 0, b"x"))
    if models.api == 2:
        models.nrta_error_tracker_destroy(queues.tracker)
    models.nrt_close()
    assert models.nrt_sim_violations() == 0
