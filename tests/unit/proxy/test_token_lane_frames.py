"""Which frames are understood: never one that msgspec would not read."""

import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_rig import Rig, chunks_of, payload_of, tokens_in

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire import Parked
from neuron_di.wire.leg_link import Told, encode_frame, told_decoder
from neuron_di_proxy.token_lane import IS_COMPILED, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built: no compiler")

GOOD = b"\x94\x07\x00\x01\xa1x"

plain_tokens = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 1 << 40), st.text(max_size=40)),
    max_size=20,
)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


def test_the_rest_is_what_a_frame_says_beside_its_tokens(rig):
    payload = payload_of([(1, 0, 2, "x" * 300)], events=b"anything")
    for head in (b"\x92", b"\x93"):
        taken = relay_told(head + payload[1:], {}, 1.0)
        assert taken == ([(1, 0, 2, "x" * 300)], head + b"\x90anything", [])


@pytest.mark.parametrize("told", [b"\x92\x90\x90", b"\x93\x90\x90\xc0"])
def test_where_nothing_is_said_beside_tokens_there_is_no_rest(rig, told):
    assert relay_told(told, {}, 1.0) == ([], None, [])
    for more in (b"\xc0", b"\x90", b"\0"):
        assert relay_told(told + more, {}, 1.0) == ([], told + more, [])


def every_width(value: int) -> list[bytes]:
    """All that msgpack has for a small number."""
    formats = [">BB", ">BH", ">BI", ">BQ"]
    wide = [struct.pack(form, 0xCC + place, value) for place, form in enumerate(formats)]
    return [bytes([value]), *wide]


def test_every_width_of_number_text_and_array_is_read(rig):
    heads = {
        "token": [b"\x94", b"\xdc\x00\x04", b"\xdd\x00\x00\x00\x04"],
        "list": [b"\x91", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01"],
        "told": [b"\x92", b"\x93"],  # how a frame itself begins is written in one way only
        "text": [b"\xa2", b"\xd9\x02", b"\xda\x00\x02", b"\xdb\x00\x00\x00\x02"],
    }
    num = 0
    for token, tokens, told, text in itertools.product(*heads.values()):
        for number, index, token_id in zip(
            every_width(7), every_width(3), reversed(every_width(9)), strict=True
        ):
            written = told + tokens + token + number + index + token_id + text + b"hi"
            lane = rig.lane(due=3)
            end = b"\x90" if told == b"\x92" else b"\x90\xc0"
            assert relay_told(written + end, {7: lane}, 1.0) == ([], None, [])
            assert rig.received() == chunks_of(["hi"])
            num += 1
    assert rig.ids == [9] * num


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x92",
        b"\x92\x90",  # no events
        b"\xdc\x00\x02\x91" + GOOD + b"\x90",  # msgspec reads it
        b"\x91\x91" + GOOD,
        b"\x94\x91" + GOOD + b"\x90\x90\x90",
        b"\x82\x91" + GOOD + b"\x90",
        b"\x92\x92" + GOOD + b"\x90",
        b"\x92\x92" + GOOD + b"\x93\x08\x00\x01\x90",
        b"\x92\x92" + GOOD + b"\x95\x08\x00\x01\xa1x\x00\x90",
        b"\x92\x92" + GOOD + b"\x94\x08\x00\xff\xa1x\x90",  # a negative number
        b"\x92\x92" + GOOD + b"\x94\x08\x00\xd0\x01\xa1x\x90",  # a signed one
        b"\x92\x92" + GOOD + b"\x94\x08\x00\xc0\xa1x\x90",
        b"\x92\x92" + GOOD + b"\x94\x08\x00\xcb" + bytes(8) + b"\xa1x\x90",
        b"\x92\x92" + GOOD + b"\x94\x08\x00\x01\xc4\x01x\x90",  # bytes
        b"\x92\x92" + GOOD + b"\x94\x08\x00\x01\xdb\xff\xff\xff\xffx\x90",
        b"\x92\xdd\xff\xff\xff\xff" + GOOD * 3,
        b"\x92\x92" + GOOD + b"\x94\x08\x00\x01\xa1\xff\x90",
    ],
)
def test_of_an_irregular_frame_nothing_is_taken(rig, payload):
    lane = rig.lane()
    assert relay_told(payload, {7: lane}, 1.0) == ([], payload, [])
    assert (rig.received(), rig.ids, lane.due, lane.take()) == (b"", [], 0, 0)
    assert relay_told(b"\x92\x91" + GOOD + b"\x90", {7: lane}, 1.0) == ([], None, [])


def test_a_frame_that_is_cut_anywhere_before_its_events_is_irregular(rig):
    payload = payload_of([(7, 0, 1 << 20, "some text"), (8, 300, 1 << 40, "ünï" * 50)])
    for end in range(len(payload) - 1):
        taken = relay_told(memoryview(payload)[:end], {7: rig.lane()}, 1.0)
        assert taken == ([], payload[:end], [])
    assert rig.ids == []


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(b"\x92\x91\x94".__add__)))
@settings(max_examples=500)
def test_whatever_is_taken_of_random_bytes_msgspec_reads_too(payload):
    check_against_msgspec(payload)


@given(plain_tokens, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3))
@settings(max_examples=1000)
def test_whatever_is_taken_of_a_damaged_frame_msgspec_reads_too(tokens, damages):
    payload = bytearray(payload_of(tokens))
    for place, byte in damages:
        payload[place % len(payload)] = byte
    check_against_msgspec(bytes(payload), must_take=not damages)


def check_against_msgspec(payload: bytes, *, must_take: bool = False) -> None:
    rig = Rig()
    try:
        lanes = {number: rig.lane() for number in range(4)}
        others, rest, _ = relay_told(payload, lanes, 1.0)
        if rest == payload:  # or of no tokens
            assert not must_take or payload.startswith(b"\x92\x90")
            assert (rig.received(), rig.ids, others) == (b"", [], [])
            return
        num_behind = (1 if payload[0] == 0x92 else 2) if rest is None else len(rest) - 2
        tokens = tokens_in(b"\x92" + payload[1 : len(payload) - num_behind] + b"\x90")
        due = dict.fromkeys(lanes, 0)
        for token in tokens:  # by the rules
            number, index, token_id, _ = token
            if due.get(number) == index:
                due[number] += 1
                assert rig.ids.pop(0) == token_id
            else:
                due.pop(number, None)
                assert others.pop(0) == token
        assert (others, rig.ids) == ([], [])
    finally:
        rig.close()


def test_a_text_is_taken_if_and_only_if_it_is_strict_utf8():
    edges = bytes.fromhex("00 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 ed ef f0 f4 f5 ff")
    num_valid = 0
    for size in range(1, 5):
        choice = range(256) if size < 3 else edges
        for text in itertools.product(choice, repeat=size):
            raw = bytes(text)
            taken = relay_told(b"\x92\x91\x94\x01\x02\x03%c%b\x90" % (0xA0 + size, raw), {}, 1.0)
            try:
                valid = raw.decode()
            except UnicodeDecodeError:
                assert taken[::2] == ([], []), raw
                assert taken[1] is not None, raw
            else:
                assert taken == ([(1, 2, 3, valid)], None, []), raw
                num_valid += 1
    assert num_valid > 128 * 128
    with pytest.raises(RemoteProtocolError):
        tokens_in(b"\x92\x91\x94\x01\x02\x03\xa3\xed\xa0\x80\x90")


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.builds(Parked, num_prompt=st.integers(0, 5))))


@settings(max_examples=800, deadline=None)
@given(plain_tokens, EVENTS, st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255))))
def test_a_whole_frame_is_read_as_msgspec_reads_it_or_refused_as_it_refuses(
    tokens, events, damages
):
    payload = bytearray(encode_frame(Told(tokens, events)))[4:]
    for place, byte in damages:
        payload[place % len(payload)] = byte
    taken, rest, _ = relay_told(payload, {}, 1.0)
    assert damages or taken == tokens
    try:
        told = told_decoder.decode(bytes(payload))
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError):
            told_decoder.decode(rest)
        return
    behind = Told([], []) if rest is None else told_decoder.decode(rest)
    assert not (taken and behind.tokens)
    said = (taken or behind.tokens, behind.events, behind.status)
    assert said == (told.tokens, told.events, told.status)


@pytest.mark.parametrize("payload", [b"\x93\x90\x90", b"\x92\x90\x90\xc0"])
def test_one_element_too_few_or_too_many_is_refused(payload):
    with pytest.raises(RemoteProtocolError):
        told_decoder.decode(payload)
    assert relay_told(payload, {}, 1.0)[1] == payload
