"""JSON objects of clients, taken apart without reading what is in them.

Which of two values of one name counts is decided differently by different readers, so a name
that comes twice is refused. That is seen while the object is taken apart: each name is looked at
once, values are only passed over.

A long prompt is most of a body, and passing over it most of what a body costs. `_json_members.c`
does it some bytes at a time: measured on 400 KB, in 26 us what takes msgspec 170 where the text is
one line, and in 200 instead of 350 where it is a program's, full of escapes. What it does not take
apart goes the other way, which alone says what is wrong.
"""

import codecs
import json
import re
from functools import cache, partial
from types import GenericAlias
from typing import Any, Generic, TypeVar, cast

import msgspec

from neuron_di.errors import BadRequest

try:
    from neuron_di_proxy._json_members import members_of as members_of
except ModuleNotFoundError:  # there was no compiler; one that is there must fit

    def members_of(body: bytes, /) -> "Members":  # noqa: ARG001 - as that
        """Without the extension nothing is known."""
        return None


FIELDS_MAX = 256  # of one request
NAME_CHARS_MAX = 64  # of a client's name that an error repeats

_UTF8_STEP_BYTES = 64 << 10
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")

# One of a surrogate pair's two escapes, without the other.
_HALF_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)

_PAIR_BYTES = 12  # of both escapes
_PLACE = re.compile(r"\(byte ([0-9]+)\)$")  # in the decoder's words

Value = TypeVar("Value")
# Name, and where its value begins and ends in the body; None: not known.
Members = list[tuple[str, int, int]] | None


class _Name(str):
    """A name of an object. Its own type, so that msgspec shows each one as it comes."""

    __slots__ = ()


class _Refused(Exception):
    """Carries a refusal through the decoder."""

    def __init__(self, reason: BadRequest) -> None:
        self.reason = reason


def read_body(body: bytes, members: Members = None) -> dict[str, msgspec.Raw]:
    """The fields of a request's body, each value as the client wrote it.

    `members`, if they are known already, are what `members_of` gives for it.
    All of it is valid JSON in UTF-8, without half surrogates. Raises BadRequest.
    """
    fields = read_compiled(body, members)
    return read_one_by_one(body) if fields is None else fields


def read_compiled(body: bytes, members: Members = None) -> dict[str, msgspec.Raw] | None:
    """The fields of a body that the extension takes apart. None: of one that it leaves."""
    if members is None:
        members = members_of(body)
    if members is None:
        return None
    view = memoryview(body)
    fields = {name: msgspec.Raw(view[begin:end]) for name, begin, end in members}
    return fields if len(fields) == len(members) else None


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError where it is not. The text, up to four times as long, is not made."""
    if body.isascii():
        return
    if len(body) <= _UTF8_STEP_BYTES:
        body.decode()
        return
    decoder, view = _Utf8Decoder(), memoryview(body)
    for begin in range(0, len(body), _UTF8_STEP_BYTES):
        decoder.decode(view[begin : begin + _UTF8_STEP_BYTES])
    decoder.decode(b"", final=True)


def read_one_by_one(body: bytes) -> dict[str, msgspec.Raw]:
    """As `read_body`, by msgspec: what is wrong is found at once, and said."""
    try:
        _check_utf8(body)
        return read_members(body, msgspec.Raw, count_max=FIELDS_MAX, param=None)
    except msgspec.ValidationError:
        raise BadRequest("the body must be a JSON object") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid JSON: it is not UTF-8") from None
    except msgspec.DecodeError as error:
        if _is_half_a_character(body, str(error)):
            raise BadRequest("the body is not valid JSON: it holds half of a character") from None
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def _is_half_a_character(body: bytes, reason: str) -> bool:
    """Whether half of a character is what the decoder failed at. It has many names for that."""
    place = _PLACE.search(reason)
    at = int(place[1]) if place else len(body)  # it says of an end only that it is one
    found = _HALF_SURROGATE.search(body, max(0, at - _PAIR_BYTES), at + _PAIR_BYTES)
    return found is not None and found.start() <= at


def read_members(
    raw: bytes | msgspec.Raw, value_type: type[Value], *, count_max: int, param: str | None
) -> dict[str, Value]:
    """The members of a JSON object. `param` is the field that it is the value of.

    Raises BadRequest when a name comes twice or there are more than `count_max`, and what
    msgspec raises when `raw` is no object of such values.
    """
    reader: _MembersReader[Value] = _reader_of(cast("Any", value_type))
    return reader.read(raw, count_max, param)


class _MembersReader(Generic[Value]):
    """Reads objects of one type of values, one after the other. Making its decoder is costly."""

    def __init__(self, value_type: type[Value]) -> None:
        self._decoder = msgspec.json.Decoder(
            GenericAlias(dict, (_Name, value_type)), dec_hook=self._watch
        )
        self._seen: set[str] = set()
        self._count_max = 0
        self._param: str | None = None

    def read(self, raw: bytes | msgspec.Raw, count_max: int, param: str | None) -> dict[str, Value]:
        self._seen.clear()
        self._count_max, self._param = count_max, param
        try:
            members: dict[_Name, Value] = self._decoder.decode(raw)
        except _Refused as refused:
            raise refused.reason from None
        return {str(name): value for name, value in members.items()}

    def _watch(self, _: type, name: str) -> _Name:
        # Raised at once: a body of a million names is not read to its end.
        seen, param = self._seen, self._param
        if name in seen:
            raise _Refused(_given_twice(name, param))
        if len(seen) == self._count_max:
            whole = "the body" if param is None else f"`{param}`"
            raise _Refused(
                BadRequest(f"{whole} has more than {self._count_max} entries", param=param)
            )
        seen.add(name)
        return _Name(name)


def refuse_doubles(value: bytes, param: str) -> None:
    """Raise BadRequest where a name comes twice in any object of the JSON that `param` is."""
    look = partial(_look_for_doubles, param)
    json.loads(value, object_pairs_hook=look, parse_int=len, parse_float=len)


def _look_for_doubles(param: str, members: list[tuple[str, object]]) -> None:
    seen: set[str] = set()
    for name, _ in members:
        if name in seen:
            raise _given_twice(name, param)
        seen.add(name)


def _given_twice(name: str, param: str | None) -> BadRequest:
    name = name[:NAME_CHARS_MAX]
    if param is None:
        return BadRequest(f"`{name}` is given twice", param=name)
    return BadRequest(f"`{param}` has `{name}` twice", param=param)


@cache
def _reader_of(value_type: Any) -> _MembersReader[Any]:
    return _MembersReader(value_type)


# Of a whole text, between its anchors.
_RULE = re.compile(r"Expected `str` matching regex '(?:\^|\\\\A)(.*)(?:\$|\\\\Z)' - at ")


def explain(text: str) -> BadRequest:
    """Turn msgspec's words ("Expected `int`, got `str` - at `$.n`") into an error with a name.

    What the client wrote is not repeated, except for names of fields.
    """
    named = re.search(r"field `([^`]*)`", text)
    path = re.search(r"`\$\.([^`]*)`$", text)
    param = ".".join(match[1] for match in (path, named) if match) or None
    if text.startswith("Object contains unknown field"):
        return BadRequest(f"`{param}` is unknown", param=param)
    if text.startswith("Expected `null`, got"):
        return BadRequest(f"`{param}` is not supported", param=param)
    if text.startswith("Invalid "):
        return BadRequest(f"this value of `{param}` is not supported", param=param)
    if rule := _RULE.match(text):
        return BadRequest(f"`{param}` must match {rule[1]}", param=param)
    return BadRequest(text.replace("$.", ""), param=param)
