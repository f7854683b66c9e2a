"""The choices of a completion."""

import codecs
from collections.abc import Sequence
from typing import Any

from neuron_di.wire import Finished, PromptReport, Token, TokenLogprobs
from neuron_di_proxy.answer_document import (
    Answer,
    ChoiceWriter,
    Json,
    finite,
    prompt_logprobs,
    token_name,
)
from neuron_di_proxy.client_request import ClientRequest


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"


class CompletionWriter(ChoiceWriter):
    """One choice. Its text begins with the prompt's if that is echoed."""

    def __init__(self, request: ClientRequest, index: int, alike: "AlikeOfPrompt") -> None:
        self._request = request
        self._alike = alike
        self._index = index
        self._num_chars = 0  # that were sent before the next token
        self._is_plain = not (
            request.drop_output or request.return_token_ids or request.sampling.logprobs is not None
        )

    @property
    def is_plain(self) -> bool:
        return self._is_plain

    def token(self, token: Token) -> Json | None:
        choice = self._choice([token], "")
        has_more = self._request.return_token_ids or self._request.continuous_usage
        return choice if choice["text"] or choice["logprobs"] is not None or has_more else None

    def last(self, finished: Finished) -> Json:
        return self._choice([], finished.text) | self._end(finished)

    def whole(self, tokens: Sequence[Token], finished: Finished) -> Json:
        return self._choice(tokens, finished.text) | self._end(finished)

    def _choice(self, tokens: Sequence[Token], held: str) -> Json:
        request = self._request
        prompt = tokens[0].prompt if tokens else None
        text, logprobs = "", None
        if request.sampling.logprobs is not None:
            logprobs = _Logprobs(as_ids=request.tokens_as_ids)
        if request.echo and prompt is not None:
            text = prompt.text
            if logprobs is not None:
                logprobs.add_all(self._alike.echoed(prompt, as_ids=request.tokens_as_ids))
        self._num_chars += len(text)
        shown = [] if request.drop_output else tokens
        for token in shown:
            if logprobs is not None and token.logprobs is not None:
                logprobs.add(token.logprobs, self._num_chars + token.logprobs.num_held)
            self._num_chars += len(token.text)
        text += "".join([token.text for token in shown])
        choice: Json = {
            "index": self._index,
            "text": text if request.drop_output else text + held,
            "logprobs": None if logprobs is None else logprobs.document(),
            "finish_reason": None,
        }
        if request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in shown]
            if prompt is not None:
                choice["prompt_token_ids"] = prompt.token_ids
        if request.prompt_logprobs is not None and prompt is not None:
            choice["prompt_logprobs"] = self._alike.listed(prompt)
        return choice

    def _end(self, finished: Finished) -> Json:
        if self._request.drop_output:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": finished.reason, "stop_reason": finished.stop}


class AlikeOfPrompt:
    """What all answers to one prompt say of it: written once, of the report that they share."""

    def __init__(self) -> None:
        self._echoed: _Logprobs | None = None
        self._listed: list[Json | None] | None = None

    def echoed(self, prompt: PromptReport, *, as_ids: bool) -> "_Logprobs":
        """Its tokens as the first ones of an answer that echoes it."""
        if self._echoed is None:
            self._echoed = _Logprobs(as_ids=as_ids)
            self._echoed.add_prompt(prompt)
        return self._echoed

    def listed(self, prompt: PromptReport) -> list[Json | None]:
        """Its logprobs as a list of their own."""
        if self._listed is None:
            self._listed = prompt_logprobs(prompt)
        return self._listed


def _text_bytes(prompt: PromptReport, known: Sequence[TokenLogprobs]) -> tuple[bytes, int]:
    """The bytes that a prompt's tokens spell, and how many of them are those of all but the first.

    They are its text's, if these end it: a token before the text adds nothing to it, and some
    tokenizers put a space before it. Where broken or normalized characters are spelled they are
    not, and the text tells nothing about them.
    """
    text, told = prompt.text.encode(), b"".join(bytes(entry.chosen.token_bytes) for entry in known)
    if text.endswith(told) or told == b" " + text:
        return text, len(told)
    return bytes(prompt.first_bytes) + told, len(told)


class _Logprobs:
    """Parallel lists over tokens. An offset is where in the choice's text a token starts."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, entry: TokenLogprobs, offset: int) -> None:
        self.tokens.append(token_name(entry.chosen, as_id=self._as_ids))
        self.token_logprobs.append(finite(entry.chosen))
        # Best last: where two candidates have the same text, the better one stays.
        candidates = (entry.chosen, *reversed(entry.top))
        self.top_logprobs.append(
            {token_name(item, as_id=self._as_ids): finite(item) for item in candidates}
        )
        self.offsets.append(offset)

    def add_all(self, others: "_Logprobs") -> None:
        self.tokens += others.tokens
        self.token_logprobs += others.token_logprobs
        self.top_logprobs += others.top_logprobs
        self.offsets += others.offsets

    def add_prompt(self, prompt: PromptReport) -> None:
        """The tokens of an echoed prompt. The first has no logprob: nothing comes before it."""
        if prompt.logprobs is None:
            return
        known = [entry for entry in prompt.logprobs if entry is not None]
        text, num_known = _text_bytes(prompt, known)
        # Found from the end: a token before the text, or a space that only its first word's token
        # has, would shift all others. Below zero is before the text.
        end = len(text) - num_known
        # Offsets count characters, and a token may end inside of one.
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        first = characters.decode(text[: max(0, end)])
        self.tokens.append(f"token_id:{prompt.token_ids[0]}" if self._as_ids else first)
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.offsets.append(0)
        offset = len(first)
        for entry in known:
            self.add(entry, offset)
            begin, end = end, end + len(entry.chosen.token_bytes)
            offset += len(characters.decode(text[max(0, begin) : max(0, end)]))

    def document(self) -> dict[str, Any] | None:
        """None when there is no token in it."""
        if not self.tokens:
            return None
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.offsets,
        }
