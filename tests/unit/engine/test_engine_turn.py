"""Who turns the engine: its own thread, or somebody without it."""

import threading
from itertools import count
from queue import SimpleQueue

import pytest
from engine_kit import NUM_BLOCKS, indices, key, of

from neuron_di.clock import Deadline
from neuron_di.core import BlockCount
from neuron_di.engine import Broken, Emitted, Ended
from neuron_di.errors import (
    LocalProtocolError,
    WorkerFailed,
)

# Without the thread


def test_everyone_who_leaves_a_message_notifies(make_rig):
    rig = make_rig("prefill", chunk=100)
    notified = []
    rig.engine._notify = lambda: notified.append(rig.engine._inbox.qsize())
    rig.engine.submit(rig.request("a"))
    rig.engine.cancel(key("b"))
    rig.engine.release(key("c"))
    rig.engine.wake()
    assert notified == [1, 2, 3, 4]  # the message is there before
    assert rig.engine.turn(block=False)
    assert not rig.engine.turn(block=False)
    rig.engine.stop()
    assert len(notified) == 5


def test_where_blocks_are_is_known_after_each_turn(make_rig):
    rig = make_rig("both", chunk=100)
    assert rig.engine.blocks == BlockCount(total=NUM_BLOCKS, free=NUM_BLOCKS)
    rig.engine.submit(rig.request("a", max_tokens=3))
    rig.turn()
    assert rig.engine.blocks == BlockCount(total=NUM_BLOCKS, free=NUM_BLOCKS - 4, running=4)
    rig.turn_until_idle()
    assert rig.engine.blocks.free == NUM_BLOCKS


def test_stop_without_the_thread_frees_every_block(make_rig):
    rig = make_rig("both")
    rig.engine.submit(rig.request("a", max_tokens=50))
    rig.turn()
    rig.engine.stop()
    rig.engine.stop()
    assert rig.blocks.num_free == NUM_BLOCKS


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


@pytest.mark.parametrize("error", [LocalProtocolError("integrity lost"), Panic()])
def test_a_turn_that_fails_breaks_all(make_rig, monkeypatch, error):
    rig = make_rig("both")
    rig.engine.submit(rig.request("a"))
    rig.turn()

    def fail():
        raise error

    monkeypatch.setattr(rig.scheduler, "schedule", fail)
    before = rig.engine.blocks
    assert not rig.engine.turn(block=False)
    assert rig.engine.has_failed
    assert isinstance(rig.events[-1], Broken)
    assert rig.engine.blocks == before


# The thread


@pytest.fixture
def running(make_rig):
    rig = make_rig("both")
    rig.sink = SimpleQueue()
    rig.engine._sink = rig.sink.put
    rig.engine.start()
    yield rig
    rig.engine.stop()
    assert not rig.engine._thread.is_alive()


def events_until_ended(rig, num_requests):
    events = []
    while sum(isinstance(event, Ended | Broken) for event in events) < num_requests:
        events += rig.sink.get(timeout=30)
    return events


def test_requests_from_many_threads(running):
    def submit(n):
        for turn in range(2):
            running.engine.submit(running.request(f"{n}-{turn}", max_tokens=3))

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    events = events_until_ended(running, 8)
    for thread in threads:
        thread.join()
    for n in range(4):
        assert indices(of(events, f"{n}-1")) == [0, 1, 2]


def test_stop_with_work_left_frees_every_block(running):
    running.engine.submit(running.request("a", max_tokens=50))
    running.sink.get(timeout=30)
    running.engine.stop()
    assert running.blocks.num_free == NUM_BLOCKS


def test_when_its_books_are_wrong_it_breaks_all_and_refuses_more(running, monkeypatch):
    schedule, num_plans = running.scheduler.schedule, count()

    def fail_in_mid_answer():
        if next(num_plans) < 4:
            return schedule()
        raise LocalProtocolError("integrity lost")

    monkeypatch.setattr(running.scheduler, "schedule", fail_in_mid_answer)
    running.engine.submit(running.request("a", max_tokens=60))
    (broken,) = [e for e in events_until_ended(running, 1) if not isinstance(e, Emitted)]
    assert broken.key == key("a")
    assert running.engine.has_failed
    running.engine.submit(running.request("b"))
    running.engine.cancel(key("a"))
    (broken,) = events_until_ended(running, 1)
    assert broken.key == key("b")
    assert isinstance(broken.error, WorkerFailed)


def test_lost_integrity_is_noticed_when_the_engine_comes_to_rest(running):
    running.engine.submit(running.request("a"))
    events_until_ended(running, 1)
    running.blocks.num_free -= 1
    end = Deadline.after(30)
    while not running.engine.has_failed and not end.has_passed():
        running.engine.submit(running.request("b", max_tokens=1))
        events_until_ended(running, 1)
    running.engine.submit(running.request("c"))
    assert isinstance(events_until_ended(running, 1)[-1], Broken)
