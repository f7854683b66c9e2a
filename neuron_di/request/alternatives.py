"""Grammars of which an answer keeps one: which of them are left, and what each lets come next."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(slots=True)
class Compiled:
    """A grammar to be copied for each answer. The copies share one lexer, and its limits.

    `is_spent`, set by any thread: an answer came to them, and so would all others.
    """

    matcher: "LLMatcher"
    is_spent: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of them, as far as an answer has come with it."""

    compiled: Compiled
    matcher: "LLMatcher"
    param: str  # the field of the client's request that asks for it


class Alternatives:
    """At least one is left. Each has a matcher of its own, so that none bears on another.

    They drop out at the first token that they cannot take: which are left is a function of the
    answer's token ids. Where all of them fail, the first one left says why.
    """

    def __init__(self, parts: Sequence[tuple[Compiled, str]]) -> None:
        self._parts = parts
        self.begin()

    def begin(self) -> None:
        """All are left, and no token has come."""
        self._left = [
            Alternative(compiled, compiled.matcher.deep_copy(), param)
            for compiled, param in self._parts
        ]

    @property
    def param(self) -> str:
        return self._left[0].param

    @property
    def failed(self) -> Alternative | None:
        """One that came to an error: the answer cannot go on."""
        return next((each for each in self._left if each.matcher.is_error()), None)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return any(each.matcher.is_accepting() for each in self._left)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can follow."""
        return all(each.matcher.is_stopped() for each in self._left)

    def bitmask(self) -> bytes | None:
        """A bit per token: whether any of them lets it come next. None: each may."""
        first, *others = [each.matcher.compute_bitmask() for each in self._left]
        if not others:
            return first
        masks = [np.frombuffer(mask, dtype=np.uint8) for mask in (first, *others)]
        joined: bytes = np.bitwise_or.reduce(masks).tobytes()
        return joined

    def can_take(self, token_id: int) -> bool:
        return any(each.matcher.validate_tokens([token_id]) for each in self._left)

    def take(self, token_id: int) -> bool:
        """False: none can, or one came to an error. See `failed`."""
        if len(self._left) > 1:
            left = [each for each in self._left if each.matcher.validate_tokens([token_id])]
            self._left = left or self._left[:1]
        return all(each.matcher.consume_token(token_id) for each in self._left)
