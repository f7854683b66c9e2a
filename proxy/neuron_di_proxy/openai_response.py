"""OpenAI's answer documents, whole and in chunks, for completions and chats.

An answer is one choice. Every chunk carries the same id and creation time; the last one
with a choice carries the only finish reason.
"""

from abc import ABC, abstractmethod
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
    """Writes the answer to one request. Fed in order: tokens, then `Finished`."""

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

    def chunk(self, token: Token) -> bytes:
        """The SSE event for one token."""
        return self._event([self._delta(token.text, self._logprobs([token]), None)], None)

    def last_chunk(self, finished: Finished, continued: Continued | None = None) -> bytes:
        """The SSE events that follow the last token, without the closing `[DONE]`."""
        choice = self._delta(finished.text, None, finished.reason)
        events = self._event([choice], None, _extra(continued))
        if self._include_usage:
            events += self._event([], _usage(finished))
        return events

    def whole(
        self, tokens: list[Token], finished: Finished, continued: Continued | None = None
    ) -> bytes:
        """The JSON document of an answer that is not streamed."""
        text = "".join(token.text for token in tokens) + finished.text
        choice = self._choice(text, self._logprobs(tokens), finished.reason)
        head = self._head | {"object": self.whole_object}
        document = head | {"choices": [choice], "usage": _usage(finished)}
        return _encode(document | _extra(continued))

    def _event(
        self, choices: list[_Json], usage: _Json | None, extra: _Json | None = None
    ) -> bytes:
        document = self._head | {"object": self.chunk_object, "choices": choices}
        document |= extra or {}
        if self._include_usage:
            document["usage"] = usage
        return b"data: %b\n\n" % _encode(document)

    @abstractmethod
    def _delta(self, text: str, logprobs: _Json | None, finish_reason: str | None) -> _Json:
        """The choice of one chunk."""

    @abstractmethod
    def _choice(self, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        """The choice of a whole answer."""

    @abstractmethod
    def _logprobs(self, tokens: list[Token]) -> _Json | None:
        """The log probabilities of `tokens`; None when none were asked for."""


class _CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    _num_chars = 0  # of the answer's text, before the next token

    def _delta(self, text: str, logprobs: _Json | None, finish_reason: str | None) -> _Json:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        return self._delta(text, logprobs, finish_reason)

    def _logprobs(self, tokens: list[Token]) -> _Json | None:
        """Parallel lists over `tokens`. An offset is where in the answer's text a token starts."""
        known = [(token.text, token.logprobs) for token in tokens if token.logprobs is not None]
        if not known:
            return None
        offsets = []
        for text, _ in known:
            offsets.append(self._num_chars)
            self._num_chars += len(text)
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

    _is_first = True

    def _delta(self, text: str, logprobs: _Json | None, finish_reason: str | None) -> _Json:
        delta = {"role": "assistant"} if self._is_first else {}
        if text or finish_reason is None:
            delta["content"] = text
        self._is_first = False
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(self, text: str, logprobs: _Json | None, finish_reason: str) -> _Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": 0,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: list[Token]) -> _Json | None:
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


def _usage(finished: Finished) -> _Json:
    return {
        "prompt_tokens": finished.num_prompt,
        "completion_tokens": finished.num_generated,
        "total_tokens": finished.num_prompt + finished.num_generated,
    }


def _chat_logprob(item: TokenLogprob) -> dict[str, Any]:
    return {"token": item.text, "logprob": _finite(item), "bytes": item.token_bytes}


def _finite(item: TokenLogprob) -> float:
    return max(item.logprob, LOGPROB_MIN)
