"""A link hears the same of its worker with and without the extension, however its bytes come."""

import asyncio
import itertools
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_rig import Rig, chunks_of
from scripted_worker import finished, make_record, make_status, parked, token

from neuron_di.config import LimitOptions
from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di.wire.leg_link import Told, encode_frame, told_decoder
from neuron_di_proxy import leg_link
from neuron_di_proxy.leg_link import LegLink
from neuron_di_proxy.token_lane import IS_COMPILED, PlainLinkReader, relay_nothing, relay_told

RECORD = make_record("d1", "decode")
NUM_LEGS = 3


class PlainLegLink(LegLink):
    """As it is where the extension was not built."""

    data_received = PlainLinkReader.data_received


def word(num_steps=0, record=RECORD):
    """How the worker is."""
    return make_status(record, num_steps=num_steps)


def frame_of(tokens=(), events=(), status=None):
    return bytes(encode_frame(Told(list(tokens), list(events), status)))


@dataclass
class Heard:
    """All that was heard of a link, and how often it was decoded."""

    of_legs: list
    words: list
    num_decoded: int = 0


def hear(data, *, cuts=(), is_compiled=True):
    """What a link with three legs hears of these bytes, cut at some places."""
    heard = Heard([], [])

    class Counting:
        def decode(self, raw):
            heard.num_decoded += 1
            return told_decoder.decode(raw)

    def listen(number):
        return lambda said: heard.of_legs.append((number, comparable(said)))

    async def run():
        kind = LegLink if is_compiled else PlainLegLink
        link = kind(RECORD, LimitOptions(), lambda _: None, heard.words.append)
        for number in range(NUM_LEGS):
            assert link.open("decode", (b"{}",), listen(number)) == number
        places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        for start, end in itertools.pairwise(places):
            link.data_received(data[start:end])
        link.end(PeerGone("over"))
        await asyncio.sleep(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leg_link, "told_decoder", Counting())
        patch.setattr(leg_link, "relay_told", relay_told if is_compiled else relay_nothing)
        asyncio.run(run())
    return heard


def comparable(said):
    return (type(said), str(said)) if isinstance(said, Exception) else said


LEGS = st.integers(0, NUM_LEGS)  # and one that nobody opened
EVENTS = st.sampled_from([parked(), token(3), finished(4)])
FRAMES = st.builds(
    frame_of,
    st.lists(st.tuples(LEGS, st.integers(0, 3), st.integers(0, 1 << 40), st.text(max_size=9))),
    st.lists(st.tuples(LEGS, EVENTS), max_size=3),
    st.sampled_from([None, None, word(), word(1)]),
)
NONSENSE = [b"", b"\0\0\0\0", b"\0\0\0\1\xc1", b"\0\0\0\3\x93\x90\x90", b"\xff\xff\xff\xff"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(FRAMES, max_size=5),
    st.sampled_from(NONSENSE),
    st.lists(FRAMES, max_size=1),
    st.lists(st.integers(0, 600), max_size=6),
)
def test_the_same_is_heard_with_and_without_the_extension(frames, nonsense, late, cuts):
    data = b"".join([*frames, nonsense, *late])
    compiled, plain = hear(data, cuts=cuts), hear(data, cuts=cuts, is_compiled=False)
    assert compiled.of_legs == plain.of_legs
    assert compiled.words == plain.words


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("nonsense", NONSENSE[1:])
def test_nothing_is_heard_behind_what_is_not_understood(nonsense, is_compiled):
    good = frame_of([(0, 0, 100, "x")])
    heard = hear(good + nonsense + good, cuts=[len(good)], is_compiled=is_compiled)
    assert heard.of_legs[0] == (0, token(0, "x"))
    assert [said[0] for _, said in heard.of_legs[1:]] == [RemoteProtocolError] * NUM_LEGS


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_word_that_is_said_again_is_heard_again_and_not_decoded(is_compiled):
    idle, busy = frame_of(status=word()), frame_of(status=word(1))
    frames = [idle, idle, frame_of([(0, 0, 1, "x")], status=word()), idle, busy, idle]
    heard = hear(b"".join(frames), is_compiled=is_compiled)
    assert heard.words == [word(), word(), word(), word(), word(1), word()]
    assert heard.num_decoded == (3 if is_compiled else 4)
    assert heard.words[0] is heard.words[1]
    assert heard.words[0] is heard.words[3]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_an_event_that_is_said_again_is_decoded_again(is_compiled):
    """Nothing of a leg is kept after it was heard."""
    heard = hear(frame_of(events=[(1, token(0))]) * 2, is_compiled=is_compiled)
    assert heard.of_legs[:2] == [(1, token(0))] * 2
    assert heard.num_decoded == 2


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_word_of_another_process_ends_the_link_also_when_said_again(is_compiled):
    other = word(record=make_record("d1", "decode", incarnation="another"))
    heard = hear(frame_of(status=other) * 2, is_compiled=is_compiled)
    assert heard.words == [other]
    assert [said for _, said in heard.of_legs] == [
        (PeerGone, "worker d1 is another process now")
    ] * NUM_LEGS


@pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")
async def test_a_steady_token_runs_no_python():
    rig, ran = Rig(), []
    link = LegLink(RECORD, LimitOptions(), lambda _: None)
    assert link.open("decode", (b"{}",), pytest.fail) == 0
    link.relay(0, rig.lane(due=3))
    data = frame_of([(0, 3, 42, "a")])

    def note(frame, event, _argument):
        if event == "call":
            ran.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        link.data_received(data)
    finally:
        sys.setprofile(None)
    assert rig.received() == chunks_of(["a"])
    assert ran == []
    rig.close()
