"""Follows one JSON value through text that comes in pieces, and says where it ends or breaks."""

import re
from collections.abc import Callable
from typing import ClassVar, Literal

_SPACE = " \t\n\r"
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = '"\\/bfnrt'
_HEX_DIGITS = "0123456789abcdefABCDEF"
_DIGITS = "0123456789"

# A number's states, and where each character leads: RFC 8259, section 6.
_NUMBER: dict[str, dict[str, str]] = {
    "sign": {"0": "zero", **dict.fromkeys(_DIGITS[1:], "int")},
    "zero": {".": "point", "e": "e", "E": "e"},
    "int": {".": "point", "e": "e", "E": "e", **dict.fromkeys(_DIGITS, "int")},
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {"e": "e", "E": "e", **dict.fromkeys(_DIGITS, "fraction")},
    "e": {"+": "e_sign", "-": "e_sign", **dict.fromkeys(_DIGITS, "exponent")},
    "e_sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
_NUMBER_ENDS = ("zero", "int", "fraction", "exponent")
_NUMBER_STARTS = {"-": "sign", **_NUMBER["sign"]}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_Place = Literal[
    "value", "first_value", "first_key", "key", "colon", "after",
    "string", "escape", "hex", "number", "literal",
]  # fmt: skip


class JsonFollower:
    """One JSON value, from its first character to its last. Where it breaks does not depend on
    how the text is split: all before the first character that no JSON could have there is taken.

    A number at the top has no end of its own: it ends before the first character behind it.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._place: _Place = "value"
        self._open: list[str] = []  # the closing brackets that are due, innermost last
        self._is_key = False  # whether the string that is read is a key
        self._number = ""
        self._literal = ""  # what is still due of it
        self._num_hex = 0  # digits still due

    def feed(self, text: str, at: int) -> int:
        """Read on in `text` from `at`. Returns where it stopped: at the end of `text`, behind the
        value (`is_done`), or at the character that breaks it (`is_broken`).
        """
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._steps[self._place](self, text, at)
        return at

    def _at_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE and (self._open or self._place != "value"):
            return at + 1
        if char == '"':
            self._place, self._is_key = "string", False
        elif char == "{":
            self._open.append("}")
            self._place = "first_key"
        elif char == "[":
            self._open.append("]")
            self._place = "first_value"
        elif char in _NUMBER_STARTS:
            self._place, self._number = "number", _NUMBER_STARTS[char]
        elif char in _LITERALS:
            self._place, self._literal = "literal", _LITERALS[char]
        elif char == "]" and self._place == "first_value":
            return self._close(at)
        else:
            return self._break(at)
        return at + 1

    def _at_key(self, text: str, at: int) -> int:
        char = text[at]
        if char == '"':
            self._place, self._is_key = "string", True
        elif char == "}" and self._place == "first_key":
            return self._close(at)
        elif char not in _SPACE:
            return self._break(at)
        return at + 1

    def _at_colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._place = "value"
        elif text[at] not in _SPACE:
            return self._break(at)
        return at + 1

    def _after_value(self, text: str, at: int) -> int:
        char = text[at]
        if char == ",":
            self._place = "key" if self._open[-1] == "}" else "value"
        elif char == self._open[-1]:
            return self._close(at)
        elif char not in _SPACE:
            return self._break(at)
        return at + 1

    def _in_string(self, text: str, at: int) -> int:
        match = _IN_STRING.match(text, at)
        assert match is not None  # it matches nothing, too
        at = match.end()
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._place = "colon"
            else:
                self._end_value()
        elif text[at] == "\\":
            self._place = "escape"
        else:
            return self._break(at)
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._place, self._num_hex = "hex", 4
        elif text[at] in _ESCAPES:
            self._place = "string"
        else:
            return self._break(at)
        return at + 1

    def _in_hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX_DIGITS:
            return self._break(at)
        self._num_hex -= 1
        if self._num_hex == 0:
            self._place = "string"
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        following = _NUMBER[self._number].get(text[at])
        if following is not None:
            self._number = following
            return at + 1
        if self._number not in _NUMBER_ENDS:
            return self._break(at)
        self._end_value()
        return at  # the character belongs to what follows

    def _in_literal(self, text: str, at: int) -> int:
        if text[at] != self._literal[0]:
            return self._break(at)
        self._literal = self._literal[1:]
        if not self._literal:
            self._end_value()
        return at + 1

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._place = "after"
        self.is_done = not self._open

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    _steps: ClassVar[dict[_Place, Callable[["JsonFollower", str, int], int]]] = {
        "value": _at_value,
        "first_value": _at_value,
        "first_key": _at_key,
        "key": _at_key,
        "colon": _at_colon,
        "after": _after_value,
        "string": _in_string,
        "escape": _in_escape,
        "hex": _in_hex,
        "number": _in_number,
        "literal": _in_literal,
    }
