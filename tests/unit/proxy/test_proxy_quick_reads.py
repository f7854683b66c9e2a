"""Quick ways to read a request change no answer: known heads, and a body's members at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_di.errors import BadRequest, NeuronDiError
from neuron_di_proxy import request_head
from neuron_di_proxy.json_object import read_at_once, read_body, read_one_by_one
from neuron_di_proxy.request_head import parse_head, read_head


def said_by(read, *arguments, **keywords):
    """What it returns, or the words of its refusal."""
    try:
        return read(*arguments, **keywords)
    except NeuronDiError as error:
        return type(error), error.message, error.code


# Heads.

NAMES = st.sampled_from(
    [
        "Content-Length",
        "content-length",
        "Authorization",
        "authorization",
        "x-request-id",
        "X-Request-Id",
        "traceparent",
        "Traceparent",
        "Content-length",
        "host",
        "Connection",
        "Expect",
        "Transfer-Encoding",
        "X-Other",
        " folded",
        "authorization ",
    ]
)
VALUES = st.sampled_from(
    [
        "1",
        "22",
        "0007",
        "12a",
        "1" * 18,
        "9" * 19,
        "9" * 30,
        "",
        "Bearer ndi-a-b",
        "Bearer ndi-c-d",
        "Bearer  two",
        "a, b",
        "b ",
        "\tc",
        "é",
        "x\x00y",
        "x\x7fy",
        "close",
        "100-continue",
        "chunked",
        "127.0.0.1",
    ]
)
SEPARATORS = st.sampled_from([": ", ": ", ": ", ":", ":  ", " : "])
LINE_ENDS = st.sampled_from(["\r\n"] * 12 + ["\n", "\r", "\r\n\r\n"])
START_LINES = st.sampled_from(
    [
        "POST /v1/completions HTTP/1.1",
        "POST /v1/chat/completions?a=1 HTTP/1.1",
        "GET / HTTP/1.0",
        "POST / HTTP/2.0",
        "CONNECT a:1 HTTP/1.1",
    ]
)


@st.composite
def heads(draw):
    line_end = draw(LINE_ENDS)
    lines = [draw(START_LINES), *(["host: a"] if draw(st.booleans()) else [])]
    count = draw(st.integers(0, 4))
    lines += [draw(NAMES) + draw(SEPARATORS) + draw(VALUES) for _ in range(count)]
    return ("\r\n".join(lines[:-1]) + line_end + lines[-1] + "\r\n\r\n").encode("latin-1")


@settings(max_examples=1500, deadline=None)
@given(st.lists(heads(), min_size=1, max_size=6))
def test_a_known_head_reads_like_a_new_one(raws):
    for raw in [*raws, *raws]:
        assert said_by(read_head, raw) == said_by(parse_head, raw)


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ndi-%b\r\n"
    b"X-Request-Id: %b\r\nContent-Length: %d\r\nX-Other: b\r\n\r\n"
)


@pytest.fixture
def no_heads(monkeypatch):
    monkeypatch.setattr(request_head, "_known", {})
    return request_head._known


def test_heads_that_differ_in_their_values_are_taken_apart_once(no_heads, monkeypatch):
    parsed = []

    def counted(raw):
        parsed.append(raw)
        return parse_head(raw)

    monkeypatch.setattr(request_head, "parse_head", counted)
    for number in range(5):
        values = b"k%d" % number, b"r%d" % number, number
        assert read_head(HEAD % values) == parse_head(HEAD % values)
    assert len(parsed) == 1


def test_what_is_kept_of_a_head_has_no_key(no_heads):
    read_head(HEAD % (b"a-secret", b"its-id", 5))
    ((key, known),) = no_heads.items()
    assert b"secret" not in b"".join(key)
    assert "secret" not in repr(known)
    assert "its-id" not in repr(known)


def test_who_changes_a_heads_headers_changes_no_other(no_heads):
    for _ in range(3):
        head = read_head(HEAD % (b"a", b"b", 5))
        assert head.headers["x-other"] == "b"
        head.headers["x-other"] = "changed"


def test_few_heads_are_kept_and_no_long_ones(no_heads):
    for number in range(request_head.KNOWN_MAX + 5):
        read_head(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % number)
    assert len(no_heads) == request_head.KNOWN_MAX
    known = list(no_heads)
    read_head(b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n" % (b"x" * request_head.KNOWN_BYTES_MAX))
    with pytest.raises(BadRequest, match="Host is missing"):
        read_head(b"GET / HTTP/1.1\r\n\r\n")
    assert list(no_heads) == known


# A body's members.

JSON_VALUES = st.sampled_from(
    [
        '"a text"',
        '"other \\u00e9 text"',
        '"é"',
        '""',
        '" "',
        '"\\ud800"',
        "[1, 2, 3]",
        "[" + "1," * 60 + "1]",
        "[]",
        '["a", "b"]',
        "null",
        "1",
        '{"role": "user"}',
        '[{"role": "user", "content": "a"}]',
        '[ {"role": "user", "content": "b"} ]',
        '[{"a": 1, "a": 2}]',
        '"a", "n": 2',
        '"a"}, {"prompt": "b"',
        '"unfinished',
        "",
        '"\xff"',
    ]
)
MEMBER_NAMES = st.sampled_from(["a", "b", "\\u0061", "ab", "é", "", "\\ud800"])


@settings(max_examples=1500, deadline=None)
@given(
    st.lists(st.tuples(MEMBER_NAMES, JSON_VALUES), max_size=5),
    st.sampled_from(["}", "", "} x", ",}"]),
)
def test_a_bodys_members_are_the_same_at_once_and_one_by_one(members, end):
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in members) + end
    body = text.encode("latin-1" if "\xff" in text else "utf-8", "replace")

    def as_bytes(said):
        if isinstance(said, tuple):
            return said
        return [(type(name), name, bytes(raw)) for name, raw in said.items()]

    slowly = as_bytes(said_by(read_one_by_one, body))
    assert as_bytes(said_by(read_body, body)) == slowly
    at_once = read_at_once(body)
    assert (at_once is None) == isinstance(slowly, tuple)
    assert at_once is None or as_bytes(at_once) == slowly
