"""Which tokens of a frame lanes take, what they count, and what they write."""

import gc
import sys
import tracemalloc
import weakref
from array import array
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lane_rig import BEFORE, BEHIND, BOUNDS, Rig, chunk_of, chunks_of, payload_of

from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.token_lane import IS_COMPILED, Outlet, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built: no compiler")


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def test_a_due_token_is_counted_and_written_as_one_chunk(rig):
    lane = rig.lane(due=3, last_s=9.5)
    assert relay_told(payload_of([(7, 3, 42, 'say "hi"\n')]), {7: lane}, 10.0) == ([], None, [])
    assert rig.received() == chunks_of(['say "hi"\n'])
    assert (lane.due, lane.last_s, rig.ids, rig.record.last_token_s) == (4, 10.0, [42], 10.0)
    assert rig.gaps.buckets()[-2:] == [("1.0", 1), ("+Inf", 1)]
    assert rig.gaps.total == 0.5
    assert (lane.take(), lane.take()) == (1, 0)
    assert (rig.events, rig.transport.written) == ([], [])
    assert rig.outlet.has_written


def test_a_request_record_knows_its_last_token(rig):
    record = RequestRecord(request_id="r", model="m")
    lane = rig.lane(record=record, ids=record.emitted)
    relay_told(payload_of([(0, 0, 5, "a"), (0, 1, 6, "b")]), {0: lane}, 12.25)
    assert (record.last_token_s, record.emitted) == (12.25, [5, 6])


def test_tokens_of_many_legs_are_told_apart(rig):
    lanes = {number: rig.lane() for number in (2, 1 << 61)}
    tokens = [
        (5, 0, 50, "nobody's"),
        (2, 0, 20, "a"),
        (1 << 61, 0, 30, "b"),
        (2, 1, 21, "c"),
        (6, 9, 60, "ü"),
    ]
    assert relay_told(payload_of(tokens), lanes, 1.0)[0] == [tokens[0], tokens[4]]
    assert rig.received() == chunks_of(["a", "b", "c"])
    assert rig.ids == [20, 30, 21]
    assert [lane.take() for lane in lanes.values()] == [2, 1]


@pytest.mark.parametrize("index", [0, 2, 4, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_wrong_index_closes_its_lane(rig, index):
    lane = rig.lane(due=3)
    tokens = [(7, index, 1, "wrong"), (7, 3, 2, "late")]
    assert relay_told(payload_of(tokens), {7: lane}, 1.0)[0] == tokens
    assert (rig.received(), rig.ids, lane.take(), lane.due) == (b"", [], 0, 3)


@pytest.mark.parametrize("due", [-1, -(1 << 63), (1 << 63) - 1])
def test_an_index_that_no_token_has_is_never_due(rig, due):
    tokens = [(7, due % (1 << 64), 1, "x")]
    assert relay_told(payload_of(tokens), {7: rig.lane(due=due)}, 1.0)[0] == tokens


def test_a_lane_waits_for_the_index_it_was_given(rig):
    lane = rig.lane(due=3)
    lane.due = 8
    assert relay_told(payload_of([(7, 8, 1, "x")]), {7: lane}, 1.0)[0] == []
    assert lane.due == 9


def test_a_closed_lane_takes_nothing_and_keeps_nothing_alive(rig):
    class Record:
        pass

    record = Record()
    dead = weakref.ref(record)
    lane = rig.lane(record=record)
    relay_told(payload_of([(7, 0, 1, "x")]), {7: lane}, 1.0)
    del record
    assert dead() is not None
    lane.close()
    lane.close()
    assert dead() is None
    assert relay_told(payload_of([(7, 1, 1, "y")]), {7: lane}, 1.0)[0] == [(7, 1, 1, "y")]
    assert (rig.received(), lane.take(), lane.last_s) == (chunks_of(["x"]), 1, 1.0)


def test_an_empty_text_is_counted_and_nothing_is_written(rig):
    lane = rig.lane()
    relay_told(payload_of([(7, 0, 1, ""), (7, 1, 2, "")]), {7: lane}, 1.0)
    assert (rig.received(), rig.events, rig.ids, lane.take()) == (b"", [], [1, 2], 2)
    assert not rig.outlet.has_written


def test_texts_are_escaped_as_msgspec_does(rig):
    points = [*range(0x900), 0x2028, 0x2029, 0xD7FF, 0xE000, 0xFEFF, 0xFFFF, 0x10000, 0x10FFFF]
    texts = [chr(point) for point in points]
    lane = rig.lane()
    for start in range(0, len(texts), 100):
        some = texts[start : start + 100]
        tokens = [(7, start + place, 1, text) for place, text in enumerate(some)]
        assert relay_told(payload_of(tokens), {7: lane}, 1.0)[0] == []
        assert rig.received() == chunks_of(some)


@given(st.text(max_size=3000))
def test_any_text_is_written_as_msgspec_does(text):
    rig = Rig()
    try:
        relay_told(payload_of([(7, 0, 1, text)]), {7: rig.lane()}, 1.0)
        assert rig.received() == chunks_of([text])
    finally:
        rig.close()


@pytest.mark.parametrize("num_around", [-1, 0, 1])
@pytest.mark.parametrize("size", [15, 16, 255, 256, 4095, 4096, 65535, 65536])
def test_a_chunk_says_its_size_whatever_number_that_is(rig, size, num_around):
    text = "x" * (size + num_around)
    relay_told(payload_of([(7, 0, 1, text)]), {7: rig.lane(before=b"", behind=b"")}, 1.0)
    assert rig.received() == chunk_of(b'"%b"' % text.encode())


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 2)), min_size=1, max_size=30))
def test_gaps_are_counted_as_the_histogram_counts(gaps):
    rig, expected = Rig(), Histogram(BOUNDS)
    try:
        lane, now_s = rig.lane(), 0.0
        for index, gap in enumerate(gaps):
            last_s, now_s = now_s, now_s + gap
            if last_s > 0:
                expected.observe(now_s - last_s)
            relay_told(payload_of([(7, index, 1, "")]), {7: lane}, now_s)
        assert rig.gaps.counts == expected.counts
        assert rig.gaps.sums == expected.sums
        assert rig.gaps.buckets() == expected.buckets()
    finally:
        rig.close()


class Refuses:
    """A request's record that takes no time."""

    __slots__ = ("reason",)

    def __init__(self, reason: Exception) -> None:
        self.reason = reason

    def __setattr__(self, name, value):
        if name == "last_token_s":
            raise self.reason
        object.__setattr__(self, name, value)


def test_failures_are_told_by_leg_and_keep_nobody_else_from_being_relayed(rig):
    errors = KeyError("first"), ValueError("second")
    lanes = {
        1: rig.lane(record=Refuses(errors[0])),
        2: rig.lane(record=Refuses(errors[1])),
        3: rig.lane(),
    }
    tokens = [(1, 0, 1, "a"), (2, 0, 2, "b"), (3, 0, 3, "c"), (1, 1, 4, "d"), (3, 1, 5, "e")]
    others, _, failures = relay_told(payload_of(tokens), lanes, 1.0)
    assert others == [tokens[3]]
    assert failures == [(1, errors[0]), (2, errors[1])]
    assert rig.received() == chunks_of(["c", "e"])
    tokens = [(1, 1, 1, "a"), (2, 1, 2, "b"), (3, 2, 6, "c")]
    assert relay_told(payload_of(tokens), lanes, 1.0)[0] == tokens[:2]


@pytest.mark.parametrize(
    "changed",
    [
        {"outlet": None},
        {"write": None},
        {"before": "text"},
        {"behind": bytearray()},
        {"ids": ()},
        {"due": 1 << 64},
        {"gaps": None},
        {"gaps": SimpleNamespace(bounds=array("d"), counts=array("q", [0]), sums=[0.0])},
        {"gaps": SimpleNamespace(bounds=array("d"), counts=array("q"), sums=array("d", [0]))},
        {"gaps": SimpleNamespace(bounds=array("d"), counts=array("d", [0]), sums=array("d", [0]))},
        {"gaps": SimpleNamespace(bounds=array("d"), counts=bytes(8), sums=array("d", [0]))},
    ],
)
def test_a_lane_is_not_made_of_anything(rig, changed):
    with pytest.raises((TypeError, ValueError, AttributeError, OverflowError, BufferError)):
        rig.lane(**changed)


def test_what_is_no_lane_no_dict_or_no_buffer_is_refused(rig):
    payload = payload_of([(7, 0, 1, "x")])
    for args in [(payload, {7: rig}, 1.0), (payload, [], 1.0), ("", {}, 1.0), (payload, {}, "")]:
        with pytest.raises(TypeError):
            relay_told(*args)
    with pytest.raises(TypeError):
        relay_told(payload, {})


def test_a_lane_and_all_it_holds_die_with_their_cycle(rig):
    class Reply:
        def write(self, event: bytes) -> None: ...

    class Transport:
        pass

    reply, transport = Reply(), Transport()
    transport.outlet = Outlet(rig.socket.fileno(), transport)
    reply.lane = rig.lane(outlet=transport.outlet, write=reply.write)
    relay_told(payload_of([(7, 0, 1, "x")]), {7: reply.lane}, 1.0)
    dead = weakref.ref(reply), weakref.ref(transport)
    del reply, transport
    gc.collect()
    assert [each() for each in dead] == [None, None]
    rig.gaps.counts.append(0)  # nobody holds the array's memory any more


def test_ten_thousand_frames_leave_nothing_behind():
    held = [Rig(), Rig(has_fd=False)]
    objects = [part for rig in held for part in (rig.outlet, rig.record, rig.gaps, rig.transport)]
    objects += [BEFORE, BEHIND]
    frames = [
        payload_of([(7, 0, 1 << 40, 'a "text" ' * 600), (8, 0, 1, "another's"), (7, 9, 3, "late")]),
        payload_of([(7, 0, 1, "x")])[:-3] + b"\xff\x90",
    ]

    def relay(num: int) -> None:
        for rig in held:
            for _ in range(num):
                for frame in frames:
                    relay_told(frame, {7: rig.lane()}, 1.0)
                refusing = rig.lane(record=Refuses(OSError("no")))
                assert relay_told(frames[0], {7: refusing}, 1.0)[2]
                rig.received()
                rig.ids.clear()
                rig.events.clear()

    relay(100)
    counts = [sys.getrefcount(each) for each in objects]
    gc.collect()
    tracemalloc.start()
    try:
        relay(100)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        relay(5000)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 10_000  # one byte each
    assert [sys.getrefcount(each) for each in objects] == counts
    for rig in held:
        rig.close()
