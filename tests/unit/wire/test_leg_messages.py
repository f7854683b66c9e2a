import msgspec
import pytest
from worker_record import make_record

from neuron_di.errors import BadRequest, RemoteProtocolError
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di.wire import (
    EVENT_BYTES_MAX,
    REASON_CHARS_MAX,
    RECORD_BYTES_MAX,
    DecodeLeg,
    Failed,
    Finished,
    LegEvent,
    LegReceipt,
    Parked,
    PeerAddress,
    PrefillLeg,
    Released,
    SamplingParams,
    Token,
    TokenLogprob,
    TokenLogprobs,
    WorkerStatus,
    decode_leg_decoder,
    encode_json,
    encode_msgpack,
    leg_event_decoder,
    prefill_leg_decoder,
    record_decoder,
    status_decoder,
)
from neuron_di.wire.leg_link import Told, told_decoder
from neuron_di.worker.leg_report import failed

RECEIPT = LegReceipt(worker_id=WorkerId("p"), role="prefill", pid=3, prefill_s=0.25, link="shm")
LOGPROB = TokenLogprob(text="\ufffd", logprob=-0.5, token_bytes=[0xE2, 0x82], token_id=5)
EVENTS = [
    Token(index=0, token_id=5, text="é\n", logprobs=TokenLogprobs(LOGPROB, [LOGPROB])),
    Token(index=1, token_id=6, text=""),
    Parked(num_prompt=9),
    Released(receipt=RECEIPT),
    Finished(reason="stop", num_prompt=9, num_generated=2, receipt=RECEIPT, text="x", stop="\n"),
    Finished(reason="stop", num_prompt=9, num_generated=2, receipt=RECEIPT, stop=7),
    Finished(reason="length", num_prompt=9, num_generated=2, receipt=RECEIPT),
    Released(receipt=msgspec.structs.replace(RECEIPT, link_reason='tcp: "gone"; shm: chosen')),
    Failed(code="c", message="m", http_status=502, retryable=True, param="prompt"),
    Failed(code="c", message="m", http_status=502, retryable=True, fault="peer"),
]
PREFILL_LEG = PrefillLeg(
    request_id=RequestId("r"),
    attempt=1,
    endpoint="chat",
    prompt=msgspec.Raw(b'[{"role":"user","content":"hi \\ud83d\\ude00"}]'),
    sampling=SamplingParams(stop=("a",), stop_token_ids=(3,), logprobs=2, max_tokens=None),
    timeout_s=12.5,
    emitted=(7, 9),
    cache_scope="alice",
)
DECODE_LEG = DecodeLeg(
    request_id=RequestId("r"),
    attempt=1,
    sampling=SamplingParams(seed=2**60),
    prefill=PeerAddress(
        worker_id=WorkerId("p"),
        incarnation=Incarnation("i"),
        signal_host="::1",
        signal_port=5000,
    ),
    timeout_s=12.5,
    num_emitted=2,
)
RECORD = make_record(8001, host="::1", signal_host="::1", signal_port=5000)
STATUS = WorkerStatus(
    record=RECORD,
    num_blocks=4,
    num_blocks_free=3,
    num_waiting=0,
    num_running=1,
    num_transferring=0,
    num_steps=9,
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_equal_on_one_line(event):
    raw = encode_json(event)
    assert b"\n" not in raw
    assert leg_event_decoder.decode(raw) == event


def test_every_kind_of_event_is_in_these_tests():
    assert {type(event) for event in EVENTS} == set(LegEvent.__args__)


def test_a_prefill_leg_comes_back_with_the_clients_own_bytes():
    back = prefill_leg_decoder.decode(encode_json(PREFILL_LEG))
    assert bytes(back.prompt) == bytes(PREFILL_LEG.prompt)
    assert msgspec.structs.replace(back, prompt=PREFILL_LEG.prompt) == PREFILL_LEG


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout_s": 0},
        {"timeout_s": -1.0},
        {"timeout_s": 86_401},
        {"timeout_s": None},
        {"attempt": -1},
        {"attempt": 1001},
        {"request_id": ""},
        {"request_id": "r" * 129},
        {"emitted": ["7"]},
        {"cache_scope": "s" * 65},
        {"cache_scope": None},
        {"num_emitted": 0.5},
    ],
    ids=str,
)
def test_a_leg_out_of_bounds_is_refused(fields):
    for decoder, leg in ((prefill_leg_decoder, PREFILL_LEG), (decode_leg_decoder, DECODE_LEG)):
        (name,) = fields
        body = msgspec.json.decode(encode_json(leg))
        if name in ("emitted", "cache_scope", "num_emitted") and name not in body:
            continue
        with pytest.raises(RemoteProtocolError, match=name):
            decoder.decode(msgspec.json.encode(body | fields))


def test_a_leg_without_a_deadline_is_refused():
    for decoder, leg in ((prefill_leg_decoder, PREFILL_LEG), (decode_leg_decoder, DECODE_LEG)):
        body = msgspec.json.decode(encode_json(leg))
        del body["timeout_s"]
        with pytest.raises(RemoteProtocolError, match="timeout_s"):
            decoder.decode(msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [(decode_leg_decoder, DECODE_LEG), (record_decoder, RECORD), (status_decoder, STATUS)],
)
def test_the_others_come_back_equal(decoder, message):
    assert decoder.decode(encode_json(message)) == message


@pytest.mark.parametrize("name", ["num_blocks", "num_legs", "num_steps", "kv_bytes_received"])
def test_a_status_has_counts_that_a_metric_can_show(name):
    large = msgspec.structs.replace(STATUS, **{name: (1 << 63) - 1})
    assert status_decoder.decode(encode_json(large)) == large
    digits = b"%d" % ((1 << 63) - 1)
    with pytest.raises(RemoteProtocolError, match=name):
        status_decoder.decode(encode_json(large).replace(digits, b"9" * 400))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"type":"token"}',
        b'{"type":"token","index":"0","token_id":1,"text":""}',
        b'{"type":"token","index":0,"token_id":1,"text":"\xff"}',
        b'{"type":"unknown"}',
        b'{"type":"finished","reason":"bored","num_prompt":1,"num_generated":1}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_event_is_refused(raw):
    with pytest.raises(RemoteProtocolError):
        leg_event_decoder.decode(raw)


@pytest.mark.parametrize(
    "event",
    [
        Failed(code="c", message="m", http_status=200, retryable=False),
        Failed(code="c", message="m", http_status=-1, retryable=False),
        Parked(num_prompt=-1),
        Parked(num_prompt=9, num_cached=-1),
        Finished(reason="stop", num_prompt=-9, num_generated=2, receipt=RECEIPT),
        Finished(reason="stop", num_prompt=9, num_generated=1 << 60, receipt=RECEIPT),
        Released(receipt=msgspec.structs.replace(RECEIPT, kv_bytes=-1)),
        *(
            Released(receipt=msgspec.structs.replace(RECEIPT, **{name: seconds}))
            for name in ("queued_s", "prefill_s", "decode_s", "verify_s", "transfer_s")
            for seconds in (-0.1, float("nan"), float("inf"))
        ),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_before_it_is_counted_or_told(event):
    with pytest.raises(RemoteProtocolError):
        told_decoder.decode(encode_msgpack(Told([], [(0, event)])))


def test_what_a_worker_says_of_an_error_has_an_end():
    long = failed(BadRequest("x" * (REASON_CHARS_MAX + 1)))
    assert len(long.message) == REASON_CHARS_MAX
    assert leg_event_decoder.decode(encode_json(long)) == long
    for changes in ({"message": long.message + "x"}, {"code": "c" * 65}):
        event = msgspec.structs.replace(long, **changes)
        with pytest.raises(RemoteProtocolError):
            told_decoder.decode(encode_msgpack(Told([], [(0, event)])))


def test_an_unknown_field_is_ignored_so_that_an_event_may_grow():
    raw = b'{"type":"parked","num_prompt":3,"colour":"blue"}'
    assert leg_event_decoder.decode(raw) == Parked(num_prompt=3)


def test_size_is_limited():
    for decoder, limit in (
        (leg_event_decoder, EVENT_BYTES_MAX),
        (record_decoder, RECORD_BYTES_MAX),
    ):
        with pytest.raises(RemoteProtocolError, match=str(limit)):
            decoder.decode(b" " * (limit + 1))


def test_repr_of_a_token_hides_what_it_says():
    assert repr(EVENTS[0]) == "Token(index=0)"


def test_a_record_brackets_an_ipv6_host_in_its_url_only():
    assert RECORD.url() == "http://[::1]:8001"
    assert RECORD.key() == "/workers/prefill/::1/8001"
    address = RECORD.peer_address()
    assert (address.signal_host, address.signal_port) == ("::1", 5000)
