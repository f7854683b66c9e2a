"""Finds tool calls in the text of an answer, in the formats that models write them.

    hermes       <tool_call>{"name": …, "arguments": …}</tool_call>, as often as there are calls
    mistral      [TOOL_CALLS][{"name": …, "arguments": …}, …]
    llama3_json  {"name": …, "parameters": …}; {…}, as the whole answer, perhaps after
                 <|python_tag|>
    array        [{"name": …, "arguments": …}, …], as the whole answer: what `tool_grammar` asks for

Arguments are given on while they are written, byte for byte, as long as they can be JSON. Text is
never lost: tags, and white space around calls, are dropped where a call was found, and
everything else becomes content. So does a call that breaks before it was announced: no JSON, a
name that is not the client's, arguments that are no object. One that breaks later stays cut,
what follows becomes content, and `all_whole` is false. Only what a forced array (`array`) was cut
to before its first call is no text.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from neuron_di_proxy.call_text import CallText
from neuron_di_proxy.message_parts import MessageParts, num_held

CallFormat = Literal["hermes", "mistral", "llama3_json", "array"]

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where calls stand. `separators` are between calls that are not in an array."""

    open_tag: str = ""
    close_tag: str = ""
    needs_tag: bool = False  # and may then stand anywhere in the text; else: at its start
    is_array: bool = False
    separators: str = ""


_LAYOUTS: dict[CallFormat, _Layout] = {
    "hermes": _Layout(open_tag="<tool_call>", close_tag="</tool_call>", needs_tag=True),
    "mistral": _Layout(open_tag="[TOOL_CALLS]", needs_tag=True, is_array=True),
    "llama3_json": _Layout(open_tag="<|python_tag|>", separators=";"),
    "array": _Layout(is_array=True),
}

# gap: at the start, or after a call; opened: a call or an array must follow; item: a call of an
# array must follow; text: content
_Place = Literal["gap", "text", "opened", "item", "call", "after_item"]


class CallReader:
    """Takes an answer's text in pieces. How it is split into pieces changes nothing.

    Without `is_parallel` only the first call is one; what looks like more of them is content.
    """

    def __init__(
        self, call_format: CallFormat, names: Collection[str], *, is_parallel: bool
    ) -> None:
        self.num_calls = 0  # announced
        self.all_whole = True
        self._layout = _LAYOUTS[call_format]
        self._is_forced = call_format == "array"
        self._names = names
        self._is_parallel = is_parallel
        self._place: _Place = "gap"
        self._call = CallText(names)
        self._markup: list[str] = []  # may turn out to be content
        self._held = ""  # may be the beginning of a tag
        self._may_close = False  # a closing tag may follow

    def feed(self, text: str, parts: MessageParts) -> None:
        """Read the next piece, and add what it was to `parts`."""
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text) and not self._held:
            at = self._step(text, at, parts)

    def end(self, parts: MessageParts) -> None:
        """No more text comes: what could have become a call has not."""
        if self._place == "call" and self._call.is_announced:
            self.all_whole &= self._call.is_whole
        self._markup.append(self._held)
        self._held = ""
        if self._is_forced and self._place != "text":
            self._markup.clear()
        elif self.num_calls == 0 or "".join(self._markup).strip(_SPACE):
            self._give_up(parts)

    @property
    def _may_call(self) -> bool:
        return self._is_parallel or self.num_calls == 0

    def _step(self, text: str, at: int, parts: MessageParts) -> int:
        if self._place == "text":
            return self._in_text(text, at, parts)
        if self._place == "call":
            return self._in_call(text, at, parts)
        if text[at] in _SPACE:
            return self._skip(text[at], at)
        if self._place == "gap":
            return self._in_gap(text, at, parts)
        if self._place == "after_item":
            return self._after_item(text[at], at)
        return self._before_call(text[at], at, parts)

    def _in_text(self, text: str, at: int, parts: MessageParts) -> int:
        tag = self._layout.open_tag
        if not (self._layout.needs_tag and self._may_call):
            parts.content += text[at:]
            return len(text)
        found = text.find(tag, at)
        if found < 0:
            self._held = text[len(text) - num_held(text[at:], tag) :]
            parts.content += text[at : len(text) - len(self._held)]
            return len(text)
        parts.content += text[at:found]
        self._place = "opened"
        return self._skip(tag, found)

    def _in_gap(self, text: str, at: int, parts: MessageParts) -> int:
        tags = [self._layout.close_tag] if self._may_close and self._layout.close_tag else []
        if self._may_call and self._layout.open_tag:
            tags.append(self._layout.open_tag)
        rest = text[at : at + max(map(len, tags), default=0)]
        for tag in tags:
            if rest.startswith(tag):
                is_open = tag == self._layout.open_tag
                self._place = "opened" if is_open else "gap"
                self._may_close = False
                if is_open:
                    return self._skip(tag, at)
                self._markup.clear()  # white space between the call and its tag
                return at + len(tag)
            if tag.startswith(rest) and at + len(rest) == len(text):
                self._held = rest
                return len(text)
        if self._may_call and not self._layout.needs_tag:
            if text[at] == ("[" if self._layout.is_array else "{") and not self._is_after_array:
                self._place = "opened"
                return at
            if self.num_calls and text[at] in self._layout.separators:
                return self._skip(text[at], at)
        self._give_up(parts)
        return at

    @property
    def _is_after_array(self) -> bool:
        return self._layout.is_array and self.num_calls > 0

    def _before_call(self, char: str, at: int, parts: MessageParts) -> int:
        if self._place == "opened" and self._layout.is_array and char == "[":
            self._place = "item"
            return self._skip(char, at)
        may_begin = self._place == "item" or not self._layout.is_array
        if char == "{" and may_begin and self._may_call:
            self._place = "call"
            self._call = CallText(self._names)
        else:
            self._give_up(parts)
        return at

    def _in_call(self, text: str, at: int, parts: MessageParts) -> int:
        was_announced = self._call.is_announced
        stop = self._call.feed(text, at)
        if not self._call.is_announced:
            self._markup.append(text[at:stop])
        else:
            self._markup.clear()
            name = None if was_announced else self._call.name
            self.num_calls += not was_announced
            arguments = self._call.take_arguments()
            if arguments or name is not None:
                parts.add_call(self.num_calls - 1, name, arguments)
        if self._call.end is not None:
            self._end_call(parts)
        return stop

    def _end_call(self, parts: MessageParts) -> None:
        if not self._call.is_announced:
            self._give_up(parts)
            return
        self.all_whole &= self._call.is_whole
        if self._call.end == "closed" and self._layout.is_array:
            self._place = "after_item"
        elif self._call.is_whole:
            self._place = "gap"
            self._may_close = True
        else:
            self._place = "text"

    def _after_item(self, char: str, at: int) -> int:
        if char == ",":
            self._place = "item"
            return self._skip(char, at)
        self._place = "gap"
        if char != "]":
            return at
        self._markup.clear()
        return at + 1

    def _skip(self, markup: str, at: int) -> int:
        """Pass what is content unless a call follows."""
        self._markup.append(markup)
        return at + len(markup)

    def _give_up(self, parts: MessageParts) -> None:
        """What was taken for markup was none."""
        parts.content += "".join(self._markup)
        self._markup.clear()
        self._place = "text"
