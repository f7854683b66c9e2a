"""Reads one tool call as models write it, {"name": …, "arguments": {…}}, while it is written."""

from collections.abc import Collection
from typing import Literal

import msgspec

from neuron_di_proxy.json_follower import JsonFollower

_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")  # either, by the model's family

_Place = Literal["begin", "first_key", "key", "in_key", "colon", "value", "in_value", "after"]

# The characters between keys and values, and what follows them; "" is the end.
_PUNCTUATION: dict[_Place, dict[str, _Place | Literal[""]]] = {
    "begin": {"{": "first_key"},
    "colon": {":": "value"},
    "after": {",": "key", "}": ""},
}


class CallText:
    """One call. Of its arguments nothing is known but that they are an object: they are not
    decoded, and what `take_arguments` returns, put together, is the model's own text of them.

    A call is announced when its name is one of `names` and its arguments have begun, in either
    order. It is whole when they are complete: no more is needed of a call, even if it then breaks.
    Keys beside these two mean nothing here.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        self.end: Literal["closed", "broken"] | None = None
        self._names = names
        self._place: _Place = "begin"
        self._json = JsonFollower()  # of the key or value that is read
        self._read: list[str] = []  # the pieces of a key or of the name
        self._key = ""
        self._arguments: list[str] = []  # what was not taken yet
        self._has_arguments = False  # they have begun
        self._is_complete = False  # they have ended

    @property
    def is_announced(self) -> bool:
        return self.name is not None and self._has_arguments

    @property
    def is_whole(self) -> bool:
        return self.name is not None and self._is_complete

    def take_arguments(self) -> str:
        """The text of the arguments since the last time."""
        taken = "".join(self._arguments)
        self._arguments.clear()
        return taken

    def feed(self, text: str, at: int) -> int:
        """Read on in `text` from `at`. Returns where it stopped: at the end of `text`, behind the
        call (`end` is "closed") or at the character that can't be there ("broken").
        """
        while at < len(text) and self.end is None:
            if self._place in ("in_key", "in_value"):
                at = self._follow(text, at)
            elif text[at] in _SPACE:
                at += 1
            elif self._place in _PUNCTUATION:
                at = self._punctuate(text[at], at)
            else:
                self._start(text[at])
        return at

    def _punctuate(self, char: str, at: int) -> int:
        place = _PUNCTUATION[self._place].get(char)
        if place is None:
            self.end = "broken"
            return at
        if place:
            self._place = place
        else:
            self.end = "closed" if self.is_whole else "broken"
        return at + 1

    def _start(self, char: str) -> None:
        """Begin the key or value whose first character is `char`."""
        is_arguments = self._place == "value" and self._key in _ARGUMENTS
        is_text = self._place != "value" or self._key == "name"
        if (is_text and char != '"') or (is_arguments and char != "{"):
            self.end = "broken"
            return
        self._has_arguments |= is_arguments
        self._place = "in_value" if self._place == "value" else "in_key"
        self._json = JsonFollower()
        self._read.clear()

    def _follow(self, text: str, at: int) -> int:
        stop = self._json.feed(text, at)
        if self._place == "in_value" and self._key in _ARGUMENTS:
            self._arguments.append(text[at:stop])
        elif self._place == "in_key" or self._key == "name":
            self._read.append(text[at:stop])
        if self._json.is_broken:
            self.end = "broken"
        elif self._json.is_done:
            self._end_part()
        return stop

    def _end_part(self) -> None:
        if self._place == "in_key":
            self._place = "colon"
            self._key = self._text_read() or ""
            is_twice = self._has_arguments if self._key in _ARGUMENTS else self.name is not None
            if self._key in ("name", *_ARGUMENTS) and is_twice:
                self.end = "broken"
            return
        self._place = "after"
        if self._key in _ARGUMENTS:
            self._is_complete = True
        elif self._key == "name":
            name = self._text_read()
            if name in self._names:
                self.name = name
            else:
                self.end = "broken"

    def _text_read(self) -> str | None:
        try:
            return msgspec.json.decode("".join(self._read), type=str)
        except msgspec.DecodeError:  # half of a surrogate pair
            return None
