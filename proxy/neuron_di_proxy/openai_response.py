"""OpenAI's answer documents, whole and in chunks, for completions and chats.

Every chunk carries the same id and creation time, and a token or the end of one choice; the
last chunk of a choice carries its only finish reason.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from neuron_di.clock import unix_s
from neuron_di.types import RequestId
from neuron_di.wire import Finished, Token, TokenLogprob
from neuron_di_proxy.openai_request import ClientRequest, Endpoint
from neuron_di_proxy.receipts import Continued

DONE = b"data: [DONE]\n\n"
LOGPROB_MIN = -9999.0  # what OpenAI sends for a probability of zero; JSON has no infinity

_Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Answer(ABC):
    """Writes the answer to one request. Fed for each choice in order: tokens, then `Finished`.

    `index` is the choice's number. How the choices take turns is up to who feeds them.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: ClientRequest, request_id: RequestId) -> None:
        self._head = {
            "id": self.id_prefix + request_id,
            "created": int(unix_s()),
            "model": request.model,
        }
        self._include_usage = request.include_usage

    def chunk(self, token: Token, index: int = 0) -> bytes:
        """The SSE event for one token."""
        choice = self._delta(index, token.text, self._logprobs(index, [token]), None)
        return self._event([choice], None)

    def last_chunk(
        self, finished: Finished, continued: Continued | None = None, index: int = 0
    ) -> bytes:
        """The SSE event that follows the last token of a choice."""
        choice = self._delta(index, finished.text, None, finished.reason)
        return self._event([choice], None, _extra(continued))

    def usage_chunk(self, finished: Sequence[Finished]) -> bytes:
        """The SSE event that follows the last chunk of all; empty when it was not asked for."""
        return self._event([], _usage(finished)) if self._include_usage else b""

    def whole(
        self,
        choices: Sequence[tuple[list[Token], Finished]],
        continued: Continued | None = None,
    ) -> bytes:
        """The JSON document of an answer that is not streamed."""
        written = [
            self._choice(
                index,
                "".join(token.text for token in tokens) + finished.text,
                self._logprobs(index, tokens),
                finished.reason,
            )
            for index, (tokens, finished) in enumerate(choices)
        ]
        usage = _usage([finished for _, finished in choices])
        head = self._head | {"object": self.whole_object}
        return _encode(head | {"choices": written, "usage": usage} | _extra(continued))

    def _event(
        self, choices: list[_Json], usage: _Json | None, extra: _Json | None = None
    ) -> bytes:
        document = self._head | {"object": self.chunk_object, "choices": choices}
        document |= extra or {}
        if self._include_usage:
            document["usage"] = usage
        return b"data: %b\n\n" % _encode(document)

    @abstractmethod
    def _delta(
        self, index: int, text: str, logprobs: _Json | None, finish_reason: str | None
    ) -> _Json:
        """The choice of one chunk."""

    @abstractmethod
    def _choice(self, index: int, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _logprobs(self, index: int, tokens: list[Token]) -> _Json | None:
        """The log probabilities of `tokens`; None when none were asked for."""


class _CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: ClientRequest, request_id: RequestId) -> None:
        super().__init__(request, request_id)
        self._num_chars = [0] * request.n  # of each choice's text, before its next token

    def _delta(
        self, index: int, text: str, logprobs: _Json | None, finish_reason: str | None
    ) -> _Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, index: int, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        return self._delta(index, text, logprobs, finish_reason)

    def _logprobs(self, index: int, tokens: list[Token]) -> _Json | None:
        """Parallel lists over `tokens`. An offset is where in the choice's text a token starts."""
        known = [(token.text, token.logprobs) for token in tokens if token.logprobs is not None]
        if not known:
            return None
        offsets = []
        for text, _ in known:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return {
            "tokens": [entry.chosen.text for _, entry in known],
            "token_logprobs": [_finite(entry.chosen) for _, entry in known],
            # Best last: where two candidates have the same text, the better one stays.
            "top_logprobs": [
                {item.text: _finite(item) for item in (entry.chosen, *reversed(entry.top))}
                for _, entry in known
            ],
            "text_offset": offsets,
        }


class _ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ClientRequest, request_id: RequestId) -> None:
        super().__init__(request, request_id)
        self._begun: set[int] = set()  # the choices whose role was said

    def _delta(
        self, index: int, text: str, logprobs: _Json | None, finish_reason: str | None
    ) -> _Json:
        delta = {} if index in self._begun else {"role": "assistant"}
        if text or finish_reason is None:
            delta["content"] = text
        self._begun.add(index)
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _choice(self, index: int, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(
        self,
        index: int,  # noqa: ARG002 - a chat's tokens have no offsets
        tokens: list[Token],
    ) -> _Json | None:
        content = [
            _chat_logprob(token.logprobs.chosen)
            | {"top_logprobs": [_chat_logprob(item) for item in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None} if content else None


_ANSWERS: dict[Endpoint, type[Answer]] = {"completions": _CompletionAnswer, "chat": _ChatAnswer}


def answer_to(request: ClientRequest, request_id: RequestId) -> Answer:
    """The writer of the answer in the shape of the endpoint that was asked."""
    return _ANSWERS[request.endpoint](request, request_id)


def _extra(continued: Continued | None) -> _Json:
    """What is not OpenAI's: only answers that were continued have it."""
    return {} if continued is None else {"neuron_di": continued}


def _usage(finished: Sequence[Finished]) -> _Json:
    """What all choices cost together. They share one prompt."""
    num_prompt = finished[0].num_prompt
    num_generated = sum(each.num_generated for each in finished)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def _chat_logprob(item: TokenLogprob) -> dict[str, Any]:
    return {"token": item.text, "logprob": _finite(item), "bytes": item.token_bytes}


def _finite(item: TokenLogprob) -> float:
    return max(item.logprob, LOGPROB_MIN)
