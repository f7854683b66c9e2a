"""Whole frames, of which a link hears what lanes leave, and bytes that are none."""

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_rig import Rig, chunks_of

from neuron_di.wire import Parked, Token
from neuron_di.wire.leg_link import FrameReader, Told, encode_frame
from neuron_di_proxy.token_lane import IS_COMPILED, LinkReader, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")


class Link(LinkReader):
    """Keeps what does not go by lanes. `lanes` may be given as a dict."""

    def __init__(self, lanes=()):
        super().__init__(lambda: 1.0)
        self.lanes.update(lanes)
        self.came = []
        self.heard = []

    def frames_came(self, data):
        self.came.append(data)

    def hear_told(self, others, rest, failures):
        self.heard.append((others, rest, failures))


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def frame_of(tokens, events=()):
    return bytes(encode_frame(Told(list(tokens), list(events))))


def rest_of(told):
    return bytes(encode_frame(Told([], told.events, told.status))[4:])


PARKED = Parked(num_prompt=1)
PLAIN = [(7, 3, 42, 'say "hi"'), (8, 0, 43, "other")]


def test_a_frame_of_tokens_that_lanes_wait_for_is_taken_whole(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    link = Link(lanes)
    link.num_silent = 5
    link.data_received(frame_of(PLAIN))
    assert (link.came, link.heard, link.num_silent) == ([], [], 0)
    assert rig.received() == chunks_of(['say "hi"', "other"])
    assert rig.ids == [42, 43]


def test_no_token_waits_for_what_else_came_at_once(rig):
    """What is more than tokens takes longer than they do."""
    written_then = []

    class Looking(Link):
        def hear_told(self, others, rest, failures):
            super().hear_told(others, rest, failures)
            written_then.append(rig.received())

    told = [Told([(7, 3, 42, "a")], [(9, PARKED)]), Told([], [(7, PARKED)])]
    told.append(Told([(7, 4, 43, "b"), (8, 0, 44, "c")], []))
    link = Looking({7: rig.lane(due=3), 8: rig.lane()})
    link.data_received(b"".join(bytes(encode_frame(each)) for each in told))
    assert link.heard == [([], rest_of(each), []) for each in told[:2]]
    assert written_then == [chunks_of(["a", "b", "c"]), b""]


def test_within_a_leg_no_token_overtakes_another(rig):
    rich = Token(index=4, token_id=43, text="b")  # as one with log-probabilities comes
    told = [Told([(7, 3, 42, "a")], [(7, rich)]), Told([(7, 5, 44, "c")], [])]
    link = Link({7: rig.lane(due=3)})
    link.data_received(b"".join(bytes(encode_frame(each)) for each in told))
    assert rig.received() == chunks_of(["a"])
    assert link.heard == [([], rest_of(told[0]), []), (told[1].tokens, None, [])]


def test_the_tokens_of_a_frame_with_events_take_their_lanes_first(rig):
    told = Told([*PLAIN, (9, 0, 1, "of no lane")], [(7, PARKED)])
    link = Link({7: rig.lane(due=3), 8: rig.lane()})
    link.data_received(bytes(encode_frame(told)))
    assert rig.received() == chunks_of(['say "hi"', "other"])
    assert link.heard == [([(9, 0, 1, "of no lane")], rest_of(told), [])]
    assert link.came == []


def test_what_is_not_due_is_heard_and_closes_its_lane(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    link = Link(lanes)
    link.data_received(frame_of([(7, 3, 42, "due"), (8, 1, 43, "not due")]))
    link.data_received(frame_of([(8, 0, 44, "late")]))
    assert link.heard == [([(8, 1, 43, "not due")], None, []), ([(8, 0, 44, "late")], None, [])]
    assert rig.received() == chunks_of(["due"])


@pytest.mark.parametrize("payload", [b"\xc0", b"", b"\x91\x90"])
def test_a_frame_that_is_not_understood_is_all_rest(rig, payload):
    link = Link()
    link.data_received(frame_of([]) + len(payload).to_bytes(4, "big") + payload)
    assert (link.came, link.heard) == ([], [([], payload, [])])


def test_an_empty_frame_is_not_heard_but_says_that_the_worker_lives():
    link = Link()
    link.num_silent = 5
    link.data_received(frame_of([]) * 3)
    assert (link.came, link.heard, link.num_silent) == ([], [], 0)


def test_a_frame_without_a_status_element_is_taken_too(rig):
    data = frame_of(PLAIN)
    data = bytes((0, 0, 0, len(data) - 5, 0x92)) + data[5:-1]
    Link({7: rig.lane(due=3), 8: rig.lane()}).data_received(data)
    assert rig.received() == chunks_of(['say "hi"', "other"])


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0",
        frame_of(PLAIN)[:-1],
        frame_of(PLAIN) + b"\0",
        frame_of(PLAIN) + frame_of(PLAIN)[:-1],
        b"\xff" * 4 + frame_of(PLAIN),
        bytearray(frame_of(PLAIN)),
    ],
)
def test_what_is_not_whole_frames_is_the_protocols(rig, data):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    link = Link(lanes)
    link.num_silent = 5
    link.data_received(data)
    assert (link.came, link.heard, link.num_silent) == ([data], [], 0)
    assert rig.received() == b""
    assert rig.ids == []
    assert (lanes[7].due, lanes[8].due) == (3, 0)


def test_a_closed_lane_takes_none(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    lanes[8].close()
    link = Link(lanes)
    link.data_received(frame_of(PLAIN))
    assert link.heard == [(PLAIN[1:], None, [])]
    assert rig.received() == chunks_of(['say "hi"'])


def test_behind_some_of_a_frame_nothing_is_taken(rig):
    link = Link({7: rig.lane(due=3), 8: rig.lane()})
    link.has_partial = True
    link.data_received(frame_of(PLAIN))
    assert link.came == [frame_of(PLAIN)]
    assert rig.received() == b""


def test_what_closes_a_lane_meanwhile_gives_its_token_back(rig):
    lanes = {7: rig.lane(due=3), 8: rig.lane()}
    rig.outlet.close()
    outlet_of_7 = Rig(has_fd=False)
    lanes[7] = outlet_of_7.lane(due=3, write=lambda _: lanes[8].close())
    link = Link(lanes)
    link.data_received(frame_of(PLAIN))
    assert link.heard == [([PLAIN[1]], None, [])]
    outlet_of_7.close()


def test_a_failure_is_told(rig):
    def fail(_):
        raise OSError("lost")

    held = Rig(has_fd=False)
    lanes = {7: held.lane(due=3, write=fail), 8: rig.lane()}
    link = Link(lanes)
    link.data_received(frame_of(PLAIN))
    ((others, rest, ((number, error),)),) = link.heard
    assert (others, rest, number, str(error)) == ([], None, 7, "lost")
    assert rig.received() == chunks_of(["other"])
    held.close()


def test_what_the_protocol_raises_goes_to_the_transport(rig):
    class Broken(Link):
        def frames_came(self, data):
            raise OSError("lost")

        def hear_told(self, others, rest, failures):
            raise OSError("lost")

    for data in (b"x", frame_of(PLAIN)):
        with pytest.raises(OSError, match="lost"):
            Broken().data_received(data)
    link = Link({7: rig.lane(due=3), 8: rig.lane()})
    LinkReader.__init__(link, lambda: "no number")
    with pytest.raises(TypeError):
        link.data_received(frame_of(PLAIN))


def test_a_link_and_its_lanes_die_with_their_cycle(rig):
    link = Link({7: rig.lane(due=3), 8: rig.lane()})
    link.lanes[9] = rig.lane(write=link.frames_came)
    link.data_received(frame_of(PLAIN))
    dead = weakref.ref(link)
    del link
    gc.collect()
    assert dead() is None


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
            link = Link(lanes[0])
            link.data_received(data)
            others, _, failures = relay_told(payload, lanes[1], 1.0)
            assert link.came == []
            assert link.heard == ([(others, None, failures)] if others else [])
        assert rigs[0].received() == rigs[1].received()
        assert rigs[0].ids == rigs[1].ids
    finally:
        for rig in rigs:
            rig.close()
