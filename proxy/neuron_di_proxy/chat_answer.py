"""The choices of a chat: messages with content, reasoning and tool calls.

The model's reasoning is the field `reasoning`, as vLLM names it. A choice that calls tools ends
with the finish reason "tool_calls"; when the client named the tool that must be called, it ends
with "stop", as OpenAI's and vLLM's do. So does one with a call that was cut short or broke:
nobody should act on it.
"""

from collections.abc import Sequence

from neuron_di.types import RequestId
from neuron_di.wire import Finished, PromptReport, Token, TokenLogprob
from neuron_di_proxy.answer_document import (
    Answer,
    ChoiceWriter,
    Json,
    finite,
    prompt_logprobs,
    token_name,
)
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.message_parts import CallPart, MessageParts
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.reasoning import ReasoningSplitter


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"


class ChatWriter(ChoiceWriter):
    """One choice. The text of its tokens is split into the parts of a message as it comes."""

    def __init__(
        self, request: ClientRequest, request_id: RequestId, index: int, traits: ModelTraits
    ) -> None:
        self._request = request
        self._request_id = request_id
        self._index = index
        self._tags = traits.reasoning
        self._splitter: ReasoningSplitter | None = None  # from the first token on
        self._calls = request.tools.reader() if request.tools is not None else None
        self._is_role_said = False

    @property
    def begins_plain(self) -> bool:
        return self._tags is None and self._has_only_text

    @property
    def is_plain(self) -> bool:
        is_answer = self._tags is None or (self._splitter is not None and self._splitter.is_over)
        return self._is_role_said and is_answer and self._has_only_text

    @property
    def _has_only_text(self) -> bool:
        request = self._request
        return (
            self._calls is None
            and request.sampling.logprobs is None
            and not request.return_token_ids
        )

    @property
    def num_reasoning(self) -> int | None:
        return 0 if self._splitter is None else self._splitter.num_tokens

    def token(self, token: Token) -> Json | None:
        logprobs = self._logprobs([token])
        delta = self._delta(self._read(token))
        has_more = self._request.return_token_ids or self._request.continuous_usage
        if not (delta or logprobs or has_more):
            return None
        if delta.keys() <= {"role"} and self._calls is None and self._tags is None:
            delta["content"] = ""
        return self._choice({"delta": delta, "logprobs": logprobs, "finish_reason": None}, [token])

    def last(self, finished: Finished) -> Json:
        delta = self._delta(self._finish(finished))
        return self._choice({"delta": delta, "logprobs": None} | self._end(finished), [])

    def whole(self, tokens: Sequence[Token], finished: Finished) -> Json:
        parts = [self._read(token) for token in tokens]
        parts.append(self._finish(finished))
        content = "".join(part.content for part in parts)
        reasoning = "".join(part.reasoning for part in parts)
        calls = [call for part in parts for call in part.calls]
        tools = self._request.tools
        is_forced = tools is not None and tools.choice != "auto"  # to call: it was cut before
        message: Json = {
            "role": "assistant",
            "content": content if content or not (calls or reasoning or is_forced) else None,
            "refusal": None,
        }
        if self._tags is not None:
            message["reasoning"] = reasoning or None
        if calls:
            message["tool_calls"] = self._whole_calls(calls)
        fields = {"message": message, "logprobs": self._logprobs(tokens)} | self._end(finished)
        return self._choice(fields, tokens)

    def document_fields(self, prompt: PromptReport) -> Json:
        fields: Json = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(prompt)
        return fields

    def _read(self, token: Token) -> MessageParts:
        parts = MessageParts()
        text = token.text
        if self._tags is not None:
            if self._splitter is None:
                self._splitter = ReasoningSplitter(self._tags, begins_inside=token.in_reasoning)
            text = self._splitter.feed(text, parts)
        self._answer(text, parts)
        return parts

    def _finish(self, finished: Finished) -> MessageParts:
        parts = MessageParts()
        text = finished.text
        if self._splitter is not None:
            text = self._splitter.feed(text, parts, is_token=False) + self._splitter.end(parts)
        self._answer(text, parts)
        if self._calls is not None:
            self._calls.end(parts)
        return parts

    def _answer(self, text: str, parts: MessageParts) -> None:
        """Read text that is not reasoning."""
        if self._calls is None:
            parts.content += text
        else:
            self._calls.feed(text, parts)

    def _choice(self, fields: Json, tokens: Sequence[Token]) -> Json:
        choice: Json = {"index": self._index} | fields
        if self._request.return_token_ids:
            choice["token_ids"] = [token.token_id for token in tokens]
        return choice

    def _delta(self, parts: MessageParts) -> Json:
        delta: Json = {}
        if not self._is_role_said:
            self._is_role_said = True
            delta["role"] = "assistant"
        if parts.reasoning:
            delta["reasoning"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = [self._call(part) for part in parts.calls]
        return delta

    def _call(self, part: CallPart) -> Json:
        if part.name is None:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        return {"index": part.index} | self._whole_call(part.index, part.name, part.arguments)

    def _whole_calls(self, parts: Sequence[CallPart]) -> list[Json]:
        names: list[str] = []
        arguments: list[list[str]] = []
        for part in parts:
            if part.name is not None:
                names.append(part.name)
                arguments.append([])
            arguments[part.index].append(part.arguments)
        return [
            self._whole_call(index, name, "".join(arguments[index]))
            for index, name in enumerate(names)
        ]

    def _whole_call(self, index: int, name: str, arguments: str) -> Json:
        assert self._request.tools is not None  # or nobody would have looked for calls
        return {
            "id": self._request.tools.call_id(self._request_id, self._index, index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _end(self, finished: Finished) -> Json:
        """How the choice ended. All its text was read before."""
        reason: str = finished.reason
        tools = self._request.tools
        if (
            reason == "stop"
            and self._calls is not None
            and self._calls.num_calls
            and self._calls.all_whole
            and tools is not None
            and tools.choice != "named"
        ):
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": finished.stop}

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        content = [
            self._logprob(token.logprobs.chosen)
            | {"top_logprobs": [self._logprob(item) for item in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _logprob(self, item: TokenLogprob) -> Json:
        name = token_name(item, as_id=self._request.tokens_as_ids)
        return {"token": name, "logprob": finite(item), "bytes": item.token_bytes}
