import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.errors import RemoteProtocolError
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Abort,
    Done,
    FromDecode,
    FromPrefill,
    Handshake,
    Hold,
    KvMap,
    KvMapInit,
    LayerReady,
    LayoutFields,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    Offer,
    Ping,
    Pong,
    Pull,
    PullLayer,
    Ready,
    Refused,
    ShmRegion,
    Welcome,
    encode_msgpack,
    from_decode_decoder,
    from_prefill_decoder,
)
from neuron_di.wire.codec import SIGNAL_BYTES_MAX

R = RequestId("r")
REGION = ShmRegion(
    pid=7,
    fd=3,
    incarnation=Incarnation("i"),
    num_blocks=5,
)
LAYOUT = LayoutFields(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
OFFERS = [Offer.of("shm", REGION), Offer(engine="warp", region=msgspec.Raw(b"\xc0"))]
READY = Ready(
    request_id=R,
    attempt=2,
    worker_id=WorkerId("p"),
    incarnation=Incarnation("i"),
    layout_digest="l",
    prompt_ids=[11, 22],
    generated=[33],
    block_ids=[4],
    generations=[2**63],
    digests=[2**64 - 1],
    num_tokens=2,
)
ABORT = Abort(request_id=R, attempt=0, reason="why")
FROM_DECODE = [
    Handshake(
        version=SIGNAL_VERSION,
        worker_id=WorkerId("w"),
        incarnation=Incarnation("a"),
        expects=Incarnation("b"),
        model_digest="m",
        layout_digest="l",
    ),
    KvMapInit(layout=LAYOUT, offers=OFFERS),
    LookupAll(request_id=R, attempt=0, streams=True),
    PullLayer(request_id=R, attempt=0, piece=3, engine="tcp"),
    Hold(request_id=R, attempt=0),
    Pull(request_id=R, attempt=0, engine="shm", block_ids=[1, 2], num_held=1),
    Done(request_id=R, attempt=0, engine="shm", form="direct", kv_bytes=4096, transfer_s=0.5),
    ABORT,
    Ping(sequence=1),
]
FROM_PREFILL = [
    Welcome(status="ok", timestamp=1.5, worker_id=WorkerId("w"), incarnation=Incarnation("i")),
    Refused(reason="why", is_stale=True),
    KvMap(layout=LAYOUT, offers=OFFERS),
    NotYet(request_id=R, attempt=0),
    Never(request_id=R, attempt=0, reason="why"),
    LayerReady(
        request_id=R,
        attempt=0,
        piece=3,
        layer=1,
        first_block=2,
        block_ids=[7, 4],
        generations=[0, 5],
        num_blocks=4,
    ),
    READY,
    Pong(sequence=1),
    Malformed(reason="why"),
]


@pytest.mark.parametrize("message", FROM_DECODE, ids=lambda message: type(message).__name__)
def test_what_decode_says_comes_back_equal(message):
    assert from_decode_decoder.decode(encode_msgpack(message)) == message


@pytest.mark.parametrize("message", FROM_PREFILL, ids=lambda message: type(message).__name__)
def test_what_prefill_says_comes_back_equal(message):
    assert from_prefill_decoder.decode(encode_msgpack(message)) == message


def test_every_kind_of_message_is_in_these_tests():
    assert {type(message) for message in FROM_DECODE} == set(FromDecode.__args__)
    assert {type(message) for message in FROM_PREFILL} == set(FromPrefill.__args__)


@pytest.mark.parametrize("decoder", [from_decode_decoder, from_prefill_decoder])
def test_what_is_said_of_a_bad_message_does_not_repeat_it(decoder):
    with pytest.raises(RemoteProtocolError) as refused:
        decoder.decode(msgspec.msgpack.encode({"type": "x" * 1_000_000}))
    assert len(refused.value.message) < 300


def test_a_message_of_the_other_direction_is_refused():
    with pytest.raises(RemoteProtocolError):
        from_decode_decoder.decode(encode_msgpack(READY))
    with pytest.raises(RemoteProtocolError):
        from_prefill_decoder.decode(encode_msgpack(Ping(sequence=1)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": "lookup_all"},
        {"type": "lookup_all", "request_id": 1, "attempt": 0},
        {"type": "lookup_all", "request_id": "r", "attempt": "0"},
        {"type": "lookup_all", "request_id": "r", "attempt": 0.5},
        {"type": "lookup_all", "request_id": "r", "attempt": None},
        {"type": "pull", "request_id": "r", "attempt": 0, "block_ids": ["1"]},
        {"type": "lookup_all", "request_id": "", "attempt": 0},
        {"type": "lookup_all", "request_id": "r" * 129, "attempt": 0},
        {"type": "lookup_all", "request_id": "r", "attempt": -1},
        {"type": "lookup_all", "request_id": "r", "attempt": 1001},
        {"type": "abort", "request_id": "r", "attempt": 0, "reason": "long" * 1000},
        {"type": "done", "request_id": "r", "attempt": 0, "kv_bytes": -1, "transfer_s": 0.0},
        {"type": "done", "request_id": "r", "attempt": 0, "kv_bytes": 1, "transfer_s": math.nan},
        {"type": "done", "request_id": "r", "attempt": 0, "kv_bytes": 1, "transfer_s": math.inf},
        {"type": "done", "request_id": "r", "attempt": 0, "kv_bytes": 1, "transfer_s": -1.0},
        {"type": "format_disk", "request_id": "r", "attempt": 0},
        {"type": 7},
        [1, 2],
        "lookup_all",
        None,
    ],
)
def test_a_wrong_type_is_refused(fields):
    with pytest.raises(RemoteProtocolError):
        from_decode_decoder.decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("name", ["", "a b", "\x1b" * 64, "\u00fc", "a" * 65, "a\n"])
def test_a_name_that_no_worker_can_have_is_refused(name):
    """256 of 128 characters would be too many for the record of who hears them."""
    handshake = msgspec.structs.replace(FROM_DECODE[0], worker_id=WorkerId(name))
    with pytest.raises(RemoteProtocolError):
        from_decode_decoder.decode(encode_msgpack(handshake))


def test_an_unknown_field_is_ignored_so_that_a_message_may_grow():
    fields = {"type": "ping", "sequence": 4, "colour": "blue"}
    assert from_decode_decoder.decode(msgspec.msgpack.encode(fields)) == Ping(sequence=4)


def test_deep_nesting_is_refused():
    with pytest.raises(RemoteProtocolError):
        from_decode_decoder.decode(b"\x81\xa1x" * 100_000 + b"\xc0")


def test_size_is_limited_before_anything_is_decoded():
    whole = encode_msgpack(Ping(sequence=1))
    with pytest.raises(RemoteProtocolError, match=f"{SIGNAL_BYTES_MAX}"):
        from_decode_decoder.decode(whole + bytes(SIGNAL_BYTES_MAX))


def test_ready_of_a_million_tokens_is_within_the_limit():
    num_tokens = 1 << 20
    ready = msgspec.structs.replace(
        READY,
        prompt_ids=[200_000] * num_tokens,
        block_ids=[100_000] * (num_tokens // 16),
        generations=[2**20] * (num_tokens // 16),
        digests=[2**64 - 1] * (num_tokens // 16),
    )
    assert from_prefill_decoder.decode(encode_msgpack(ready)) == ready


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_decoded_or_refused(raw):
    for decoder in (from_decode_decoder, from_prefill_decoder):
        try:
            message = decoder.decode(raw)
        except RemoteProtocolError:
            continue
        assert type(message) in {*FromDecode.__args__, *FromPrefill.__args__}


@given(st.data())
def test_a_damaged_message_is_decoded_or_refused(data):
    raw = bytearray(encode_msgpack(data.draw(st.sampled_from(FROM_DECODE))))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = from_decode_decoder.decode(bytes(raw))
    except RemoteProtocolError:
        return
    assert isinstance(message, FromDecode)


def test_repr_of_ready_names_the_request_and_hides_its_tokens():
    assert repr(READY) == "Ready(request_id='r', attempt=2)"
