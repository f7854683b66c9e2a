"""Quick ways to read a request change no answer: known heads, and a body's members."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_di.errors import BadRequest, NeuronDiError
from neuron_di_proxy import request_head
from neuron_di_proxy.json_object import read_body, read_one_by_one
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


def test_what_lies_behind_a_head_is_no_part_of_it():
    """Whether the length covers it or not: it differs in nothing that is kept."""
    head = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\nwhat follows it\r\n\r\n"
    for length in (100, 1, 100, 0):
        for read in (read_head, parse_head):
            with pytest.raises(BadRequest):
                read(head.format(length).encode())


@settings(max_examples=1500, deadline=None)
@given(st.lists(heads(), min_size=1, max_size=6))
def test_a_known_head_reads_like_a_new_one(raws):
    for raw in [*raws, *raws]:
        assert said_by(read_head, raw) == said_by(parse_head, raw)


FORMS = st.lists(st.tuples(NAMES, SEPARATORS), min_size=1, max_size=4)


@settings(max_examples=600, deadline=None)
@given(START_LINES, FORMS, st.data())
def test_a_form_reads_the_same_with_any_values(start_line, form, data):
    """Names and separators stay, so that heads with other values meet one that is known."""
    request_head._known.clear()
    for _ in range(6):
        values = [data.draw(VALUES) for _ in form]
        lines = [name + sep + value for (name, sep), value in zip(form, values, strict=True)]
        raw = "\r\n".join([start_line, "host: a", *lines, "", ""]).encode("latin-1")
        said = said_by(read_head, raw)
        assert said == said_by(parse_head, raw)
        if isinstance(said, request_head.RequestHead):
            assert list(said.headers) == list(parse_head(raw).headers)


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


@pytest.mark.parametrize(
    "length",
    [b"12a", b"+5", b"-1", b"1_0", b"5 5", b"5 ", b"9" * 19, b"18446744073709551616", b"", b"\xb2"],
)
def test_a_bad_length_is_refused_in_a_known_head_too(no_heads, length):
    known = HEAD % (b"a", b"b", 5)
    assert read_head(known).body_bytes == 5
    assert len(no_heads) == 1
    raw = known.replace(b"Length: 5", b"Length: " + length)
    assert said_by(read_head, raw) == said_by(parse_head, raw)


@pytest.mark.parametrize("name", [b"Authorization: ", b"X-Request-Id: "])
@pytest.mark.parametrize(
    "value",
    [
        b"a ",
        b" a",
        b"a  b",
        b"a b c",
        b"a\tb",
        b"\ta",
        b"a\t",
        b"",
        b"\xe9",
        b"a\x00b",
        b"a\x7fb",
        b"a\r",
        b"\ra",
        b"a\n",
        b"a\nb",
        b"a\r\n b",
        b"a\r\nHost: b",
        b"a\r\n\r\nb",
    ],
)
def test_an_odd_value_reads_the_same_in_a_known_head(no_heads, name, value):
    known = HEAD % (b"a", b"b", 5)
    read_head(known)
    assert len(no_heads) == 1
    start, _, rest = known.partition(name)
    raw = start + name + value + b"\r" + rest.partition(b"\r")[2]
    assert said_by(read_head, raw) == said_by(parse_head, raw)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 5"),
        (b"Connection: keep-alive", b"Connection: close"),
        (b"X-Other: a", b"Expect: 100-continue"),
        (b"X-Other: a", b"Host: b"),
        (b"Content-Length: 5", b"Content-Length : 5"),
        (b"Content-Length: 5", b" Content-Length: 5"),
        (b"Content-Length: 5", b"X-Content-Length: 5"),
        (b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 5"),
        (b"Content-Length: 5", b"Content-Length: 5\r\nTransfer-Encoding: chunked"),
    ],
)
def test_what_decides_how_a_head_is_read_is_no_value_of_it(no_heads, line, other):
    raw = b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n"
    known = read_head(raw % line)
    assert len(no_heads) == 1
    assert said_by(read_head, raw % other) == said_by(parse_head, raw % other) != known


def test_what_is_kept_of_a_head_has_no_key(no_heads):
    read_head(HEAD % (b"a-secret", b"its-id", 5))
    ((key, known),) = no_heads.items()
    assert b"secret" not in b"".join(key)
    assert "secret" not in repr(known)
    assert "its-id" not in repr(known)


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization:  Bearer a-secret",
        b"authorization:Bearer a-secret",
        b"AUTHORIZATION: Bearer a-secret",
        b"Authorization: Bearer and a-secret",
        b"authorization: Bearer a-secret ",
        b"Authorization: Bearer a-secr\xe9t a-secret",
        b"Cookie: s=a-secret",
        b"cookie: s=a\r\ncookie: t=a-secret",
        b"x-api-key: a-secret",
        b"X-API-Key: a-secret",
        b"proxy-authorization: Basic a-secret",
        b"api-key: a-secret",
    ],
)
def test_a_head_whose_key_was_not_cut_out_is_not_kept(no_heads, line):
    raw = b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\nContent-Length: 5\r\n\r\n"
    assert "a-secret" in repr(read_head(raw % line))
    assert not no_heads
    read_head(raw % b"X-Other: b")
    assert len(no_heads) == 1


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
def test_a_bodys_members_are_the_same_however_they_are_read(members, end):
    text = "{" + ", ".join(f'"{name}": {value}' for name, value in members) + end
    body = text.encode("latin-1" if "\xff" in text else "utf-8", "replace")

    def as_bytes(said):
        if isinstance(said, tuple):
            return said
        return [(type(name), name, bytes(raw)) for name, raw in said.items()]

    slowly = as_bytes(said_by(read_one_by_one, body))
    assert as_bytes(said_by(read_body, body)) == slowly


def test_a_large_body_of_doubled_names_is_not_read_to_its_end():
    """What follows is no JSON, which is not what is said."""
    body = b'{"":1' + b',"":1' * ((64 << 10) // 5 - 1) + b"!"
    with pytest.raises(BadRequest, match="given twice"):
        read_body(body)


def test_too_many_fields_are_refused():
    def body_of(count):
        return b"{" + b",".join(b'"%x":1' % number for number in range(count)) + b"}"

    assert len(read_body(body_of(256))) == 256
    with pytest.raises(BadRequest, match="more than 256 entries"):
        read_body(body_of(257))


def test_no_head_with_a_query_is_kept(no_heads):
    read_head(b"GET /v1/models?api_key=a-secret HTTP/1.1\r\nHost: a\r\n\r\n")
    assert not no_heads
