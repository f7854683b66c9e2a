"""OpenAI's answer documents, whole and in chunks: what both endpoints have alike.

Every chunk carries the same id and creation time, and a token or the end of one choice; the
last chunk of a choice carries its only finish reason.

Not OpenAI's, but common to servers of open models, are `stop_reason` (the stop string or stop
token that ended a choice), token ids and the prompt's logprobs. There is no `system_fingerprint`
and no `service_tier`: nothing here has one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, ClassVar

import msgspec

from neuron_di.clock import unix_s
from neuron_di.types import RequestId
from neuron_di.wire import Finished, PromptReport, Token, TokenLogprob
from neuron_di.wire.sampling_rules import LOGPROB_MIN
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.receipts import Continued

Json = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_GAP = "\0"  # stands for a token's text while the bytes around it are found


class ChoiceWriter(ABC):
    """Writes one choice. Fed in order: `token` for each token, then `last`; or `whole`, once."""

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of reasoning so far; None where there can be none."""
        return None

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """Whether from now on a token with a text is nothing but that text to this choice.

        Such tokens need not be given to `token`. Once true, it stays true.
        """

    @property
    def begins_plain(self) -> bool:
        """Whether so is the first token, but for what only the first chunk says."""
        return self.is_plain

    @abstractmethod
    def token(self, token: Token) -> Json | None:
        """The choice of the chunk for one token; None when there is nothing to say yet."""

    @abstractmethod
    def last(self, finished: Finished) -> Json:
        """The choice of its last chunk."""

    @abstractmethod
    def whole(self, tokens: Sequence[Token], finished: Finished) -> Json:
        """The choice of an answer that is not streamed."""

    def document_fields(self, prompt: PromptReport) -> Json:  # noqa: ARG002 - for those who have any
        """What the whole document says of the prompt, beside what its choices say."""
        return {}


class Answer:
    """Writes the answer to one request. Fed for each choice in order: tokens, then `Finished`.

    `index` is the choice's number. How the choices take turns is up to who feeds them.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, request: ClientRequest, request_id: RequestId, writers: Sequence[ChoiceWriter]
    ) -> None:
        self._request = request
        self._writers = list(writers)
        self._head: Json = {
            "id": self.id_prefix + request_id,
            "object": self.chunk_object if request.stream else self.whole_object,
            "created": int(unix_s()),
            "model": request.model,
        }
        # By choice, the bytes before and behind a token's text, where a chunk is no more than that.
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._begun: dict[int, ChoiceWriter] = {}  # by choice, its writer after a first token
        self._num_prompt: dict[int, int] = {}  # by choice, for the usage so far

    def chunk(self, token: Token, index: int = 0) -> bytes:
        """The SSE event for one token; empty when there is nothing to say yet."""
        frame = self.frame(index) if token.prompt is None else None
        if frame is not None and token.text:
            return frame[0] + _encode(token.text) + frame[1]
        return self._chunk(token, index)

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes before and behind a token's text in the events of a choice.

        None: from its next token on, there may be more to say than the text.
        """
        return self._frames.get(index) or self._find_frame(index)

    def first_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """As `frame`, for the first token of a choice. Whoever uses it calls `note_first`."""
        writer = self._writers[index]
        if writer.is_plain or not writer.begins_plain:
            return self.frame(index)
        if self._request.continuous_usage:
            return None
        self._begun[index] = begun = copy(writer)
        return self._frame_of(begun)

    def note_first(self, index: int) -> None:
        """The event of a choice's first token was made of `first_frame`."""
        self._writers[index] = self._begun.pop(index, self._writers[index])

    def last_chunk(
        self, finished: Finished, continued: Continued | None = None, index: int = 0
    ) -> bytes:
        """The SSE event that follows the last token of a choice."""
        usage = None
        if self._request.continuous_usage:
            usage = _counts(finished.num_prompt, self._num_shown(finished.num_generated))
        return self._event([self._writers[index].last(finished)], usage, _extra(continued))

    def usage_chunk(self, finished: Sequence[Finished]) -> bytes:
        """The SSE event that follows the last chunk of all; empty when it was not asked for.

        `finished` by choice.
        """
        if not self._request.include_usage:
            return b""
        return self._event([], self._usage(finished), {})

    def whole(
        self,
        choices: Sequence[tuple[list[Token], Finished]],
        continued: Continued | None = None,
    ) -> bytes:
        """The JSON document of an answer that is not streamed."""
        written = [
            writer.whole(tokens, finished)
            for writer, (tokens, finished) in zip(self._writers, choices, strict=True)
        ]
        document = self._head | {"choices": written}
        document["usage"] = self._usage([finished for _, finished in choices])
        tokens, _ = choices[0]
        if tokens and (prompt := tokens[0].prompt) is not None:
            document |= self._writers[0].document_fields(prompt)
        return _encode(document | _extra(continued))

    def _chunk(self, token: Token, index: int) -> bytes:
        writer = self._writers[index]
        extra: Json = {}
        usage = None
        if token.prompt is not None:
            self._num_prompt[index] = len(token.prompt.token_ids)
            extra = writer.document_fields(token.prompt)
        if self._request.continuous_usage:
            usage = _counts(self._num_prompt.get(index, 0), self._num_shown(token.index + 1))
        choice = writer.token(token)
        self._find_frame(index)
        return b"" if choice is None else self._event([choice], usage, extra)

    def _find_frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The frame of a choice's tokens, kept from now on. None: they may be more than text."""
        writer = self._writers[index]
        if self._request.continuous_usage or not writer.is_plain:
            return None
        self._frames[index] = frame = self._frame_of(writer)
        return frame

    def _frame_of(self, writer: ChoiceWriter) -> tuple[bytes, bytes]:
        choice = writer.token(Token(index=1, token_id=0, text=_GAP))
        assert choice is not None  # there is text
        # From the right: the model's name, which is the client's, stands before the gap.
        before, _, behind = self._event([choice], None, {}).rpartition(_encode(_GAP))
        return before, behind

    def _event(self, choices: list[Json], usage: Json | None, extra: Json) -> bytes:
        document = self._head | {"choices": choices} | extra
        if usage is not None or self._request.include_usage:
            document["usage"] = usage
        return b"data: %b\n\n" % _encode(document)

    def _num_shown(self, num_generated: int) -> int:
        return 0 if self._request.drop_output else num_generated

    def _usage(self, finished: Sequence[Finished]) -> Json:
        """What all choices cost together. Each prompt counts once, as its first choice met it."""
        prompts = finished[:: self._request.n]
        usage = _counts(
            sum(each.num_prompt for each in prompts),
            sum(self._num_shown(each.num_generated) for each in finished),
        )
        usage["prompt_tokens_details"] = {
            "cached_tokens": sum(each.num_cached for each in prompts),
        }
        counted = [num for each in self._writers if (num := each.num_reasoning) is not None]
        if counted:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(counted)}
        return usage


def token_name(item: TokenLogprob, *, as_id: bool) -> str:
    """What a list of logprobs calls a token."""
    return f"token_id:{item.token_id}" if as_id else item.text


def finite(item: TokenLogprob) -> float:
    """A token's logprob as a number that JSON has."""
    return max(item.logprob, LOGPROB_MIN)


def prompt_logprobs(prompt: PromptReport) -> list[Json | None]:
    """The logprobs of a prompt, by token id."""
    entries: list[Json | None] = []
    for entry in prompt.logprobs or ():
        if entry is None:
            entries.append(None)
            continue
        own = _candidate(entry.chosen) | {"rank": entry.rank}
        candidates = {str(entry.chosen.token_id): own}
        for rank, item in enumerate(entry.top, start=1):
            candidates[str(item.token_id)] = _candidate(item) | {"rank": rank}
        entries.append(candidates)
    return entries


def _candidate(item: TokenLogprob) -> Json:
    return {"logprob": finite(item), "decoded_token": item.text}


def _extra(continued: Continued | None) -> Json:
    """What is not OpenAI's: only answers that were continued have it."""
    return {} if continued is None else {"neuron_di": continued}


def _counts(num_prompt: int, num_generated: int) -> Json:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }
