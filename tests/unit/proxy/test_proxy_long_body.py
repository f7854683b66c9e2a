"""Long bodies: the pieces they come in, and what is not copied of them."""

import json
import random
import tracemalloc

import msgspec
import pytest

from neuron_di.errors import BadRequest
from neuron_di.wire import DecodeLeg, PrefillLeg, PromptOptions, SamplingParams, encode_json
from neuron_di.wire.legs import PeerAddress
from neuron_di_proxy.json_object import read_body
from neuron_di_proxy.leg_link import LONG_PROMPT_BYTES, document_of
from neuron_di_proxy.request_body import BodyPieces, ChunkedBody, SizedBody

LONG = 400_000
BODY = random.Random(1).randbytes(LONG)


def cut(data, sizes):
    """`data` in pieces whose sizes are drawn from `sizes`."""
    rng, at = random.Random(2), 0
    while at < len(data):
        size = rng.choice(sizes)
        yield data[at : at + size]
        at += size


@pytest.mark.parametrize("sizes", [(1,), (1, 4096, 4097), (1448, 65536), (256_000,), (LONG,)])
def test_a_body_is_what_came_however_it_was_cut(sizes):
    at_once, received, behind, bodies = SizedBody(LONG), bytearray(), b"", []
    gathered = SizedBody(LONG)
    for piece in cut(BODY, sizes):
        behind += at_once.add(piece if len(piece) < LONG else piece + b"POST")
        received += piece
        bodies += [at_once.whole(), gathered.take(received)]
        assert not received
    assert bodies[-2:] == [BODY, BODY]
    assert not any(bodies[:-2])
    assert behind == (b"POST" if sizes == (LONG,) else b"")


def test_what_follows_a_body_stays():
    body, received = SizedBody(5), bytearray(b"12345POST")
    assert body.take(received) == b"12345"
    assert received == b"POST"


def test_a_length_alone_takes_no_memory():
    tracemalloc.start()
    bodies = [SizedBody(16 << 20) for _ in range(100)]
    assert tracemalloc.get_traced_memory()[0] < 100 * 1024
    tracemalloc.stop()
    assert all(body.whole() is None for body in bodies)


def test_tiny_pieces_take_little_more_than_their_bytes():
    tracemalloc.start()
    pieces = BodyPieces()
    for piece in cut(BODY, (3,)):
        pieces.add(piece)
    assert tracemalloc.get_traced_memory()[0] < 1.3 * LONG
    tracemalloc.stop()
    assert pieces.join() == BODY


def test_a_long_body_is_copied_once():
    halves = [BODY[: LONG // 2], BODY[LONG // 2 :]]
    body = SizedBody(LONG)
    tracemalloc.start()
    for half in halves:
        body.add(half)
    whole = body.whole()
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert whole == BODY
    assert num_bytes < LONG + 8192


def test_a_chunked_body_is_what_came_however_it_was_cut():
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in cut(BODY, (7, 900, 70_000)))
    chunked, received, body = ChunkedBody(LONG), bytearray(), None
    for piece in cut(chunks + b"0\r\n\r\n", (1448, 65536)):
        received += piece
        body = chunked.take(received)
    assert body == BODY


@pytest.mark.parametrize("shift", range(4))
def test_characters_of_many_bytes_may_lie_anywhere(shift):
    text = "x" * shift + "\N{SMILING FACE WITH SUNGLASSES}é語" * 40_000
    body = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    assert msgspec.json.decode(read_body(body)["prompt"]) == text


@pytest.mark.parametrize("place", [20, 65_536, 131_072, 199_999])
@pytest.mark.parametrize("wrong", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf0\x9f"])
def test_what_is_no_character_is_refused_anywhere(wrong, place):
    body = b'{"prompt": "' + b"y" * place + wrong + b"y" * (200_000 - place) + b'"}'
    with pytest.raises(BadRequest, match="not UTF-8"):
        read_body(body)


def test_half_a_character_at_the_end_is_refused():
    body = b'{"prompt": "' + b"y" * 200_000 + b'"} \xc3'
    with pytest.raises(BadRequest, match="not UTF-8"):
        read_body(body)


def prefill_leg(prompt, **more):
    given = {
        "request_id": "r",
        "attempt": 1,
        "endpoint": "completions",
        "prompt": prompt,
        "sampling": SamplingParams(stop=(',"prompt":0,', "é")),
        "timeout_s": 1.5,
        "emitted": (1, 2, 3),
    }
    return PrefillLeg(**given | more)


def long_raw(begin=b'"', item=b"word", end=b'"'):
    body = b'{"prompt":' + begin + item * (LONG_PROMPT_BYTES // len(item)) + end + b"}"
    return read_body(body)["prompt"]


@pytest.mark.parametrize(
    "leg",
    [
        prefill_leg(long_raw()),
        prefill_leg(long_raw(), request_id=',"prompt":0,', traceparent="00-1-2-3"),
        prefill_leg(long_raw(item=b',\\"prompt\\":0,'), endpoint="chat"),
        prefill_leg(long_raw(b"[0", b', {"prompt":0,"a":1}', b"]"), endpoint="chat"),
        prefill_leg(long_raw(), options=PromptOptions(tools=long_raw(), documents=long_raw())),
        prefill_leg(long_raw(), sampling=SamplingParams(), emitted=()),
        prefill_leg(msgspec.Raw(b'"short"')),
        prefill_leg(msgspec.Raw(b"0")),
        DecodeLeg(
            request_id="r",
            attempt=1,
            sampling=SamplingParams(),
            prefill=PeerAddress(worker_id="p", incarnation="i", signal_host="h", signal_port=1),
            timeout_s=1.0,
        ),
    ],
)
def test_a_document_in_pieces_is_the_plain_one(leg):
    assert b"".join(document_of(leg)) == encode_json(leg)


def test_a_long_prompt_is_not_copied():
    leg = prefill_leg(long_raw())
    tracemalloc.start()
    document = document_of(leg)
    num_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num_bytes < 8192
    assert sum(map(len, document)) > LONG_PROMPT_BYTES
