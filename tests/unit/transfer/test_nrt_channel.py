"""A channel posts in order, no more than it may, and knows what can never be taken back."""

import threading

import pytest

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError, PeerGone, RemoteProtocolError
from neuron_di.transfer.nrt_channel import Channel, Message, Movement
from neuron_di.transfer.nrt_poster import Poster
from neuron_di_bindings.nrt import (
    NrtMisuse,
    NrtRequestError,
    NrtRetry,
    NrtStatus,
    NrtWorkerError,
)

LATE = NrtWorkerError("test_request", NrtStatus.TIMEOUT, "NRT_TIMEOUT")
BUSY = NrtRetry("send_tensor", NrtStatus.RESOURCE, "NRT_RESOURCE")
REFUSED = NrtRequestError("send_tensor", NrtStatus.FAILURE, "NRT_FAILURE")
DEAD = NrtWorkerError("send_tensor", NrtStatus.HW_ERROR, "NRT_HW_ERROR")


class Request:
    """Answers what the test says, in order; then that it is not done."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.num_tests = 0

    def test(self):
        self.num_tests += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer


class Communicator:
    """`takes` are what each post gives: a request, or an error."""

    def __init__(self, *takes, direction="send"):
        self.direction = direction
        self.takes = list(takes)
        self.posts = []

    def send(self, tensor, offset, num_bytes):
        assert self.direction == "send"
        return self._post(tensor, offset, num_bytes)

    def receive(self, tensor, offset, num_bytes):
        assert self.direction == "receive"
        return self._post(tensor, offset, num_bytes)

    def _post(self, *post):
        taken = self.takes.pop(0)
        if isinstance(taken, Exception):
            raise taken
        self.posts.append(post)
        return taken


def channel_of(*takes, pending_max=8, direction="send"):
    return Channel(Communicator(*takes, direction=direction), pending_max)


def add(channel, count, start=0):
    """A movement of so many messages, of 10 bytes each."""
    movement = Movement(count, frozenset(), lambda _: None, lambda _: None)
    for number in range(start, start + count):
        channel.waiting.append(Message(movement, "tensor", number, 10))
    return movement


def step(channel):
    over = []
    has_moved = channel.step(over)
    return has_moved, over


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_messages_are_posted_in_order_and_only_so_many(direction):
    requests = [Request() for _ in range(4)]
    channel = channel_of(*requests, pending_max=2, direction=direction)
    movement = add(channel, 4)
    assert step(channel) == (True, [])
    assert channel.communicator.posts == [("tensor", 0, 10), ("tensor", 1, 10)]
    assert step(channel) == (False, [])
    requests[0].answers = [10]
    assert step(channel) == (True, [])
    assert [post[1] for post in channel.communicator.posts] == [0, 1, 2]
    requests[1].answers = [10]
    requests[2].answers = [10]
    assert step(channel) == (True, [])
    requests[3].answers = [10]
    assert step(channel) == (True, [movement])
    assert movement.error is None
    assert not channel.is_busy
    assert movement.num_posted == 4


def test_only_the_oldest_is_asked_for():
    requests = [Request(), Request(10)]
    channel = channel_of(*requests)
    add(channel, 2)
    step(channel)
    step(channel)
    assert (requests[0].num_tests, requests[1].num_tests) == (1, 0)


def test_what_is_not_taken_now_is_posted_later_in_its_turn():
    channel = channel_of(BUSY, Request(10), BUSY, Request(10))
    movement = add(channel, 2)
    assert step(channel) == (False, [])
    assert step(channel) == (True, [])
    assert step(channel) == (True, [])
    assert step(channel) == (True, [movement])
    assert [post[1] for post in channel.communicator.posts] == [0, 1]


def test_who_says_that_it_takes_long_is_asked_again():
    channel = channel_of(Request(LATE, LATE, 10))
    movement = add(channel, 1)
    assert step(channel) == (True, [])
    assert step(channel) == (False, [])
    assert step(channel) == (False, [])
    assert step(channel) == (True, [movement])
    assert movement.error is None


def test_what_is_refused_was_not_posted_and_breaks_the_channel():
    channel = channel_of(Request(10), REFUSED)
    first, second = add(channel, 1), add(channel, 2, 1)
    has_moved, over = step(channel)
    assert has_moved
    assert over == [second]
    assert isinstance(second.error, PeerGone)
    assert not second.num_stuck
    assert not second.num_posted
    assert step(channel) == (True, [first])
    assert first.error is None
    assert first.num_stuck == 0


def test_a_message_that_cannot_be_is_a_bug_and_ends_nothing_else():
    for bug in (ValueError("outside"), NrtMisuse("before the connection is there")):
        channel = channel_of(bug)
        movement = add(channel, 1)
        assert step(channel) == (True, [movement])
        assert isinstance(movement.error, LocalProtocolError)


def test_a_message_that_failed_is_lost_and_those_behind_it_are_waited_for():
    requests = [Request(REFUSED), Request()]
    channel = channel_of(*requests)
    first, second = add(channel, 1), add(channel, 2, 1)
    channel.pending_max = 2
    step(channel)
    assert step(channel) == (True, [first])
    assert isinstance(first.error, PeerGone)
    assert first.num_stuck == 1
    assert not channel.waiting  # and its turn will not come
    requests[1].answers = [10]
    assert step(channel) == (True, [second])
    assert isinstance(second.error, PeerGone)
    assert not second.num_stuck


def test_another_length_than_was_posted_breaks_the_channel():
    channel = channel_of(Request(9))
    movement = add(channel, 1)
    step(channel)
    assert step(channel) == (True, [movement])
    assert isinstance(movement.error, RemoteProtocolError)
    assert isinstance(channel.error, RemoteProtocolError)


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_device_that_is_lost_is_told_and_what_waits_ends(is_posted):
    channel = channel_of(Request(DEAD)) if is_posted else channel_of(DEAD)
    movement = add(channel, 1)
    if is_posted:
        step(channel)
    over = []
    with pytest.raises(NrtWorkerError):
        channel.step(over)
    assert over == [movement]
    assert movement.num_stuck == is_posted
    assert isinstance(movement.error, PeerGone)
    assert step(channel) == (False, [])


def test_what_is_abandoned_is_not_asked_for_any_more():
    requests = [Request(), Request(10)]
    channel = channel_of(*requests, pending_max=2)
    first, second = add(channel, 1), add(channel, 3, 1)
    step(channel)
    over = []
    error = PeerGone("lost")
    channel.abandon(error, over)
    assert over == [first, second]
    assert (first.error, second.error) == (error, error)
    assert (first.num_stuck, second.num_stuck) == (1, 1)
    assert step(channel) == (False, [])
    assert sum(request.num_tests for request in requests) == 0


class Agent:
    def __init__(self, *channels):
        self.channels = channels
        self.num_ticks = 0
        self.looked = threading.Semaphore(0)

    def busy_channels(self):
        return [channel for channel in self.channels if channel.is_busy]

    def moved(self):
        pass

    def tick(self):
        self.num_ticks += 1
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
    channels = [channel_of(request) for request in messages]
    for channel in channels:
        channel.waiting.append(Message(movement, "tensor", 0, 10))
    agent = Agent(*channels)
    poster.call(lambda: poster.add(agent))
    assert ended.wait(10.0)
    poster.call(lambda: poster.remove(agent))
    return movement


def test_a_movement_is_over_when_all_its_channels_are(poster):
    movement = over_of(poster, Request(None, None, 10), Request(10), Request(None, 10), lncs=(3, 1))
    assert movement.error is None
    assert poster.flushed == [1, 3]


def test_what_came_of_a_transfer_that_failed_is_flushed_too(poster):
    """Its slots are another request's by the time of the next flush."""
    assert over_of(poster, Request(10), Request(REFUSED), lncs=(3, 1)).error is not None
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
