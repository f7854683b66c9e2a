"""Frames that lanes take whole, and those that are left to be looked at more closely."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_rig import Rig, chunks_of

from neuron_di.wire import Parked
from neuron_di.wire.leg_link import FrameReader, Told, encode_frame
from neuron_di_proxy.token_lane import IS_COMPILED, relay_frame, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def frame_of(tokens, events=()):
    return bytes(encode_frame(Told(list(tokens), list(events))))


PLAIN = [(7, 3, 42, 'say "hi"'), (8, 0, 43, "other")]


def test_a_frame_of_tokens_that_lanes_wait_for_is_taken_whole(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    data = frame_of(PLAIN)
    assert relay_frame(data, lanes, 1.0) == ([], len(data), [])
    assert rig.received() == chunks_of(['say "hi"', "other"])
    assert rig.ids == [42, 43]


def test_a_frame_without_a_status_element_is_taken_too(rig):
    data = frame_of(PLAIN)
    data = bytes((0, 0, 0, len(data) - 5, 0x92)) + data[5:-1]
    assert relay_frame(data, {7: rig.lane(due=3), 8: rig.lane()}, 1.0) is not None
    assert rig.received() == chunks_of(['say "hi"', "other"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        frame_of(PLAIN)[:-1],
        frame_of(PLAIN) + b"\0",
        frame_of(PLAIN) * 2,
        frame_of(PLAIN, [(7, Parked(num_prompt=1))]),
        frame_of([*PLAIN, (9, 0, 1, "of no lane")]),
        frame_of([*PLAIN, (7, 4, 1, "a second one of its leg")]),
        frame_of([(7, 3, 42, "due"), (8, 1, 43, "not due")]),
        frame_of(PLAIN)[:-1] + b"\xc3",
        b"\0\0\0\1\xc0",
    ],
)
def test_of_any_other_nothing_is_taken(rig, data):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    assert relay_frame(data, lanes, 1.0) is None
    assert rig.received() == b""
    assert rig.ids == []
    assert (lanes[7].due, lanes[8].due) == (3, 0)


def test_a_closed_lane_takes_none(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    lanes[8].close()
    assert relay_frame(frame_of(PLAIN), lanes, 1.0) is None
    assert rig.received() == b""


def test_what_closes_a_lane_meanwhile_gives_its_token_back(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    rig.outlet.close()
    outlet_of_7 = Rig(has_fd=False)
    lanes[7] = outlet_of_7.lane(due=3, write=lambda _: lanes[8].close())
    others, _, failures = relay_frame(frame_of(PLAIN), lanes, 1.0)
    assert (others, failures) == ([PLAIN[1]], [])
    outlet_of_7.close()


def test_a_failure_is_told(rig):
    def fail(_):
        raise OSError("lost")

    held = Rig(has_fd=False)
    lanes = {7: held.lane(due=3, write=fail), 8: rig.lane()}
    others, _, ((number, error),) = relay_frame(frame_of(PLAIN), lanes, 1.0)
    assert (others, number, str(error)) == ([], 7, "lost")
    assert rig.received() == chunks_of(["other"])
    held.close()


@pytest.mark.parametrize(
    "arguments", [(bytearray(b"x"), {}, 1.0), (b"x", [], 1.0), (b"x", {}, 1), (b"x", {})]
)
def test_other_arguments_are_refused(arguments):
    with pytest.raises(TypeError):
        relay_frame(*arguments)


NUMBERS = st.integers(0, 3)
TOKENS = st.lists(st.tuples(NUMBERS, st.integers(0, 2), st.integers(0, 9), st.text(max_size=5)))


@settings(max_examples=500, deadline=None)
@given(st.lists(TOKENS, max_size=4))
def test_the_same_is_relayed_as_by_the_general_way(frames):
    rigs = Rig(), Rig()
    try:
        lanes = [{number: rig.lane() for number in range(3)} for rig in rigs]
        for tokens in frames:
            data = frame_of(tokens)
            (payload,) = FrameReader(1 << 20).feed(data)
            quick = relay_frame(data, lanes[0], 1.0)
            if quick is None:
                quick = relay_told(payload, lanes[0], 1.0)
            general = relay_told(payload, lanes[1], 1.0)
            assert (quick[0], quick[2]) == (general[0], general[2])
        assert rigs[0].received() == rigs[1].received()
        assert rigs[0].ids == rigs[1].ids
    finally:
        for rig in rigs:
            rig.close()
