"""The compiled way through a body: what it takes apart, the other ways take apart alike."""

import json
import sys

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuron_di.errors import BadRequest
from neuron_di_proxy import json_object
from neuron_di_proxy.json_object import read_body, read_compiled, read_one_by_one

_json_members = pytest.importorskip(
    "neuron_di_proxy._json_members", reason="the extension for bodies was not built"
)

SMALL = settings(max_examples=700, deadline=None)
# Bytes that mean something in JSON or UTF-8, or do so beside one of those.
TELLING = b'{}[]":,\\/ntu019-.eE \t\n\r\x00\x1f\x7f\x80\xbf\xc2\xe0\xe2\xed\xa0\x9f\xf0\x90\xf4\xff'
USUAL = [
    {"model": "m", "prompt": "text", "max_tokens": 8, "temperature": 0.5, "stream": True},
    {"prompt": [1, 22, 333], "stop": None, "n": -1, "seed": 0},
    {"messages": [{"role": "user", "content": "naïve \U0001d11e ☃\n\"q\" \\ /"}], "x": {}},
    {"prompt": [[], [[]], {}, {"a": {"b": [0.25, False]}}], "": "" },
    {},
]  # fmt: skip


def taken(body):
    """What the compiled way makes of it. None: nothing."""
    fields = read_compiled(body)
    return None if fields is None else as_bytes(fields)


def as_bytes(fields):
    return [(type(name), name, bytes(raw)) for name, raw in fields.items()]


def check(body):
    """What the compiled way takes is what the slow one takes. Returns it."""
    found = taken(body)
    if found is not None:
        assert found == as_bytes(read_one_by_one(body))
    return found


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("document", USUAL, ids=str)
def test_usual_bodies_are_taken(document, is_ascii, indent):
    body = json.dumps(document, ensure_ascii=is_ascii, indent=indent).encode()
    for each in body, b" \r\n\t" + body + b" \r\n\t":
        found = check(each)
        assert found is not None
        assert {name: json.loads(raw) for _, name, raw in found} == document


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=5), JSON), st.booleans())
def test_any_object_is_taken_alike(document, is_ascii):
    check(json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass"))


@SMALL
@given(
    st.sampled_from(USUAL),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.sampled_from(TELLING))),
)
@example(USUAL[0], True, [(0, 0, ord("x"))])
def test_a_body_with_wrong_bytes_in_it_is_taken_alike(document, is_ascii, changes):
    body = bytearray(json.dumps(document, ensure_ascii=is_ascii).encode())
    for at, num_replaced, byte in changes:
        at %= len(body) + 1
        body[at : at + num_replaced] = bytes([byte])
    check(bytes(body))


@SMALL
@given(st.lists(st.sampled_from([bytes([each]) for each in TELLING]), max_size=8))
@example([b"\\", b"u", b"d"])
def test_any_few_bytes_in_a_string_are_taken_alike(pieces):
    check(b'{"a":"%b"}' % b"".join(pieces))


@SMALL
@given(st.lists(st.sampled_from([b"-", b"0", b"1", b"9", b".", b"e", b"+"]), max_size=5))
def test_any_few_bytes_as_a_number_are_taken_alike(pieces):
    check(b'{"a":%b}' % b"".join(pieces))


@pytest.mark.parametrize("num_before", range(36))
def test_no_byte_of_a_string_is_overlooked(num_before):
    """A string is read some bytes at a time: each of them is tried at each place of those."""
    for byte in range(256):
        body = b'{"a":"%b%c%b"}' % (b"x" * num_before, byte, b"y" * 40)
        is_plain = 0x20 <= byte < 0x80 and byte not in b'"\\'
        assert (check(body) is not None) is is_plain, byte
        if is_plain:  # and also where the body ends soon
            assert check(b'{"a":"%b%c"}' % (b"x" * num_before, byte)) is not None


@pytest.mark.parametrize("num_before", range(20))
@pytest.mark.parametrize(
    "text",
    [
        b"\xc3\xa9",
        b"\xe2\x98\x83",
        b"\xf0\x9d\x84\x9e",
        rb"\n\"\\\/\b\f\r\t",
        rb"\u00e9\ud834\udd1e",
    ],
)
def test_what_is_longer_than_a_byte_is_taken_anywhere_and_only_whole(text, num_before):
    body = b'{"a":"%b%b"}' % (b"x" * num_before, text)
    assert check(body) is not None
    for end in range(len(body)):
        assert check(body[:end]) is None
        check(body[:end] + b'"}')


@pytest.mark.parametrize(
    "value",
    [
        *(rb'"\ud834"', rb'"\udd1e"', rb'"\ud834\u0041"', rb'"\ud834x"', rb'"\u12g4"', rb'"\x"'),
        *(b'"\xc0\x80"', b'"\xed\xa0\x80"', b'"\xe0\x9f\xbf"', b'"\xf4\x90\x80\x80"', b'"\xf5"'),
        *(b"01", b"-", b"1.", b".5", b"+1", b"tru", b"nul", b"True", b"'a'", b"", b"{1:2}"),
        *(
            b"[1,]",
            b"[,1]",
            b'{"a":1,}',
            b"[1}",
            b'{"a":1]',
            b"[1 2]",
            b"[",
            b"]",
            b"[]]",
            b'{"a"}',
        ),
    ],
)
def test_what_is_no_json_is_left_to_those_who_say_so(value):
    body = b'{"model": "m", "a": %b, "prompt": "x"}' % value
    assert taken(body) is None
    with pytest.raises(BadRequest):
        read_body(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2}',
        b'{"a":1}x',
        b'{"a":1}{',
        b'{"a":1}\x00',
        b'\xef\xbb\xbf{"a":1}',
        b'[{"a":1}]',
        b"",
        b" ",
        b"{,}",
        b'{"a":1,}',
        b"{a:1}",
    ],
)
def test_what_is_no_object_of_different_members_is_left_to_them_too(body):
    assert taken(body) is None
    with pytest.raises(BadRequest):
        read_body(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1e5}',
        b'{"\\u0061":1}',
        '{"é":1}'.encode(),
        b'{"%b":1}' % (b"x" * 65),
        b'{"a":%b%b}' % (b"[" * 65, b"]" * 65),
        b"{%b}" % b",".join(b'"%d":1' % number for number in range(65)),
    ],
)
def test_what_is_rare_is_read_by_the_other_way(body):
    assert taken(body) is None
    assert as_bytes(read_body(body)) == as_bytes(read_one_by_one(body))


def test_as_much_as_is_taken_is_read_right():
    name, depth = "x" * 64, 64
    document = {name: 1} | {str(number): number for number in range(63)}
    body = json.dumps(document)[:-3] + "[" * depth + "]" * depth + "}"
    assert len(check(body.encode())) == 64


def test_values_are_the_clients_own_bytes():
    body = b'{"prompt": "%b"}' % (b"word" * 100_000)
    (raw,) = read_body(body).values()
    assert isinstance(raw, msgspec.Raw)
    assert bytes(raw) == body[11:-1]


def test_only_bytes_are_taken_apart():
    for other in bytearray(b"{}"), "{}", None:
        with pytest.raises(TypeError):
            _json_members.members_of(other)


def test_a_proxy_without_the_extension_reads_the_same(monkeypatch):
    bodies = [json.dumps(document, indent=1).encode() for document in USUAL]
    compiled = [as_bytes(read_body(body)) for body in bodies]
    monkeypatch.setattr(json_object, "members_of", lambda _: None)
    assert [as_bytes(read_body(body)) for body in bodies] == compiled


@pytest.mark.parametrize(
    ("end", "is_half"),
    [
        (b"", False),
        (b'\n"}', False),
        (rb'\x"}', False),
        (rb'\ud83d\ude00\x"}', False),
        (rb'\ud800"}', True),
        (rb'\ud800 and more"}', True),
    ],
)
def test_half_a_character_is_not_looked_for_in_all_of_a_long_body(end, is_half, monkeypatch):
    num_searched = []

    class Watched:
        def search(self, body, begin=0, end=sys.maxsize):
            num_searched.append(min(end, len(body)) - begin)
            return half.search(body, begin, end)

    half = json_object._HALF_SURROGATE
    monkeypatch.setattr(json_object, "_HALF_SURROGATE", Watched())
    with pytest.raises(BadRequest) as error:
        read_body(rb'{"prompt": "\ud83d\ude00%b%b' % (b"x" * (1 << 20), end))
    assert ("half of a character" in error.value.message) == is_half
    assert sum(num_searched) <= 64
