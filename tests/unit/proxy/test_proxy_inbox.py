"""What legs say is dealt with at once, in order, one at a time; tokens may take a short way."""

import pytest
from msgspec.structs import replace
from scripted_worker import finished, parked, released, token

from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di.wire import PromptReport, TokenLogprob, TokenLogprobs
from neuron_di_proxy.inbox import KEPT_MAX, TEXT_PER_TOKEN, Heard, Inbox

GONE = PeerGone("the worker is gone")


def is_over(inbox, side):
    """Whether nothing more will be heard of this side."""
    ear = inbox._ears.get(side)
    return ear is None or ear.is_over


class Pair:
    """An inbox of two legs, how each of them speaks, and what was dealt with."""

    def __init__(self, deal=None):
        self.dealt = []
        self.inbox = Inbox(deal or self.dealt.append)
        self.prefill = self.inbox.listen("prefill")
        self.decode = self.inbox.listen("decode", pause=True)

    @property
    def said(self):
        return [heard.said for heard in self.dealt]


@pytest.fixture
def pair():
    return Pair()


def test_events_of_both_legs_are_dealt_with_as_they_come(pair):
    pair.prefill(token(0))
    assert pair.dealt == [Heard("prefill", token(0))]
    pair.decode(token(1))
    assert pair.dealt[1:] == [Heard("decode", token(1))]
    pair.prefill(parked())
    assert pair.dealt[2:] == [Heard("prefill", parked())]


def test_a_leg_that_pauses_says_one_thing_until_it_may_go_on(pair):
    for said in (token(1), token(2), finished(3)):
        pair.decode(said)
    assert pair.said == [token(1)]
    pair.prefill(token(0))
    pair.inbox.resume()
    assert pair.said == [token(1), token(0), token(2), finished(3)]


def test_what_was_kept_waits_until_the_event_that_frees_it_is_dealt_with():
    done = []

    def deal(heard):
        if heard.said == parked():
            pair.inbox.resume()
            pair.inbox.relay("decode", done.append)
        done.append(heard.said)

    pair = Pair(deal)
    for said in (token(1), token(2), token(3)):
        pair.decode(said)
    pair.prefill(parked())
    pair.decode(token(4))
    assert done == [token(1), parked(), token(2), token(3), token(4)]


def test_relayed_tokens_take_the_short_way_and_nothing_else_does(pair):
    relayed = []
    pair.inbox.resume()
    pair.inbox.relay("decode", relayed.append)
    pair.decode(token(1))
    pair.prefill(token(0))
    pair.decode(token(2))
    pair.decode(finished(3))
    pair.decode(token(3))
    assert relayed == [token(1), token(2)]
    assert pair.said == [token(0), finished(3)]


def test_a_leg_that_pauses_is_not_relayed(pair):
    relayed = []
    pair.decode(token(1))
    pair.inbox.relay("decode", relayed.append)
    pair.decode(token(2))
    pair.inbox.resume()
    assert relayed == []
    assert pair.said == [token(1), token(2)]


def test_a_relay_ends_when_another_begins(pair):
    relayed = []
    pair.inbox.resume()
    pair.inbox.relay("decode", relayed.append)
    pair.inbox.relay(None, relayed.append)
    pair.decode(token(1))
    assert relayed == []
    assert pair.said == [token(1)]


def test_what_a_relay_raises_ends_its_leg(pair):
    error = ZeroDivisionError()

    def fail(_):
        raise error

    pair.inbox.resume()
    pair.inbox.relay("decode", fail)
    pair.decode(token(1))
    pair.decode(token(2))
    assert pair.dealt == [Heard("decode", error)]
    assert is_over(pair.inbox, "decode")
    assert not is_over(pair.inbox, "prefill")


@pytest.mark.parametrize("last", [finished(1), released(), GONE])
def test_nothing_is_heard_after_the_end_of_a_leg(pair, last):
    pair.prefill(last)
    pair.prefill(token(0))
    pair.inbox.lose("prefill", PeerGone("and lost as well"))
    assert pair.dealt == [Heard("prefill", last)]


def test_a_leg_that_is_lost_ends_at_once_and_what_was_kept_is_forgotten(pair):
    pair.decode(token(1))
    pair.decode(token(2))
    pair.inbox.lose("decode", GONE)
    pair.decode(token(3))
    pair.inbox.resume()
    assert pair.said == [token(1), GONE]


def test_what_ends_while_it_is_kept_is_not_lost(pair):
    pair.decode(token(1))
    pair.decode(finished(2))
    pair.inbox.lose("decode", GONE)
    pair.inbox.resume()
    assert pair.said == [token(1), finished(2)]


@pytest.mark.parametrize("num_chars", [1, 100 * TEXT_PER_TOKEN])
def test_a_leg_cannot_flood_an_inbox(pair, num_chars):
    num_said = 0
    while not is_over(pair.inbox, "decode"):
        pair.decode(token(1, "x" * num_chars))
        num_said += 1
    assert num_said <= KEPT_MAX + 2
    assert num_said * num_chars <= 2 * KEPT_MAX * TEXT_PER_TOKEN
    assert pair.said[0] == token(1, "x" * num_chars)
    [_, last] = pair.said
    assert isinstance(last, RemoteProtocolError)


def with_alternatives(text):
    one = TokenLogprob(text, -1.0, [], 5)
    return replace(token(1), logprobs=TokenLogprobs(chosen=one, top=[one] * 1000))


@pytest.mark.parametrize(
    "said",
    [
        with_alternatives(""),
        with_alternatives("x" * 50),
        replace(token(1), prompt=PromptReport(text="x" * 60_000, token_ids=[])),
        replace(token(1), prompt=PromptReport(text="", token_ids=[5] * 8000)),
    ],
    ids=["alternatives", "their text", "a prompt", "its tokens"],
)
def test_whatever_a_token_has_counts(pair, said):
    num_said = 0
    while not is_over(pair.inbox, "decode"):
        pair.decode(said)
        num_said += 1
    assert num_said < 100


def test_all_alternatives_of_some_seconds_are_kept(pair):
    one = TokenLogprob("some", -1.0, list(b"some"), 5)
    said = replace(token(1), logprobs=TokenLogprobs(chosen=one, top=[one] * 20))
    for _ in range(500):
        pair.decode(said)
    assert not is_over(pair.inbox, "decode")


def test_what_need_not_be_kept_is_no_flood(pair):
    pair.inbox.resume()
    for _ in range(3 * KEPT_MAX):
        pair.decode(token(1))
    assert len(pair.dealt) == 3 * KEPT_MAX


def test_a_closed_inbox_is_deaf(pair):
    relayed = []
    pair.inbox.resume()
    pair.inbox.relay("decode", relayed.append)
    pair.inbox.close()
    pair.decode(token(1))
    pair.prefill(token(0))
    assert relayed == pair.dealt == []
    late = pair.inbox.listen("whole")
    assert is_over(pair.inbox, "whole")
    late(token(0))
    assert pair.dealt == []


def test_closing_while_events_are_dealt_with_drops_the_rest():
    done = []

    def deal(heard):
        done.append(heard.said)
        if heard.said == token(2):
            pair.inbox.close()

    pair = Pair(deal)
    for said in (token(1), token(2), token(3)):
        pair.decode(said)
    pair.inbox.resume()
    assert done == [token(1), token(2)]
