"""What the threads of a process are to each other, where the system does not let them change it."""

import os
import threading

import pytest

from neuron_di_bindings.process import lower_thread_priority


@pytest.fixture
def asked(monkeypatch):
    """What the system was asked to do, which it refuses."""
    calls = []

    def refuse(*call: int) -> None:
        calls.append(call)
        raise PermissionError("not without CAP_SYS_NICE")

    monkeypatch.setattr(os, "setpriority", refuse)
    return calls


def test_a_thread_that_is_as_nice_already_asks_for_nothing(asked, monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: 10)
    lower_thread_priority(5)
    lower_thread_priority(10)
    assert not asked


def test_a_thread_lives_on_where_it_is_refused(asked, monkeypatch):
    monkeypatch.setattr(os, "getpriority", lambda *_: 0)
    lower_thread_priority(5)
    assert asked == [(os.PRIO_PROCESS, threading.get_native_id(), 5)]


def test_only_the_thread_itself_becomes_nicer():
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    wanted = min(before + 3, 19)
    found = []

    def run() -> None:
        lower_thread_priority(wanted)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [wanted]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
