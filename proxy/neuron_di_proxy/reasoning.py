"""Splits a model's reasoning from its answer, by the tags its chat template knows.

    <think>              the first thing in an answer, or opened by the prompt itself
    ...                  reasoning
    </think>             what follows is the answer, with all its white space

White space before the first tag is not text. An answer that does not begin with the tag, after a
prompt that did not open it, has no reasoning. One that ends before the second tag is nothing but
reasoning. Half a tag at the end of the text was none.
"""

from typing import Literal

from neuron_di_proxy.message_parts import MessageParts, num_held

_SPACE = " \t\n\r"


class ReasoningSplitter:
    """Takes an answer's text in pieces. How it is split into pieces changes nothing.

    `begins_inside`: the prompt ended inside of reasoning. A model that opens the tag once more
    says nothing by that.
    """

    def __init__(self, tags: tuple[str, str], *, begins_inside: bool) -> None:
        self._start_tag, self._end_tag = tags
        self._begins_inside = self._has_reasoned = begins_inside
        self._place: Literal["start", "inside", "outside"] = "start"
        self._held = ""  # may be white space before a tag, or the beginning of one
        self._num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Whether all that follows is the answer."""
        return self._place == "outside"

    @property
    def num_tokens(self) -> int:
        """How many tokens were reasoning or a tag of it, in part at least."""
        return self._num_tokens if self._has_reasoned else 0

    def feed(self, text: str, parts: MessageParts, *, is_token: bool = True) -> str:
        """Read the next piece: reasoning goes to `parts`, text of the answer is returned."""
        if self._place == "outside":
            return text
        self._num_tokens += is_token
        text = self._held + text
        self._held = ""
        if self._place == "start":
            text = self._begin(text)
        if self._place == "inside":
            return self._reason(text, parts)
        return text

    def end(self, parts: MessageParts) -> str:
        """No more text comes: what was held back is text after all."""
        held, self._held = self._held, ""
        if self._place == "inside" or (self._place == "start" and self._begins_inside):
            parts.reasoning += held
            return ""
        return held

    def _begin(self, text: str) -> str:
        """Look for the first tag. Returns what follows it, or everything if it does not come."""
        begun = text.lstrip(_SPACE)
        if begun.startswith(self._start_tag):
            self._place, self._has_reasoned = "inside", True
            return begun.removeprefix(self._start_tag)
        if self._start_tag.startswith(begun):  # also when there is nothing but white space
            self._held = text
            return ""
        self._place = "inside" if self._begins_inside else "outside"
        return text

    def _reason(self, text: str, parts: MessageParts) -> str:
        reasoning, tag, answer = text.partition(self._end_tag)
        if tag:
            self._place = "outside"
        else:
            self._held = text[len(text) - num_held(text, self._end_tag) :]
            reasoning = text.removesuffix(self._held)
        parts.reasoning += reasoning
        return answer
