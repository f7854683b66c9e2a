"""From token ids to text that may be sent: whole characters only, nothing of a stop string."""

import codecs
from collections.abc import Sequence

from neuron_di.request.tokenizer import Tokenizer


class OutputText:
    """The text of one request's output, token by token. A function of the ids and nothing else,
    so a decode worker that pushes token 0 again holds back what the prefill worker held back.

    What all `push` return and then `flush`, put together, is what the ids add to
    `tokenizer.decode` of the prompt's, cut before the first stop string. *First* is the one whose
    last character comes first; of several that end at the same character, the longest. This
    doesn't depend on how the text is split into tokens. A stop string that ends before token
    number `min_tokens` does not count.

    `stop_hit` is the stop string that was found. From then on there is no more text. With
    `include_stop` the text is cut behind it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...],
        skip_special_tokens: bool,
        min_tokens: int,
        include_stop: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self.stop_hit: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        # Where some tokenizers drop a space. A prompt that has any text is the start.
        self._at_start = not any(
            tokenizer.has_text(token_id, skip_special_tokens=skip_special_tokens)
            for token_id in prompt_ids
        )
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._matchers = [_StopMatcher(text) for text in dict.fromkeys(stop)]
        self._held = ""  # whole characters that may be the beginning of a stop string

    def num_before(self, token_id: int) -> int:
        """Characters between what was sent and the text of this token, which is the next.

        A stop string may begin with them; or half a character came that the token does not go on
        with, which will be told as a broken one.
        """
        begun, _ = self._characters.getstate()
        num_broken = 0
        if begun and self._tokenizer.has_text(
            token_id, skip_special_tokens=self._skip_special_tokens
        ):
            # Not by the decoder: it holds \xed\xa0, too, which no character begins with.
            first = self._tokenizer.token_bytes(token_id)[:1]
            num_begun = len(begun.decode(errors="replace"))
            goes_on = len((begun + first).decode(errors="replace")) == num_begun
            num_broken = num_begun - goes_on
        return len(self._held) + num_broken

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is now safe to send."""
        self._num_tokens += 1
        if self.stop_hit is not None:
            return ""
        if not self._tokenizer.has_text(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        piece = self._tokenizer.token_bytes(token_id, at_start=self._at_start)
        self._at_start = False
        return self._release(self._characters.decode(piece))

    def flush(self) -> str:
        """No more tokens come: returns what is held back. May still find a stop string."""
        if self.stop_hit is not None:
            return ""
        text = self._release(self._characters.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _release(self, fresh: str) -> str:
        """Add characters, and return those that no stop string can reach any more."""
        text = self._held + fresh
        if not self._matchers:
            return text
        may_stop = self._num_tokens >= self._min_tokens
        for end, char in enumerate(fresh, start=len(self._held) + 1):
            found = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if found and may_stop:
                self.stop_hit = max(found, key=len)
                self._held = ""
                return text[: end if self._include_stop else end - len(self.stop_hit)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        safe = len(text) - num_held
        self._held = text[safe:]
        return text[:safe]


class _StopMatcher:
    """Knuth-Morris-Pratt for one stop string: constant work per character, on average.

    `num_matched` is how many of the latest characters are a beginning of the stop string,
    which is never the whole of it.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _fallback[n]: the longest proper beginning of stop[:n] that is also its end.
        self._fallback = [0, 0]
        length = 0
        for char in stop[1:]:
            length = self._extend(length, char)
            self._fallback.append(length)

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        self.num_matched = self._extend(self.num_matched, char)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._fallback[self.num_matched]
        return True

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length]
        return length + 1 if self.stop[length] == char else 0
