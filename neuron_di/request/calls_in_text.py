"""Text in which tool calls may come: the text is free, and each call keeps a grammar.

    hermes, mistral   calls begin wherever their tag comes, and behind them text goes on
    llama3_json       an answer that begins with a call, or with the tag, is nothing but calls

These are the places where the proxy's reader finds calls.
"""

from typing import TYPE_CHECKING

import numpy as np

from neuron_di.request.alternatives import Alternative, Compiled
from neuron_di.request.call_rules import OPEN_TAGS
from neuron_di.request.free_text import SPACES, Marker
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher


class CallPlaces:
    """Where calls begin in the text of one model. Immutable: many requests share one.

    `tail` is what of an answer's text so far a tag may have begun in.
    """

    def __init__(self, call_format: ToolFormat, vocabulary: Vocabulary) -> None:
        tag = OPEN_TAGS[call_format]
        self.is_at_start = call_format == "llama3_json"  # only, and then nothing else comes
        self.pieces = vocabulary.token_bytes
        self._tag = tag.encode()
        self._marker = Marker(tag, vocabulary, may_trail=True)
        ends = list(vocabulary.eos_token_ids)  # of text, also in the midst of what may be a tag
        self._masks = [self._mask(num_matched, ends) for num_matched in range(len(self._tag))]

    def _mask(self, num_matched: int, ends: list[int]) -> bytes | None:
        may_come = np.ones(len(self.pieces), dtype=np.bool_)
        may_come[self._marker.forbidden_after(self._tag[:num_matched])] = False
        if num_matched == 0:
            may_come &= [not self.is_call(b"", piece) for piece in self.pieces]
        may_come[ends] = True
        # As a rule no token brings a tag and more, and text is free.
        return None if may_come.all() else np.packbits(may_come, bitorder="little").tobytes()

    def is_call(self, tail: bytes, piece: bytes) -> bool:
        """Whether a token is the first of a call that needs no tag."""
        return self.is_at_start and not tail and piece.lstrip(SPACES).startswith(b"{")

    def tokens_of_text(self, tail: bytes) -> bytes | None:
        """A bit per token: not those that bring more than a tag, nor those of `is_call`. None: all
        are."""
        return self._masks[self._marker.num_matched(tail)]

    def behind(self, tail: bytes, piece: bytes) -> tuple[bool, bytes | None]:
        """Whether a call begins behind this token; else the tail, None where none ever will."""
        text = tail + piece
        if not self.is_at_start:
            return self._marker.is_in(text), text[max(len(text) - self._marker.num_tail, 0) :]
        text = text.lstrip(SPACES)
        if text.startswith(self._tag):
            return True, None
        return False, text if self._tag.startswith(text) else None


class CallsInText:
    """One answer's, which may end wherever no call is due. Has what `Alternatives` has."""

    def __init__(
        self, compiled: Compiled, places: CallPlaces, *, param: str, is_parallel: bool
    ) -> None:
        self._compiled = compiled
        self._places = places
        self._is_parallel = is_parallel
        self.param = param
        self.begin()

    def begin(self) -> None:
        """No token has come."""
        self._tail: bytes | None = b""
        self._call: LLMatcher | None = None

    @property
    def failed(self) -> Alternative | None:
        """The call, where it came to an error: the answer cannot go on."""
        if self._call is None or not self._call.is_error():
            return None
        return Alternative(self._compiled, self._call, self.param)

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        if self._call is None:
            return True
        return self._places.is_at_start and self._call.is_accepting()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing can follow."""
        return self._call is not None and self._call.is_stopped()

    def bitmask(self) -> bytes | None:
        """A bit per token: whether it may come next. None: each may."""
        if self._call is not None:
            return self._call.compute_bitmask()
        if self._tail is None:
            return None
        mask = self._places.tokens_of_text(self._tail)
        if mask is None or self._tail or not self._places.is_at_start:
            return mask
        first = self._new_call().compute_bitmask()
        masks = [np.frombuffer(each, np.uint8, len(mask)) for each in (mask, first)]
        joined: bytes = np.bitwise_or(*masks).tobytes()
        return joined

    def can_take(self, token_id: int) -> bool:
        if self._call is not None:
            return bool(self._call.validate_tokens([token_id]))
        mask = self.bitmask()
        return mask is None or bool(mask[token_id // 8] >> token_id % 8 & 1)

    def take(self, token_id: int) -> bool:
        """False: it cannot come here, or the call came to an error. See `failed`."""
        places = self._places
        if self._call is None:
            if self._tail is None:
                return True
            piece = places.pieces[token_id]
            if not places.is_call(self._tail, piece):
                if not self.can_take(token_id):
                    return False
                begins, self._tail = places.behind(self._tail, piece)
                if begins:
                    self._call = self._new_call()
                return True
            self._call = self._new_call()
        if not self._call.consume_token(token_id):
            return False
        if self._call.is_stopped() and not places.is_at_start:
            self._call, self._tail = None, b"" if self._is_parallel else None
        return True

    def _new_call(self) -> "LLMatcher":
        return self._compiled.matcher.deep_copy()
