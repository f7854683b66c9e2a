"""The poster flushes what came before anybody learns of it, and lives on whatever it is told."""

import threading

import pytest
from nrt_fakes import REFUSED, Request, channel_of

from neuron_di.clock import Deadline
from neuron_di.errors import PeerGone
from neuron_di.transfer.nrt_channel import Message, Movement
from neuron_di.transfer.nrt_poster import Poster


class Agent:
    def __init__(self, *channels):
        self.channels = channels
        self.looked = threading.Semaphore(0)

    def busy_channels(self):
        return [channel for channel in self.channels if channel.is_busy]

    def moved(self):
        pass

    def tick(self):
        self.looked.release()


@pytest.fixture
def poster():
    flushed = []
    poster = Poster("test", flushed.append, lambda _: None)
    poster.flushed = flushed
    yield poster
    poster.end(Deadline.after(10.0))
    assert not poster._thread.is_alive()


def over_of(poster, *messages, lncs=(), error=None):
    """Post these on channels of their own, one movement; wait until it is over."""
    ended = threading.Event()
    movement = Movement(
        len(messages), frozenset(lncs), lambda _: ended.set(), lambda _: None, error=error
    )
    channels = [channel_of(request)[0] for request in messages]
    for channel in channels:
        channel.waiting.append(Message(movement, "one", "tensor", 0, 10))
    agent = Agent(*channels)
    poster.call(lambda: poster.add(agent))
    assert ended.wait(10.0)
    poster.call(lambda: poster.remove(agent))
    return movement


def test_a_movement_is_over_when_all_its_channels_are(poster):
    requests = Request(False, False, True), Request(True), Request(False, True)
    movement = over_of(poster, *requests, lncs=(3, 1))
    assert movement.error is None
    assert poster.flushed == [1, 3]


def test_what_came_of_a_transfer_that_failed_is_flushed_too(poster):
    """Its slots are another request's by the time of the next flush."""
    assert over_of(poster, Request(True), Request(REFUSED), lncs=(3, 1)).error is not None
    assert poster.flushed == [1, 3]


def test_nothing_is_flushed_for_what_was_never_posted(poster):
    assert over_of(poster, REFUSED, lncs=(3, 1)).error is not None
    assert poster.flushed == []


def test_a_device_is_lost_before_anybody_learns_that_a_transfer_is_over(poster):
    told, done = [], threading.Event()
    movements = [
        Movement(
            0,
            frozenset(),
            lambda _, number=number: told.append(number),
            lambda count: told.append(f"{count} stuck"),
            num_posted=4,
            num_stuck=num_stuck,
        )
        for number, num_stuck in enumerate((0, 3))
    ]
    poster.call(lambda: (poster.finish(movements), done.set()))
    assert done.wait(10.0)
    assert told == ["3 stuck", 0, 1]


def finished(poster, *movements):
    done = threading.Event()
    poster.call(lambda: (poster.finish(movements), done.set()))
    assert done.wait(10.0)


def test_what_cannot_be_told_as_lost_is_never_told_as_over(poster):
    """So nobody has its slots again."""

    def fail(_):
        raise ValueError("a bug")

    told = []
    stuck = Movement(0, frozenset(), lambda _: told.append("stuck"), fail, num_stuck=1)
    other = Movement(0, frozenset(), lambda _: told.append("other"), fail)
    finished(poster, stuck, other)
    assert told == ["other"]


def test_a_bug_in_a_flush_makes_nothing_believed(poster):
    def fail(_):
        raise ValueError("a bug")

    poster._flush = fail
    told = []
    came = Movement(0, frozenset([3]), told.append, told.append, num_posted=2)
    finished(poster, came)
    assert told == [2, came]
    assert isinstance(came.error, PeerGone)


def test_the_thread_lives_on_whatever_it_is_told(poster):
    def fail():
        raise ValueError("a bug")

    done = threading.Event()
    assert poster.call(fail)
    assert poster.call(done.set)
    assert done.wait(10.0)


def test_the_thread_sleeps_while_nothing_is_under_way(poster):
    agent = Agent()
    poster.call(lambda: poster.add(agent))
    assert agent.looked.acquire(timeout=10.0)
    assert not agent.looked.acquire(timeout=0.1)
    poster.call(lambda: None)
    assert agent.looked.acquire(timeout=10.0)


def test_what_was_called_for_is_done_before_the_end_and_nothing_after_it(poster):
    calls = []
    holds = threading.Event()
    poster.call(lambda: holds.wait(10.0))
    for number in range(3):
        assert poster.call(lambda number=number: calls.append(number))
    ending = threading.Thread(target=poster.end, args=(Deadline.after(10.0),))
    ending.start()
    while poster.call(lambda: None):
        pass
    holds.set()
    ending.join()
    assert calls == [0, 1, 2]
