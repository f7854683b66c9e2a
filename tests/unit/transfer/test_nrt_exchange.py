"""One link's end: whom it tells, what it leaves behind, and how much it hears."""

import itertools
from collections import deque

import numpy as np
import pytest
from nrt_fakes import Request

from neuron_di.errors import LocalProtocolError, PeerGone, PeerTimeout
from neuron_di.transfer.nrt_channel import Channel, Message
from neuron_di.transfer.nrt_connections import ConnectionSet, Place
from neuron_di.transfer.nrt_exchange import Exchange, NrtTimes
from neuron_di.transfer.nrt_frames import OFFER, Frame
from neuron_di.transfer.nrt_plan import Moves

GONE = PeerGone("linked anew")


class Poster:
    """Does nothing of what it is called for until the test says so."""

    def __init__(self):
        self.calls = []

    def call(self, action):
        self.calls.append(action)
        return True

    def remove(self, agent):
        pass

    def finish(self, over):
        assert not over


class Link:
    """A peer that says the same for ever."""

    def __init__(self):
        self.num_read = 0
        self.is_shut = False

    def read(self):
        self.num_read += 1
        return Frame(OFFER, self.num_read)

    def shut(self):
        self.is_shut = True

    close = shut


class Listener:
    has_open = False

    def __init__(self):
        self.heard_frames, self.ends = [], []

    def heard(self, frame):
        self.heard_frames.append(frame)
        if frame.number == 0:
            raise ValueError("a bug")

    def ended(self, error, *, is_broken):
        self.ends.append((error, is_broken))

    def tick(self):
        return None


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def exchange(listener):
    connections = ConnectionSet("peer", "send", "host", 1)
    connections.places = [Place(0, 0, 1, 0, channel=Channel(None, 1))]
    times = NrtTimes(stall_s=0.05)
    exchange = Exchange(Poster(), Link(), connections, ["tensor"], times, lambda _: None)
    exchange.start(listener)
    return exchange


def test_a_link_that_is_over_tells_its_listener_nothing_more(exchange, listener):
    """The next link has the same one by then; the reader of this one finds out late."""
    exchange.finish(GONE)
    exchange.tick()
    assert exchange.quiet.is_set()
    exchange.break_off(PeerGone("its control connection ended"))
    exchange.abandon(PeerGone("this worker's device failed"))
    exchange._hear(Frame(OFFER, 1))
    assert listener.ends == [(GONE, False)]
    assert listener.heard_frames == []


def test_connections_that_led_elsewhere_are_not_used_again(exchange):
    exchange._connections.is_broken = True
    exchange.finish(GONE)
    exchange.tick()
    assert exchange._connections.is_broken
    assert not exchange._connections.is_used


def test_a_transfer_over_other_connections_is_over_at_once(exchange, listener):
    one = np.ones(2, np.int64)
    moves = Moves(
        starts=np.arange(3, dtype=np.int64),
        source_tensors=one,
        source_offsets=one,
        destination_tensors=one,
        destination_offsets=one,
        lengths=one,
    )
    over = []
    exchange.begin(moves, over.append)
    assert isinstance(over[0].error, LocalProtocolError)
    assert not exchange._connections.channels[0].is_busy
    assert listener.ends == [(over[0].error, True)]


class Full(deque):
    """Takes so many, and then no more."""

    room = 3

    def append(self, message):
        if len(self) == self.room:
            raise MemoryError
        super().append(message)


def three_messages():
    numbers = np.zeros(3, np.int64)
    return Moves(
        starts=np.array([0, 3]),
        source_tensors=numbers,
        source_offsets=np.arange(3),
        destination_tensors=numbers,
        destination_offsets=numbers,
        lengths=np.ones(3, np.int64),
    )


@pytest.mark.parametrize("room", [2, 3])
def test_a_transfer_that_fails_before_it_is_posted_is_over_at_once(exchange, listener, room):
    """Else nobody would ever end its token: not all of it waits, or the link is not looked at."""
    (channel,) = exchange._connections.channels
    channel.waiting = Full()
    before = Message(None, None, None, 0, 1)
    channel.waiting.append(before)
    channel.waiting.room = room + 1

    def step(agents):
        raise RuntimeError("a bug")

    exchange._poster.step = step
    over = []
    exchange.begin(three_messages(), over.append)
    (movement,) = over
    assert isinstance(movement.error, LocalProtocolError)
    assert (movement.num_left, movement.num_posted, movement.num_stuck) == (0, 0, 0)
    assert list(channel.waiting) == [before]
    assert listener.ends == [(movement.error, True)]


def test_a_transfer_that_fails_behind_its_first_post_is_over_when_the_device_is_through(exchange):
    (channel,) = exchange._connections.channels
    request = Request()
    channel.post = lambda _: request
    over, done = [], []

    def step(agents):
        channel.step(done)
        raise RuntimeError("a bug")

    exchange._poster.step = step
    exchange.begin(three_messages(), over.append)
    assert isinstance(exchange.error, LocalProtocolError)
    assert over == []
    channel.abandon(exchange.error, done)
    assert [(each.num_posted, each.num_stuck) for each in done] == [(1, 1)]


def test_a_frame_that_shows_a_bug_breaks_the_link_off(exchange, listener):
    exchange._hear(Frame(OFFER, 0))
    assert isinstance(exchange.error, LocalProtocolError)
    assert listener.ends == [(exchange.error, True)]
    assert exchange.link.is_shut


def test_no_more_is_read_than_is_heard_in_time(exchange, listener):
    exchange.read_on()
    calls = exchange._poster.calls
    assert (len(calls), exchange.link.num_read) == (65, 65)
    for call in calls[:-1]:
        call()
    assert [frame.number for frame in listener.heard_frames] == list(range(1, 65))
    calls[-1]()
    assert isinstance(exchange.error, PeerTimeout)


def test_what_is_heard_makes_room_for_more(exchange, listener):
    numbers = itertools.count(1)

    def call(action):
        action()
        return next(numbers) < 200

    exchange._poster.call = call
    exchange.read_on()
    assert len(listener.heard_frames) == 200
    assert exchange.error is None
