"""A channel posts in order, no more than it may, and knows what can never be taken back."""

import pytest
from nrt_fakes import BUSY, DEAD, LATE, REFUSED, Request, channel_of

from neuron_di.errors import LocalProtocolError, PeerGone, RemoteProtocolError
from neuron_di.transfer.nrt_channel import Message, Movement, PostFailed
from neuron_di_bindings.nrt import NrtMisuse, NrtWorkerError


def add(channel, count, start=0, communicators=("one",)):
    """A movement of so many messages through each, in turns. Their offsets are their numbers."""
    count *= len(communicators)
    movement = Movement(count, frozenset(), lambda _: None, lambda _: None)
    for number in range(start, start + count):
        communicator = communicators[number % len(communicators)]
        channel.waiting.append(Message(movement, communicator, "tensor", number, 10))
    return movement


def step(channel):
    over = []
    has_moved = channel.step(over)
    return has_moved, over


def test_messages_are_posted_in_order_and_only_so_many():
    requests = [Request() for _ in range(4)]
    channel, posts = channel_of(*requests, pending_max=2)
    movement = add(channel, 4)
    assert step(channel) == (True, [])
    assert posts == [[0], [1]]
    assert step(channel) == (False, [])
    requests[0].answers = [True]
    assert step(channel) == (True, [])
    assert posts == [[0], [1], [2]]
    requests[1].answers = [True]
    requests[2].answers = [True]
    assert step(channel) == (True, [])
    requests[3].answers = [True]
    assert step(channel) == (True, [movement])
    assert movement.error is None
    assert not channel.is_busy
    assert movement.num_posted == 4


def test_a_batch_has_the_next_messages_of_one_movement_and_of_each_communicator_so_many():
    requests = [Request() for _ in range(4)]
    channel, posts = channel_of(*requests, pending_max=5, batch_max=2)
    movements = [add(channel, 3, 0, ("one", "other")), add(channel, 3, 6, ("one", "other"))]
    assert step(channel) == (True, [])
    # Behind the third post each communicator has 5 messages, and no room for another.
    assert posts == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert step(channel) == (False, [])
    requests[0].answers = [True]
    assert step(channel) == (True, [])
    assert posts[3:] == [[10, 11]]
    for request in requests[1:]:
        request.answers = [True]
    assert step(channel) == (True, movements)
    assert [movement.num_posted for movement in movements] == [6, 6]
    assert not channel.is_busy


def test_a_message_waits_for_those_before_it_whichever_communicator_has_room():
    """What is posted is a first part of one order: the peer may wait for the first alone."""
    requests = [Request(), Request(), Request()]
    channel, posts = channel_of(*requests, pending_max=2, batch_max=2)
    add(channel, 3)
    add(channel, 1, 3, ("other",))
    step(channel)
    assert posts == [[0, 1]]
    requests[0].answers = [True]
    step(channel)
    assert posts == [[0, 1], [2], [3]]


def test_only_the_oldest_is_asked_for():
    requests = [Request(), Request(True)]
    channel, _ = channel_of(*requests)
    add(channel, 2)
    step(channel)
    step(channel)
    assert (requests[0].num_tests, requests[1].num_tests) == (1, 0)


def test_what_is_not_taken_now_is_posted_later_in_its_turn():
    channel, posts = channel_of(BUSY, Request(True), BUSY, Request(True))
    movement = add(channel, 2)
    assert step(channel) == (False, [])
    assert step(channel) == (True, [])
    assert step(channel) == (True, [])
    assert step(channel) == (True, [movement])
    assert posts == [[0], [1]]


def test_who_says_that_it_takes_long_is_asked_again():
    channel, _ = channel_of(Request(LATE, LATE, True))
    movement = add(channel, 1)
    assert step(channel) == (True, [])
    assert step(channel) == (False, [])
    assert step(channel) == (False, [])
    assert step(channel) == (True, [movement])
    assert movement.error is None


def test_what_is_refused_was_not_posted_and_breaks_the_channel():
    channel, _ = channel_of(Request(True), REFUSED)
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
        channel, _ = channel_of(bug)
        movement = add(channel, 1)
        assert step(channel) == (True, [movement])
        assert isinstance(movement.error, LocalProtocolError)
        assert not movement.num_stuck


def test_after_a_post_that_failed_the_device_may_have_some_of_it():
    channel, _ = channel_of(PostFailed("the queue is full"), batch_max=2)
    movement = add(channel, 3)
    assert step(channel) == (True, [movement])
    assert (movement.num_posted, movement.num_stuck) == (2, 2)
    assert isinstance(movement.error, PeerGone)
    assert "the queue is full" in movement.error.message
    assert not channel.is_busy


def test_after_a_bug_in_a_post_the_device_may_have_what_was_posted():
    """Nobody knows how far it came: a driver may fail behind the call that gave it away."""
    channel, _ = channel_of(KeyError("a bug"), batch_max=2)
    movement = add(channel, 3)
    over = []
    with pytest.raises(KeyError):
        channel.step(over)
    assert over == [movement]
    assert (movement.num_posted, movement.num_stuck) == (2, 2)
    assert isinstance(movement.error, LocalProtocolError)
    assert not channel.is_busy


def test_after_a_bug_in_a_test_the_device_still_has_what_was_posted():
    channel, _ = channel_of(Request(KeyError("a bug")))
    movement = add(channel, 1)
    step(channel)
    over = []
    with pytest.raises(KeyError):
        channel.step(over)
    assert not over
    channel.abandon(PeerGone("lost"), over)
    assert over == [movement]
    assert movement.num_stuck == 1


def test_a_message_that_failed_is_lost_and_so_are_those_behind_it_however_they_end():
    """The failed one may have been posted or not: whose bytes came behind it nobody knows."""
    requests = [Request(REFUSED), Request()]
    channel, _ = channel_of(*requests, pending_max=2)
    first, second = add(channel, 1), add(channel, 2, 1)
    step(channel)
    assert step(channel) == (True, [first])
    assert isinstance(first.error, PeerGone)
    assert first.num_stuck == 1
    assert not channel.waiting  # and its turn will not come
    requests[1].answers = [True]
    assert step(channel) == (True, [second])
    assert isinstance(second.error, PeerGone)
    assert second.num_stuck == 1


def test_what_is_posted_behind_a_batch_that_failed_does_not_count_whatever_it_says():
    channel, posts = channel_of(Request(REFUSED), Request(True), batch_max=2)
    first, second = add(channel, 2), add(channel, 2, 2)
    assert step(channel) == (True, [])
    assert posts == [[0, 1], [2, 3]]
    assert step(channel) == (True, [first, second])
    assert first.error is second.error is channel.error
    assert (first.num_stuck, second.num_stuck) == (2, 2)


@pytest.mark.parametrize("batch_max", [1, 2])
def test_a_channel_of_one_movement_posts_the_next_when_all_of_the_first_is_done(batch_max):
    requests = [Request() for _ in range(4)]
    more = {"batch_max": batch_max, "is_one_movement": True}
    channel, posts = channel_of(*requests, **more)
    first, second = add(channel, 2 * batch_max), add(channel, 2 * batch_max, 2 * batch_max)
    step(channel)
    assert len(posts) == 2
    requests[0].answers = [True]
    assert step(channel) == (True, [])
    assert len(posts) == 2
    requests[1].answers = [True]
    assert step(channel) == (True, [first])
    assert len(posts) == 4
    requests[2].answers, requests[3].answers = [True], [True]
    assert step(channel) == (True, [second])


def test_a_channel_of_one_movement_posts_nothing_of_the_next_behind_one_that_failed():
    channel, posts = channel_of(Request(REFUSED), is_one_movement=True)
    first, second = add(channel, 1), add(channel, 1, 1)
    step(channel)
    assert step(channel) == (True, [first, second])
    assert posts == [[0]]
    assert (first.num_stuck, second.num_stuck) == (1, 0)


def test_a_batch_that_failed_is_lost_as_a_whole():
    channel, _ = channel_of(Request(REFUSED), batch_max=4)
    movement = add(channel, 3)
    step(channel)
    assert step(channel) == (True, [movement])
    assert movement.num_stuck == 3


def test_another_length_than_was_posted_breaks_the_channel():
    channel, _ = channel_of(Request(RemoteProtocolError("another length")))
    movement = add(channel, 1)
    step(channel)
    assert step(channel) == (True, [movement])
    assert isinstance(movement.error, RemoteProtocolError)
    assert isinstance(channel.error, RemoteProtocolError)


@pytest.mark.parametrize("is_posted", [False, True])
def test_a_device_that_is_lost_is_told_and_what_waits_ends(is_posted):
    channel, _ = channel_of(Request(DEAD)) if is_posted else channel_of(DEAD)
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
    requests = [Request(), Request(True)]
    channel, _ = channel_of(*requests, pending_max=2)
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
