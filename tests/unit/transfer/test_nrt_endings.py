"""Transfers between devices that do not go well: called off, late, refused, or posted for good."""

import threading
from contextlib import contextmanager

import pytest
from nrt_kit import (
    DECODE,
    DRIVERS,
    PREFILL,
    UNTOUCHED,
    NrtTimes,
    driven_by,
    ended,
    two_ends,
    until,
)

from neuron_di.errors import (
    KvError,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    PeerGone,
    PeerTimeout,
)
from neuron_di.transfer.nrt_link import ControlLink

LATE = "function=sendrecv.send delay_us=300000"  # all that the process sends
NEVER = "function=sendrecv.send status=5"  # the next send never ends, and its receive does not
QUICK = NrtTimes(grace_s=0.3, stall_s=0.3, close_s=1.0)


# What a driver by torch-neuronx's classes cannot tell apart: test_nrt_drivers.py.
BY_LIBNRT = pytest.mark.parametrize("driver", ["libnrt"], indirect=True)


@pytest.fixture(autouse=True, params=DRIVERS)
def driver(request):
    """What both ends send and receive by."""
    with driven_by(request.param) as name:
        yield name


@contextmanager
def held(end):
    """The end does nothing within the block, however much it is told."""
    goes_on = threading.Event()
    is_held = threading.Event()
    end.engine._poster.call(lambda: (is_held.set(), goes_on.wait(30.0)))
    assert is_held.wait(30.0)
    try:
        yield
    finally:
        goes_on.set()


def exchange_of(end, peer, direction):
    return end.engine._links._exchanges[peer, direction]


def cut(two):
    """The control connection breaks; the devices' connections do not."""
    exchange_of(two.decode, PREFILL, "receive").link.shut()


def until_agreed(two):
    """Prefill knows that its one offer is accepted."""
    outgoing = two.prefill.engine._guests[DECODE].sender._outgoing
    until(lambda: any(each.is_accepted for each in list(outgoing.values())))


def num_made(two):
    return two.prefill.num_calls("connect"), two.decode.num_calls("accept")


def check_moves(two):
    two.decode.blocks[:] = UNTOUCHED
    assert two.move([3, 1], [2, 5]).error() is None
    assert (two.decode.blocks[[2, 5]] == two.prefill.blocks[[3, 1]]).all()
    assert (two.decode.blocks[[0, 1, 3, 4]] == UNTOUCHED).all()
    assert two.prefill.pool.lost is None
    assert two.decode.pool.lost is None


@pytest.mark.parametrize("is_offered", [False, True])
def test_a_receive_that_is_cancelled_before_it_is_accepted_is_never_posted(is_offered):
    with two_ends() as two:
        num_posted = two.decode.num_calls("recv_tensor")
        receive = two.receive([0], [0])
        with held(two.decode):
            outcome = two.post(receive)
            two.decode.engine.cancel(PREFILL, receive.tag)
            if is_offered:
                send = two.send(receive)
        assert isinstance(outcome.error(), KvMissing)
        if not is_offered:
            send = two.send(receive)
        assert isinstance(ended(send), KvMissing)
        assert two.decode.num_calls("recv_tensor") == num_posted
        check_moves(two)


def test_what_is_cancelled_after_it_was_accepted_comes_all_the_same():
    with two_ends() as two:
        two.prefill.place.fault(LATE)
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        until_agreed(two)
        two.decode.engine.cancel(PREFILL, receive.tag)
        assert outcome.error() is None
        assert ended(send) is None
        check_moves(two)


def test_a_tag_that_was_cancelled_can_be_used_again():
    with two_ends() as two:
        receive = two.receive([0], [0])
        outcome = two.post(receive)
        two.decode.engine.cancel(PREFILL, receive.tag)
        assert isinstance(outcome.error(), KvMissing)
        outcome = two.post(receive)
        assert ended(two.send(receive)) is None
        assert outcome.error() is None


def test_a_send_that_nobody_receives_is_withdrawn():
    with two_ends(NrtTimes(unclaimed_s=0.1)) as two:
        receive = two.receive([0], [0])
        num_posted = two.prefill.num_calls("send_tensor")
        assert isinstance(ended(two.send(receive)), KvError)
        outcome = two.post(receive)  # too late: it waits, and can be cancelled
        two.decode.engine.cancel(PREFILL, receive.tag)
        assert isinstance(outcome.error(), KvMissing)
        assert two.prefill.num_calls("send_tensor") == num_posted
        check_moves(two)


def test_an_accept_that_crosses_a_withdrawal_counts():
    """Its receives are posted, so its sends must be, too."""
    with two_ends(NrtTimes(unclaimed_s=0.1, answer_s=30.0)) as two:
        receive = two.receive([0], [0])
        with held(two.decode):
            outcome = two.post(receive)
            send = two.send(receive)
            outgoing = two.prefill.engine._guests[DECODE].sender._outgoing
            until(lambda: any(each.is_withdrawn for each in list(outgoing.values())))
        assert outcome.error() is None
        assert ended(send) is None
        assert (two.decode.blocks[0] == two.prefill.blocks[0]).all()
        check_moves(two)


def test_an_offer_that_is_never_answered_ends_the_link_and_costs_no_device():
    with two_ends(NrtTimes(unclaimed_s=0.1, answer_s=0.1)) as two:
        receive = two.receive([0], [0])
        with held(two.decode):
            assert isinstance(ended(two.send(receive)), PeerTimeout)
        until(lambda: exchange_of(two.decode, PREFILL, "receive").quiet.is_set())
        assert isinstance(two.post(receive).error(), PeerGone)
        two.link()
        check_moves(two)


@pytest.mark.parametrize("peer", ["decode", "prefill"])
def test_a_disconnected_peer_gets_what_was_agreed_on_and_nothing_else(peer):
    with two_ends() as two:
        two.prefill.place.fault(LATE)
        agreed, alone = two.receive([0], [0]), two.receive([1], [1])
        outcome, send = two.post(agreed), two.send(agreed)
        until_agreed(two)
        if peer == "decode":
            waiting = two.post(alone)
            two.decode.engine.disconnect(PREFILL)
            assert isinstance(waiting.error(), PeerGone)
        else:
            unasked = two.send(alone)
            two.prefill.engine.disconnect(DECODE)
            assert isinstance(ended(unasked), NeuronDiError)
        assert outcome.error() is None
        assert ended(send) is None
        assert (two.decode.blocks[0] == two.prefill.blocks[0]).all()
        two.link()
        check_moves(two)


def test_peers_that_link_anew_use_the_devices_connections_again():
    with two_ends() as two:
        before = num_made(two)
        for _ in range(3):
            two.decode.engine.disconnect(PREFILL)
            two.prefill.engine.disconnect(DECODE)
            two.link()
            check_moves(two)
            two.link()
            check_moves(two)
        assert num_made(two) == before


def test_a_link_that_breaks_ends_what_was_not_agreed_on():
    with two_ends() as two:
        before = num_made(two)
        outcome, send = two.post(two.receive([0], [0])), two.send(two.receive([1], [1]))
        cut(two)
        assert isinstance(outcome.error(), PeerGone)
        assert isinstance(ended(send), PeerGone)
        two.link()
        check_moves(two)
        assert num_made(two) == before


def test_a_link_that_breaks_while_the_devices_go_on_ends_nothing_that_was_agreed_on():
    with two_ends(NrtTimes(grace_s=30.0)) as two:
        two.prefill.place.fault(LATE)
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        until_agreed(two)
        cut(two)
        assert outcome.error() is None
        assert ended(send) is None
        assert (two.decode.blocks[0] == two.prefill.blocks[0]).all()
        two.link()
        check_moves(two)


def check_lost(end, *words):
    until(lambda: end.pool.lost is not None)
    assert all(word in end.pool.lost.message for word in words), end.pool.lost.message


def test_a_peer_that_is_lost_with_something_posted_takes_the_device_along():
    with two_ends(QUICK) as two:
        told = []
        two.decode.pool.watch_loss(told.append)
        two.prefill.place.fault(NEVER)
        receive, behind = two.receive([0], [0]), two.receive([1], [1])
        outcomes = [two.post(receive), two.post(behind)]
        lost_by_then = []  # else its slots would be another request's
        outcomes[0].token.on_done(lambda _: lost_by_then.append(two.decode.pool.lost))
        sends = [two.send(receive), two.send(behind)]
        assert isinstance(outcomes[0].error(), PeerError)
        assert isinstance(ended(sends[0]), PeerError)
        for end in (two.prefill, two.decode):
            check_lost(end, "posted", "new process")
        assert told == lost_by_then == [two.decode.pool.lost]
        # What others agreed on is over, one way or the other.
        assert outcomes[1].error() is None or isinstance(outcomes[1].error(), PeerError)
        assert ended(sends[1]) is None or isinstance(ended(sends[1]), PeerError)


@BY_LIBNRT
def test_a_message_that_fails_takes_both_devices_along():
    with two_ends(QUICK) as two:
        two.prefill.place.fault("function=sendrecv.send status=1")
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        assert isinstance(outcome.error(), PeerError)
        assert isinstance(ended(send), PeerError)
        check_lost(two.decode, "NETWORK_PROXY_FAILURE")  # says its runtime: that is for good
        check_lost(two.prefill)


@BY_LIBNRT
def test_a_device_that_fails_is_lost_at_once():
    with two_ends() as two:
        two.decode.place.fault("function=nrt_async_sendrecv_recv_tensor status=6 sticky")
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        assert isinstance(outcome.error(), PeerError)
        assert isinstance(ended(send), NeuronDiError)
        check_lost(two.decode, "HW_ERROR")
        assert two.prefill.pool.lost is None


def test_a_flush_that_fails_makes_nothing_believed():
    with two_ends() as two:
        two.decode.pool.retire([0])
        two.decode.place.fault("function=nrt_async_sendrecv_flush status=1")
        receive = two.receive([0], [0])
        outcome = two.post(receive)
        two.send(receive)
        assert isinstance(outcome.error(), PeerGone)
        assert two.decode.pool.lost is not None  # the bytes may yet come, at any other flush
        assert not two.decode.pool.is_on_device(0)


@BY_LIBNRT
def test_what_the_device_does_not_take_is_refused_and_costs_the_peer_nothing():
    with two_ends() as two:
        num_posted = two.prefill.num_calls("send_tensor")
        two.decode.place.fault("function=nrt_async_sendrecv_recv_tensor status=1")
        two.decode.place.fault("function=nrt_async_sendrecv_recv_tensor call=2 status=1")
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        assert isinstance(outcome.error(), PeerGone)
        assert ended(send) is not None
        assert two.prefill.num_calls("send_tensor") == num_posted
        for end in (two.prefill, two.decode):
            assert end.pool.lost is None


def test_closing_with_something_posted_for_good_loses_the_device():
    with two_ends(NrtTimes(close_s=0.3)) as two:
        two.prefill.place.fault(NEVER)
        receive = two.receive([0], [0])
        outcome, send = two.post(receive), two.send(receive)
        until_agreed(two)
        two.decode.engine.close()
        assert outcome.has_ended(0.0)
        assert isinstance(outcome.error(), PeerGone)
        check_lost(two.decode, "posted")
        two.prefill.engine.close()
        assert ended(send) is not None
        check_lost(two.prefill, "posted")


def test_a_bug_in_an_offer_ends_the_send_and_others_go_on(monkeypatch):
    with two_ends() as two:
        say = ControlLink.send
        receive = two.receive([0], [0])
        outcome = two.post(receive)

        def failing(link, frame):
            monkeypatch.setattr(ControlLink, "send", say)
            raise ValueError("a bug")

        monkeypatch.setattr(ControlLink, "send", failing)
        assert isinstance(ended(two.send(receive)), LocalProtocolError)
        assert two.prefill.engine._guests[DECODE].sender.idle.is_set()
        assert ended(two.send(receive)) is None
        assert outcome.error() is None
        check_moves(two)
