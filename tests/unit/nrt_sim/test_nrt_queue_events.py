"""How the simulator's queues tell that a request is over: eventfds, trackers, handles."""

import ctypes
import os
import select
from ctypes import byref, c_int, c_void_p

import pytest
from nrt_queue_kit import open_queues
from nrt_sim.plain import INVALID, INVALID_HANDLE, RESOURCE, SUCCESS


@pytest.fixture
def queues2(load, monkeypatch):
    with open_queues(load, monkeypatch, 2) as queues:
        yield queues


@pytest.fixture
def queues3(load, monkeypatch):
    with open_queues(load, monkeypatch, 3) as queues:
        yield queues


def is_readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


# ---- Events of API 3 -----------------------------------------------------------------------------


@pytest.fixture
def event():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def test_an_event_comes_when_the_request_is_over(queues3, event):
    models = queues3.models
    register = models.nrta_event_register_seq_id_completion
    with models.queues_held():
        write = queues3.scheduled(queues3.write(models.allocated(8), 0, b"x"))
        assert register(write.sequence, event) == SUCCESS
        assert not is_readable(event)
    assert select.select([event], [], [], 60)[0]
    assert models.is_completed(write.sequence)
    assert write.slot.value == SUCCESS
    assert os.eventfd_read(event) == 1


def test_an_event_of_what_is_over_comes_at_once(queues3, event):
    models = queues3.models
    write = queues3.write(models.allocated(8), 0, b"x")
    queues3.wait(write)
    assert models.nrta_event_register_seq_id_completion(write.sequence, event) == SUCCESS
    assert is_readable(event)
    assert models.nrta_event_register_seq_id_completion(write.sequence, -1) == SUCCESS


def test_a_registration_can_be_taken_back(queues3, event):
    models = queues3.models
    register = models.nrta_event_register_seq_id_completion
    with models.queues_held():
        write = queues3.scheduled(queues3.write(models.allocated(8), 0, b"x"))
        assert register(write.sequence, event) == SUCCESS
        assert register(write.sequence, -1) == SUCCESS
    queues3.wait(write)
    assert not is_readable(event)


def test_registrations_must_be_of_something(queues3, event):
    models = queues3.models
    assert models.nrta_event_register_seq_id_completion(1, event) == INVALID
    for lnc, unit, queue in ((2, 0, 0), (-1, 0, 0), (0, 3, 0), (0, 0, 2), (0, 1, 1)):
        assert models.nrta_event_register_xu_completion(lnc, unit, queue, event) == INVALID
    closed = 1 << 30
    assert models.nrta_event_register_xu_completion(0, 0, 0, closed) == INVALID
    write = queues3.write(models.allocated(8), 0, b"x")
    queues3.wait(write)
    assert models.nrta_event_register_seq_id_completion(write.sequence, closed) == INVALID


def test_an_event_of_a_queue_counts_its_requests(queues3, event):
    models = queues3.models
    tensor = models.allocated(8)
    register = models.nrta_event_register_xu_completion
    assert register(0, 0, 1, event) == SUCCESS
    for offset, queue in ((0, 0), (1, 1), (2, 1)):
        queues3.wait(queues3.write(tensor, offset, b"x", queue=queue))
    assert os.eventfd_read(event) == 2
    assert register(0, 0, 1, -1) == SUCCESS
    queues3.wait(queues3.write(tensor, 0, b"x", queue=1))
    assert not is_readable(event)


def test_an_event_that_is_closed_too_early_shows(queues3, event):
    models = queues3.models
    early = os.dup(event)
    with models.queues_held():
        write = queues3.scheduled(queues3.write(models.allocated(8), 0, b"x"))
        assert models.nrta_event_register_seq_id_completion(write.sequence, early) == SUCCESS
        os.close(early)
    queues3.wait(write)
    assert models.nrt_sim_violations() == 1


# ---- Trackers and handles of API 2 ---------------------------------------------------------------


def test_a_tracker_lists_what_failed(queues2):
    models = queues2.models
    tensor = models.allocated(8)
    assert queues2.errors() == []
    models.nrt_sim_schedule(b"function=queues.run call=2 status=4")
    writes = [queues2.write(tensor, i, b"x") for i in range(3)]
    queues2.wait(writes[-1])
    assert queues2.errors() == [(writes[1].sequence, RESOURCE)]
    assert queues2.errors() == [(writes[1].sequence, RESOURCE)]


def test_a_tracker_is_for_one_core(queues2):
    models = queues2.models
    other = models.allocated(8, 1)
    assert queues2.write(other, 0, b"x").status == INVALID
    queues2.track(1)
    assert queues2.result(queues2.write(other, 0, b"x")) == SUCCESS
    assert models.nrta_error_tracker_create(2, byref(c_void_p())) == INVALID
    assert models.nrta_error_tracker_create(0, None) == INVALID


def test_a_request_may_have_no_tracker(queues2):
    queues2.tracker = None
    queues2.wait(queues2.write(queues2.models.allocated(8), 0, b"x"))


def test_a_tracker_is_destroyed_once_and_last(queues2):
    models = queues2.models
    tensor, tracker = models.allocated(8), queues2.tracker
    with models.queues_held():
        write = queues2.scheduled(queues2.write(tensor, 0, b"x"))
        models.nrta_error_tracker_destroy(tracker)
        assert models.nrt_sim_violations() == 0
    queues2.wait(write)
    assert models.nrt_sim_violations() == 1
    models.nrta_error_tracker_destroy(tracker)
    assert models.nrt_sim_violations() == 2
    assert queues2.write(tensor, 0, b"x").status == INVALID_HANDLE
    listed, number = ctypes.POINTER(ctypes.c_byte)(), ctypes.c_size_t()
    found = ctypes.cast(byref(listed), models.nrta_error_tracker_get_list.argtypes[1])
    assert models.nrta_error_tracker_get_list(tracker, found, byref(number)) == INVALID_HANDLE


def test_handles_are_readable_when_the_request_is_over(queues2):
    models, early, second, late = queues2.models, c_int(), c_int(), c_int()
    get = models.nrta_get_completion_handle
    with models.queues_held():
        write = queues2.scheduled(queues2.write(models.allocated(8), 0, b"x"))
        assert get(write.sequence, byref(early)) == get(write.sequence, byref(second)) == SUCCESS
        assert not is_readable(early.value)
        assert not is_readable(second.value)
    assert select.select([early.value], [], [], 60)[0]
    assert is_readable(second.value)
    assert models.is_completed(write.sequence)
    assert get(write.sequence, byref(late)) == SUCCESS
    assert is_readable(late.value)
    for handle in (early, second, late):
        os.close(handle.value)
    assert get(write.sequence + 1, byref(late)) == INVALID
    assert get(write.sequence, None) == INVALID


def test_a_handle_may_be_closed_at_any_time(queues2):
    models, handle = queues2.models, c_int()
    with models.queues_held():
        write = queues2.scheduled(queues2.write(models.allocated(8), 0, b"x"))
        assert models.nrta_get_completion_handle(write.sequence, byref(handle)) == SUCCESS
        os.close(handle.value)
    queues2.wait(write)
    assert models.nrt_sim_violations() == 0
