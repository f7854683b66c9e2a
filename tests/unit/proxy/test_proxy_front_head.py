"""How a request's head and its chunked body are read: strictly, and the same however they come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.errors import BadRequest, NeuronDiError, TooLarge
from neuron_di_proxy.body_refusal import BadContentCoding, BadExpectation, check_body
from neuron_di_proxy.request_body import ChunkedBody
from neuron_di_proxy.request_head import HEADERS_MAX, HeadTooLarge, read_head

LINE = b"POST /v1/completions?x=1 HTTP/1.1\r\n"


def head(*lines: str, first: bytes = LINE) -> bytes:
    return first + b"".join(line.encode("latin-1") + b"\r\n" for line in lines) + b"\r\n"


def test_a_head():
    read = read_head(
        head("Host: a", "Content-Length: 12", "X-A: 1", "x-a: \xe9", "Expect: 100-continue")
    )
    assert (read.method, read.path, read.version) == ("POST", "/v1/completions", "1.1")
    assert read.headers == {
        "host": "a",
        "content-length": "12",
        "x-a": "1, \xe9",
        "expect": "100-continue",
    }
    assert (read.body_bytes, read.keeps_alive, read.wants_continue) == (12, True, True)


@pytest.mark.parametrize(
    ("lines", "body_bytes"),
    [(["Host: a"], 0), (["Host: a", "Transfer-Encoding: Chunked"], None)],
)
def test_how_long_a_body_is(lines, body_bytes):
    assert read_head(head(*lines)).body_bytes == body_bytes


@pytest.mark.parametrize("value", ["close", "Close", "x, close", "keep-alive , CLOSE"])
def test_a_client_that_wants_the_connection_to_end(value):
    assert not read_head(head("Host: a", f"Connection: {value}")).keeps_alive


def test_http_1_0_ends_the_connection_and_needs_no_host():
    read = read_head(head(first=b"POST /v1/completions HTTP/1.0\r\n"))
    assert (read.version, read.keeps_alive, read.wants_continue) == ("1.0", False, False)


@pytest.mark.parametrize(
    "raw",
    [
        head(),
        head("Host: a", "Host: a"),
        head("Host: a", "Content-Length: 5", "Transfer-Encoding: chunked"),
        head("Host: a", "Transfer-Encoding: chunked", "Content-Length: 5"),
        head("Host: a", "Content-Length: 5", "Content-Length: 5"),
        head("Host: a", "Content-Length: 5", "Content-Length: 6"),
        head("Host: a", "Content-Length: 5, 5"),
        head("Host: a", "Content-Length: +5"),
        head("Host: a", "Content-Length: -5"),
        head("Host: a", "Content-Length: 0x5"),
        head("Host: a", "Content-Length:"),
        head("Host: a", "Content-Length: 99999999999999999999"),
        head("Host: a", "Content-Length : 5"),
        head("Host: a", "Transfer-Encoding: xchunked"),
        head("Host: a", "Transfer-Encoding: chunked, identity"),
        head("Host: a", "Transfer-Encoding: gzip, chunked"),
        head("Host: a", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        head("Host: a", "Transfer-Encoding: identity"),
        head("Transfer-Encoding: chunked", first=b"POST /v1/completions HTTP/1.0\r\n"),
        head("Host: a", "X: a", " folded"),
        head("Host: a", "X: a\x00b"),
        head("Host: a", "X: a\nTransfer-Encoding: chunked"),
        head("Host: a", "X: a\rY: b"),
        head("Host: a", "Authorization: Bearer a", "Authorization: Bearer b"),
        head("Host: a", "no colon"),
        head("Host: a", first=b"POST /v1/completions HTTP/2.0\r\n"),
        head("Host: a", first=b"POST /v1/completions\r\n"),
        head("Host: a", first=b"POST /v1/completions HTTP/1.1\n"),
        head("Host: a", first=b"NOTHING /v1/completions HTTP/1.1\r\n"),
        head("Host: a", first=b"\x16\x03\x01\x02\r\n"),
    ],
)
def test_b08_a_head_that_two_readers_could_read_in_two_ways_is_refused(raw):
    with pytest.raises(BadRequest):
        read_head(raw)


def test_b03_too_many_headers():
    assert len(read_head(head("Host: a", *["X: y"] * (HEADERS_MAX - 1))).headers) == 2
    with pytest.raises(HeadTooLarge):
        read_head(head("Host: a", *["X: y"] * HEADERS_MAX))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_head_are_refused_in_our_words(raw):
    with pytest.raises(NeuronDiError) as refused:
        read_head(b"\x00" + raw + b"\r\n\r\n")
    assert refused.value.http_status in (400, 431)


def test_b07_a_body_that_unpacks_itself_is_not_taken():
    check_body({"content-encoding": "Identity", "expect": "100-Continue"}, is_json=False)
    with pytest.raises(BadContentCoding):
        check_body({"content-encoding": "gzip"}, is_json=False)
    with pytest.raises(BadExpectation):
        check_body({"expect": "tea"}, is_json=False)


def chunks_of(body: bytes, sizes: list[int]) -> bytes:
    raw = b""
    for size in sizes:
        piece, body = body[:size], body[size:]
        raw += b"%X;e=1\r\n%b\r\n" % (len(piece), piece) if piece else b""
    raw += b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return raw + b"000\r\nTrailer: x\r\n\r\n"


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=8), st.data())
def test_a_chunked_body_is_the_same_however_it_comes(body, sizes, data):
    raw = chunks_of(body, sizes) + b"next"
    chunked, received, taken = ChunkedBody(300), bytearray(), None
    while raw:
        cut = data.draw(st.integers(1, len(raw)))
        received += raw[:cut]
        raw = raw[cut:]
        if taken is None:
            taken = chunked.take(received)
    assert taken == body
    assert received == b"next"


@pytest.mark.parametrize(
    "raw",
    [
        b"3\r\nabcd\r\n",
        b"3\nabc\r\n",
        b"-3\r\nabc\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b" 3\r\nabc\r\n",
        b"3 \r\nabc\r\n",
        b"\r\n",
        b"3\r\rabc\r\n",
        b"g\r\n",
        b"00000000000000003\r\nabc\r\n",
        b"3;" + b"e" * 300,
        b"0\r\n" + b"t: x\r\n" * 17 + b"\r\n",
    ],
)
def test_b08_what_is_no_chunk_is_refused(raw):
    with pytest.raises(BadRequest):
        ChunkedBody(1000).take(bytearray(raw))


def test_b02_a_chunked_body_over_the_limit_is_refused_at_its_size():
    chunked, received = ChunkedBody(10), bytearray(b"a\r\n0123456789\r\n")
    assert chunked.take(received) is None
    with pytest.raises(TooLarge):
        chunked.take(bytearray(b"1\r\n"))
    with pytest.raises(TooLarge):
        ChunkedBody(10).take(bytearray(b"ffffffffffff\r\n"))


def test_many_tiny_chunks_count_as_a_large_body():
    with pytest.raises(TooLarge):
        ChunkedBody(64 << 10).take(bytearray(b"1\r\na\r\n" * 3000))
