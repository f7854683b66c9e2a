"""What the two ends may say to each other, and what becomes of what they say out of turn."""

from dataclasses import replace

import numpy as np
import pytest
from hand_clock import HandClock

from neuron_di.clock import use_clock
from neuron_di.errors import (
    CapacityError,
    KvMissing,
    LocalProtocolError,
    PeerGone,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.kv import Memory, Runs
from neuron_di.transfer import BlockSource, Receive, TransferToken
from neuron_di.transfer.nrt_channel import Movement
from neuron_di.transfer.nrt_exchange import NrtTimes
from neuron_di.transfer.nrt_frames import (
    ACCEPT,
    CONNECTED,
    CROWDED,
    GIVEN_UP,
    OFFER,
    READY,
    REFUSE,
    SETUP,
    UNFIT,
    WITHDRAW,
    WITHDRAWN,
    Frame,
)
from neuron_di.transfer.nrt_plan import Moves
from neuron_di.transfer.nrt_receiver import RECEIVES_MAX, NrtReceiver
from neuron_di.transfer.nrt_sender import SENDS_MAX, NrtSender

NOTHING = np.zeros(0, np.int64)
RUNS = Runs(source_offsets=NOTHING, destination_offsets=NOTHING, lengths=NOTHING)


def moves_of(num_bytes):
    one = np.array([num_bytes], np.int64)
    zero = np.zeros(1, np.int64)
    return Moves(
        starts=np.array([0, 1], np.int64),
        source_tensors=zero,
        source_offsets=zero,
        destination_tensors=zero,
        destination_offsets=zero,
        lengths=one,
    )


MOVES = moves_of(64)


class Link:
    def __init__(self):
        self.said = []

    def send(self, frame):
        self.said.append(frame)


class Exchange:
    """Whatever begins is under way until the test says that it is over."""

    def __init__(self, *, takes=True):
        self.link = Link()
        self.error = None
        self.listener = None
        self.begun = []
        self.broken_by = None
        self.takes = takes

    def start(self, listener):
        self.listener = listener

    def begin(self, moves, on_over):
        movement = Movement(1, frozenset(), on_over, lambda _: None)
        if self.takes:
            self.begun.append(movement)
        else:
            movement.fail(PeerGone("the device did not take it"))
            on_over(movement)

    def end(self, number=0):
        self.begun[number].on_over(self.begun[number])

    def break_off(self, error):
        self.broken_by = self.error = error
        self.listener.ended(error, is_broken=True)

    def said(self):
        said, self.link.said = self.link.said, []
        return said


def receive_of(tag):
    return Receive(tag=tag, runs=RUNS, memory=Memory(0, 0), source=BlockSource([], []))


def offer(number, tag, moves=MOVES):
    return Frame(OFFER, number, tag, moves.num_bytes, moves.digest())


class Scene:
    """Decode's end, and what came of its receives."""

    def __init__(self, **fields):
        self.exchange = Exchange(**fields)
        self.arrived, self.tokens = [], {}
        self.receiver = NrtReceiver(
            self.exchange,
            lambda receive: self.arrived.append(receive.tag),
            lambda token, error: token.complete(error),
        )

    def post(self, tag, moves=MOVES):
        token = self.tokens[tag] = TransferToken()
        self.receiver.post(receive_of(tag), token, lambda: moves)
        return token

    def hear(self, frame):
        self.receiver.heard(frame)
        return self.exchange.said()


@pytest.fixture
def decode():
    return Scene()


@pytest.mark.parametrize("is_offered_first", [True, False])
def test_an_offer_and_its_receive_find_each_other(decode, is_offered_first):
    if is_offered_first:
        assert decode.hear(offer(7, 1)) == []
        token = decode.post(1)
    else:
        token = decode.post(1)
        decode.receiver.heard(offer(7, 1))
    assert decode.exchange.said() == [Frame(ACCEPT, 7)]
    assert not token.is_done()
    assert not decode.receiver.idle.is_set()
    decode.exchange.end()
    assert token.is_done()
    assert token.error() is None
    assert token.kv_bytes == 64
    assert decode.arrived == [1]
    assert decode.receiver.idle.is_set()


def test_receives_are_posted_in_the_order_of_the_accepts(decode):
    for tag in (1, 2, 3):
        decode.post(tag)
    for number, tag in ((10, 3), (11, 1), (12, 2)):
        assert decode.hear(offer(number, tag)) == [Frame(ACCEPT, number)]
    assert len(decode.exchange.begun) == 3
    for number, tag in ((0, 3), (1, 1), (2, 2)):
        decode.exchange.end(number=number)
        assert decode.tokens[tag].is_done()


def test_other_bytes_than_are_expected_are_refused(decode):
    token = decode.post(1)
    assert decode.hear(offer(7, 1, moves_of(65))) == [Frame(REFUSE, 7, UNFIT)]
    assert isinstance(token.error(), RemoteProtocolError)
    assert decode.exchange.begun == []


def test_what_the_device_does_not_take_is_over():
    decode = Scene(takes=False)
    token = decode.post(1)
    decode.hear(offer(7, 1))
    assert isinstance(token.error(), PeerGone)
    assert decode.arrived == []


def test_what_was_given_up_is_refused_once(decode):
    token = decode.post(1)
    decode.receiver.cancel(1)
    assert isinstance(token.error(), KvMissing)
    assert decode.hear(offer(7, 1)) == [Frame(REFUSE, 7, GIVEN_UP)]
    assert decode.hear(offer(8, 1)) == []


def test_a_withdrawn_offer_is_answered_and_forgotten(decode):
    decode.hear(offer(7, 1))
    assert decode.hear(Frame(WITHDRAW, 6, 1)) == []
    assert decode.hear(Frame(WITHDRAW, 7, 1)) == [Frame(REFUSE, 7, WITHDRAWN)]
    assert decode.hear(Frame(WITHDRAW, 7, 1)) == []
    assert not decode.post(1).is_done()
    assert decode.hear(offer(8, 1)) == [Frame(ACCEPT, 8)]
    assert decode.hear(Frame(WITHDRAW, 8, 1)) == []  # too late: the ACCEPT is the answer


def test_a_transfer_that_is_offered_twice_is_no_transfer(decode):
    decode.hear(offer(7, 1))
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode.hear(offer(8, 1))
    decode.post(1)
    with pytest.raises(RemoteProtocolError, match="twice"):
        decode.hear(offer(9, 1))


@pytest.mark.parametrize("number", [6, 7])
def test_numbers_of_offers_only_rise(decode, number):
    decode.hear(offer(7, 1))
    with pytest.raises(RemoteProtocolError, match="order"):
        decode.hear(offer(number, 2))
    decode.post(1)
    assert decode.exchange.said() == [Frame(ACCEPT, 7)]


def test_what_was_never_offered_cannot_be_withdrawn(decode):
    decode.hear(offer(7, 1))
    with pytest.raises(RemoteProtocolError, match="withdrew"):
        decode.hear(Frame(WITHDRAW, 8, 1))


@pytest.mark.parametrize("kind", [SETUP, CONNECTED, READY, ACCEPT, REFUSE])
def test_a_prefill_worker_may_only_offer_and_withdraw(decode, kind):
    with pytest.raises(RemoteProtocolError):
        decode.hear(Frame(kind, 1))


def test_offers_and_receives_are_bounded(decode):
    for number in range(1, RECEIVES_MAX + 1):
        assert decode.hear(offer(number, number)) == []
    assert decode.hear(offer(5000, 5000)) == [Frame(REFUSE, 5000, CROWDED)]
    for tag in range(10_000, 10_000 + RECEIVES_MAX):
        assert not decode.post(tag).is_done()
    assert isinstance(decode.post(20_000).error(), CapacityError)
    assert isinstance(decode.post(10_000).error(), LocalProtocolError)


@pytest.mark.parametrize("is_broken", [True, False])
def test_a_link_that_ends_leaves_what_is_agreed_on_and_nothing_else(decode, is_broken):
    agreed, waiting = decode.post(1), decode.post(2)
    decode.hear(offer(7, 1))
    decode.hear(offer(8, 3))
    error = decode.exchange.error = PeerGone("disconnected")
    decode.receiver.ended(error, is_broken=is_broken)
    assert decode.exchange.said() == [Frame(REFUSE, 8, GIVEN_UP)]
    assert waiting.error() is error
    assert not agreed.is_done()
    assert decode.hear(offer(9, 2)) == [Frame(REFUSE, 9, GIVEN_UP)]
    assert decode.post(4).error() is error
    decode.exchange.end()
    assert agreed.error() is None


@pytest.fixture
def clock():
    clock = HandClock()
    with use_clock(clock):
        yield clock


class Sending:
    """Prefill's end."""

    def __init__(self, **fields):
        self.sender = NrtSender(
            NrtTimes(unclaimed_s=10.0, answer_s=2.0), lambda token, error: token.complete(error)
        )
        self.exchange = Exchange(**fields)
        self.sender.serve(self.exchange)

    def post(self, tag, moves=MOVES):
        token = TransferToken()
        self.sender.post(tag, token, lambda: moves)
        return token


@pytest.fixture
def prefill():
    return Sending()


def test_a_send_is_offered_and_posted_once_it_is_accepted(prefill):
    token = prefill.post(5)
    assert prefill.exchange.said() == [offer(1, 5)]
    assert prefill.sender.has_open
    assert not prefill.sender.idle.is_set()
    assert prefill.exchange.begun == []
    prefill.sender.heard(Frame(ACCEPT, 1))
    assert not prefill.sender.has_open
    assert not token.is_done()
    prefill.exchange.end()
    assert token.is_done()
    assert token.error() is None
    assert prefill.sender.idle.is_set()


def test_a_refused_send_is_over(prefill):
    token = prefill.post(5)
    prefill.sender.heard(Frame(REFUSE, 1, UNFIT))
    assert isinstance(token.error(), KvMissing)
    assert "other bytes" in token.error().message
    assert not prefill.post(5).is_done()
    prefill.sender.heard(Frame(REFUSE, 2, 99))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(ACCEPT, 2),
        Frame(REFUSE, 2),
        Frame(OFFER, 1),
        Frame(WITHDRAW, 1),
        Frame(READY, 1),
        Frame(SETUP, 1),
    ],
)
def test_a_decode_worker_may_only_answer_what_it_is_asked(prefill, frame):
    prefill.post(5)
    with pytest.raises(RemoteProtocolError):
        prefill.sender.heard(frame)


@pytest.mark.parametrize("again", [ACCEPT, REFUSE])
def test_an_offer_is_answered_once(prefill, again):
    prefill.post(5)
    prefill.sender.heard(Frame(ACCEPT, 1))
    with pytest.raises(RemoteProtocolError):
        prefill.sender.heard(Frame(again, 1))


def test_sends_are_bounded_and_named_once(prefill):
    for tag in range(SENDS_MAX):
        assert not prefill.post(tag).is_done()
    assert isinstance(prefill.post(SENDS_MAX).error(), CapacityError)
    assert isinstance(prefill.post(0).error(), LocalProtocolError)
    for tag in (-1, 1 << 64):
        assert isinstance(prefill.post(tag).error(), LocalProtocolError)


def test_a_link_that_breaks_ends_what_is_not_accepted(prefill):
    accepted, offered = prefill.post(1), prefill.post(2)
    prefill.sender.heard(Frame(ACCEPT, 1))
    error = PeerGone("cut")
    prefill.exchange.break_off(error)
    assert offered.error() is error
    assert not accepted.is_done()
    assert isinstance(prefill.post(3).error(), PeerGone)
    prefill.exchange.end()
    assert accepted.error() is None


def test_a_link_that_ends_in_good_order_waits_for_answers(prefill):
    offered = prefill.post(1)
    prefill.exchange.said()
    error = prefill.exchange.error = PeerGone("disconnected")
    prefill.sender.ended(error, is_broken=False)
    assert prefill.exchange.said() == [Frame(WITHDRAW, 1, 1)]
    assert prefill.sender.has_open
    assert not offered.is_done()
    prefill.sender.heard(Frame(REFUSE, 1, WITHDRAWN))
    assert isinstance(offered.error(), KvMissing)
    assert not prefill.sender.has_open


def test_a_send_is_withdrawn_when_its_time_is_over_and_its_link_when_nobody_answers(clock):
    prefill = Sending()
    assert prefill.sender.tick() is None
    token = prefill.post(5)
    prefill.exchange.said()
    assert prefill.sender.tick().remaining_s() == 10.0
    clock.now_s += 9.9
    prefill.sender.tick()
    assert prefill.exchange.said() == []
    clock.now_s += 0.2
    assert prefill.sender.tick() is not None
    assert prefill.exchange.said() == [Frame(WITHDRAW, 1, 5)]
    assert prefill.sender.tick().remaining_s() == pytest.approx(2.0)
    clock.now_s += 1.9
    prefill.sender.tick()
    assert prefill.exchange.broken_by is None
    assert not token.is_done()
    clock.now_s += 0.2
    prefill.sender.tick()
    assert isinstance(prefill.exchange.broken_by, PeerTimeout)
    assert isinstance(token.error(), PeerTimeout)


def test_what_is_accepted_has_no_such_deadline(clock):
    prefill = Sending()
    prefill.post(5)
    prefill.sender.heard(Frame(ACCEPT, 1))
    clock.now_s += 1000.0
    assert prefill.sender.tick() is None
    assert prefill.exchange.broken_by is None


def test_a_transfer_of_other_lengths_has_another_digest():
    assert replace(MOVES, lengths=np.array([65], np.int64)).digest() != MOVES.digest()
