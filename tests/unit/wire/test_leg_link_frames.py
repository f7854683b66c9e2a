"""Frames of leg links: cut anywhere, bounded, and quiet about what they carry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_record import make_record

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire import Token, WorkerStatus
from neuron_di.wire.leg_link import (
    FROM_PROXY_BYTES_MAX,
    CloseLeg,
    FrameReader,
    OpenLeg,
    ProxyAlive,
    Told,
    encode_frame,
    from_proxy_decoder,
    told_decoder,
)

RECORD = make_record(
    state="draining", host="::1", connections=["d1"], reasoning=("<think>", "</think>")
)
STATUS = WorkerStatus(
    record=RECORD,
    num_blocks=4,
    num_blocks_free=3,
    num_waiting=0,
    num_running=1,
    num_transferring=2,
    num_steps=1 << 40,
    is_stuck=True,
    has_failed=True,
)
MESSAGES = [OpenLeg(7, "decode", b"\0{}\xff"), CloseLeg(1 << 40), ProxyAlive()]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_comes_back(message):
    (payload,) = FrameReader(1000).feed(bytes(encode_frame(message)))
    assert from_proxy_decoder.decode(payload) == message


def test_what_legs_say_comes_back():
    told = Told([(1, 0, 5, "é"), (2, 7, 9, "")], [(1, Token(index=1, token_id=3, text="x"))])
    (payload,) = FrameReader(1000).feed(bytes(encode_frame(told)))
    assert told_decoder.decode(payload) == told


def test_how_a_worker_is_comes_back():
    told = Told([], [], STATUS)
    (payload,) = FrameReader(10_000).feed(bytes(encode_frame(told)))
    assert told_decoder.decode(payload) == told
    assert len(encode_frame(Told([], []))) == 4 + 4  # nothing of it: one byte


def test_a_frame_of_a_worker_that_never_says_how_it_is():
    assert told_decoder.decode(b"\x92\x90\x90") == Told([], [])


def test_a_status_that_is_none_is_refused():
    for raw in (b"\x93\x90\x90\x01", b"\x93\x90\x90\x80"):
        with pytest.raises(RemoteProtocolError):
            told_decoder.decode(raw)


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(0, 400)))
def test_frames_are_the_same_however_the_bytes_are_cut(payloads, cuts):
    raw = b"".join(len(each).to_bytes(4, "big") + each for each in payloads)
    cuts = sorted(min(cut, len(raw)) for cut in cuts)
    reader = FrameReader(40)
    read = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        read += [bytes(each) for each in reader.feed(raw[start:end])]
    assert read == payloads


@given(st.binary(min_size=4, max_size=30))
def test_any_bytes_are_read_or_refused(raw):
    reader = FrameReader(FROM_PROXY_BYTES_MAX)
    try:
        for payload in reader.feed(raw):
            from_proxy_decoder.decode(payload)
    except RemoteProtocolError:
        pass
    else:
        assert int.from_bytes(raw[:4], "big") <= FROM_PROXY_BYTES_MAX


def test_a_frame_that_is_too_large_is_refused_by_its_length():
    with pytest.raises(RemoteProtocolError, match="41 bytes"):
        FrameReader(40).feed((41).to_bytes(4, "big"))
    (payload,) = FrameReader(40).feed((40).to_bytes(4, "big") + b"x" * 40)
    assert bytes(payload) == b"x" * 40


def test_a_large_frame_is_copied_a_bounded_number_of_times(monkeypatch):
    """Each byte of a frame that comes in small pieces is kept once and taken out once."""
    reader = FrameReader(1 << 24)
    raw = (1 << 22).to_bytes(4, "big") + bytes(1 << 22)
    appended = 0

    class Counting(bytearray):
        def __iadd__(self, other):
            nonlocal appended
            appended += len(other)
            return super().__iadd__(other)

    reader.partial = Counting()
    payloads = []
    for start in range(0, len(raw), 1000):
        payloads += reader.feed(raw[start : start + 1000])
    assert [len(each) for each in payloads] == [1 << 22]
    assert appended == len(raw)


def test_neither_prompts_nor_tokens_show_in_a_log():
    shown = repr(OpenLeg(1, "whole", b"a secret")) + repr(Told([(0, 0, 4711, "a secret")], []))
    assert "secret" not in shown
    assert "4711" not in shown
