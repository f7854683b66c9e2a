"""From a client's JSON to a request: tokenised once, off the event loop, and checked here."""

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from neuron_di.clock import now_s, unix_s
from neuron_di.errors import BadRequest, ContextExceeded, RemoteProtocolError
from neuron_di.request import (
    ChatExtras,
    OutputText,
    PromptWish,
    Request,
    Tokenizer,
    content_text,
    is_in_reasoning,
    resolve_max_tokens,
    template_traits,
)
from neuron_di.wire import PrefillLeg, PromptOptions, SamplingParams
from neuron_di.wire.legs import REPORTED_LOGPROBS_MAX
from neuron_di.wire.sampling_rules import LOGPROBS_MAX, check_sampling
from neuron_di.worker.rule_thread import RuleThread

# JSON of one prompt. Longer ones are read one at a time: a tokenizer needs up to 200 times that.
LONG_BYTES = 256 << 10
BRACKETS_MAX = 1 << 20  # of lists and objects, and those in their texts


@dataclass(frozen=True, slots=True, repr=False)
class ReadPrompt:
    """A prompt as the model sees it. `begins_in_reasoning` is of the answer."""

    token_ids: list[int]
    text: str | None  # None: the client gave ids
    begins_in_reasoning: bool = False
    num_leading: int = 0  # special tokens that the tokenizer put first


class PromptReader:
    """Makes requests of one model. `context_tokens` bounds the prompt plus its answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_vocab: int,
        context_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.num_vocab = num_vocab
        self.context_tokens = context_tokens
        rules = RuleThread(tokenizer, num_vocab=num_vocab, eos_token_ids=eos_token_ids)
        self.rules_of, self.prepare_rules = rules.rules_of, rules.prepare
        # More cannot fit: no text of so many bytes has as few tokens as the context holds.
        self.text_bytes_max = context_tokens * tokenizer.token_bytes_max
        self._long_prompts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-prompts")
        self._leading = tokenizer.encode("")  # as BOS: what begins every text
        self._reasoning_tags = template_traits(tokenizer.chat_template_source).reasoning

    async def read(self, leg: PrefillLeg) -> Request:
        """Tokenise the prompt and check every number. BadRequest names the field."""
        came_s = now_s() - leg.waited_s
        loop = asyncio.get_running_loop()
        check_sampling(leg.sampling, self.num_vocab)
        # The tokeniser runs without the interpreter lock; a long prompt must not stop the loop.
        is_long = memoryview(leg.prompt).nbytes > LONG_BYTES
        prompt = await loop.run_in_executor(
            self._long_prompts if is_long else None,
            self.read_prompt,
            leg.endpoint,
            leg.prompt,
            leg.options,
            leg.waited_s,
        )
        if not all(0 <= token < self.num_vocab for token in leg.emitted):
            # No client's words: another worker said them.
            raise RemoteProtocolError("an emitted token id is outside of the vocabulary")
        context_tokens = self.context_of(leg.context_tokens)
        prompt = _shortened(prompt, leg.options.keep_last_tokens)
        num_prompt, param = (
            len(prompt.token_ids),
            "prompt" if leg.endpoint == "completions" else "messages",
        )
        max_tokens = resolve_max_tokens(leg.sampling, num_prompt, context_tokens, param=param)
        rules = await self.rules_of(leg.sampling)
        request = Request(
            leg.request_id,
            leg.attempt,
            prompt_ids=prompt.token_ids,
            sampling=leg.sampling,
            max_tokens=max_tokens,
            output=self.output_text(leg.sampling, prompt.token_ids),
            given=leg.emitted,
            rules=rules,
            begins_in_reasoning=prompt.begins_in_reasoning,
            age_order=came_s,
            cache_scope=leg.cache_scope,
        )
        if leg.options.report and not leg.emitted:  # else the client has it
            request.prompt_wish = self._wish(prompt, leg.options)
        return request

    def context_of(self, leg_context_tokens: int | None) -> int:
        """Tokens that one request's prompt and answer may have together."""
        return min(leg_context_tokens or self.context_tokens, self.context_tokens)

    def output_text(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> OutputText:
        """Fresh output state: text starts with token 0, on whichever worker it is built."""
        return OutputText(
            self.tokenizer,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop_str_in_output,
            prompt_ids=prompt_ids,
        )

    def read_prompt(
        self,
        endpoint: Literal["chat", "completions"],
        raw_prompt: msgspec.Raw,
        options: PromptOptions,
        waited_s: float = 0.0,
    ) -> ReadPrompt:
        """The ids of a prompt, before it is cut as `options` say. Any thread; it takes its time.

        `waited_s` ago it came: a template that says the time says that one in later attempts, too.
        Of one that is to be cut, what cannot be kept may be gone. Raises BadRequest, also for what
        is too long for any context that this worker has, or TooLarge.
        """
        if endpoint == "chat":
            return self._read_chat(raw_prompt, options, waited_s)
        prompt = _decoded(raw_prompt, "prompt")
        if not isinstance(prompt, str):
            return ReadPrompt(self._bounded_ids(prompt, options), None)
        prompt = self._bounded(prompt, options, "prompt")
        add_special_tokens = options.add_special_tokens is not False
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        num_leading = len(self._leading) if add_special_tokens else 0
        if token_ids[:num_leading] != self._leading:
            num_leading = 0
        return ReadPrompt(self._known(token_ids, "prompt"), prompt, num_leading=num_leading)

    def checked_ids(self, ids: object, param: str) -> list[int]:
        """A client's token ids. Raises BadRequest unless all are the model's."""
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            kinds = "a string or a list of token ids" if param == "prompt" else "a list of ids"
            raise BadRequest(f"{param} must be {kinds}", param=param)
        if not all(0 <= token < self.num_vocab for token in ids):
            raise BadRequest(
                f"{param} has a token id outside of 0..{self.num_vocab - 1}", param=param
            )
        return ids

    def _known(self, token_ids: list[int], param: str) -> list[int]:
        """What a text was read as. BadRequest where the tokenizer has tokens that the model has
        not, as some that were added for training, and the client wrote one of them.
        """
        largest = max(token_ids, default=0)
        if largest >= self.num_vocab:
            raise BadRequest(
                f"the tokenizer reads a part of {param} as token {largest}, which is outside of "
                f"the model's 0..{self.num_vocab - 1}",
                param=param,
            )
        return token_ids

    def _bounded_ids(self, ids: object, options: PromptOptions) -> list[int]:
        if isinstance(ids, list) and len(ids) > self.context_tokens:
            if options.keep_last_tokens is None:
                raise ContextExceeded(
                    self.context_tokens, f"the prompt has {len(ids)}", param="prompt"
                )
            ids = ids[-self.context_tokens :]
        return self.checked_ids(ids, "prompt")

    def _bounded(self, text: str, options: PromptOptions, param: str) -> str:
        """The text, or its end if only that is used. Tokenising more costs time and memory."""
        bytes_max = self.text_bytes_max
        if len(text) <= bytes_max and len(text.encode("utf-8", "surrogatepass")) <= bytes_max:
            return text
        if options.keep_last_tokens is None:
            raise ContextExceeded(
                self.context_tokens,
                f"the prompt is longer than {bytes_max} bytes, which are more",
                param=param,
            )
        return text[-bytes_max:]

    def _read_chat(
        self, raw_messages: msgspec.Raw, options: PromptOptions, waited_s: float
    ) -> ReadPrompt:
        messages = _decoded(raw_messages, "messages")
        tools = _decoded(options.tools, "tools")
        if options.hides_tools:
            self.tokenizer.check_tools(tools)
            tools = None
        extras = ChatExtras(
            tools=tools,
            documents=_decoded(options.documents, "documents"),
            template_kwargs=_decoded(options.template_kwargs, "chat_template_kwargs"),
            reasoning_effort=options.reasoning_effort,
            now_unix_s=unix_s() - waited_s,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        text = self._bounded(self.tokenizer.render_chat(messages, extras), options, "messages")
        token_ids = self.tokenizer.encode(
            text, add_special_tokens=options.add_special_tokens is True, param="messages"
        )
        self._known(token_ids, "messages")
        continued = ""
        if options.continue_final_message:  # a template was shown it: one string, parts, or none
            continued = content_text("messages", messages[-1].get("content") or "")
        return ReadPrompt(token_ids, text, is_in_reasoning(text, self._reasoning_tags, continued))

    def _wish(self, prompt: ReadPrompt, options: PromptOptions) -> PromptWish:
        num_prompt, num_top, param = len(prompt.token_ids), options.logprobs, options.logprobs_param
        if num_top is not None:
            if not 0 <= num_top <= LOGPROBS_MAX:
                raise BadRequest(f"{param} must be between 0 and {LOGPROBS_MAX}", param=param)
            if num_prompt * (num_top + 1) > REPORTED_LOGPROBS_MAX:
                raise BadRequest(
                    f"the prompt has {num_prompt} tokens: with {num_top} alternatives each, their "
                    f"logprobs are more than the limit of {REPORTED_LOGPROBS_MAX}",
                    param=param,
                )
        text = prompt.text
        if text is None:
            text = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return PromptWish(text, num_top)


def _shortened(prompt: ReadPrompt, keep: int | None) -> ReadPrompt:
    """The prompt's last `keep` tokens, those that lead it included; None: all."""
    if keep is None:
        return prompt
    if keep < 1:
        raise BadRequest("must be at least 1", param="truncate_prompt_tokens")
    if len(prompt.token_ids) <= keep:
        return prompt
    lead = prompt.token_ids[: prompt.num_leading if keep > prompt.num_leading else 0]
    return ReadPrompt(lead + prompt.token_ids[len(lead) - keep :], None, prompt.begins_in_reasoning)


def _refuse_doubles(raw: bytes, param: str) -> None:
    """Raise BadRequest where a name comes twice in an object: nobody knows which is meant."""

    def look(members: list[tuple[str, object]]) -> None:
        if len({name for name, _ in members}) < len(members):
            raise BadRequest(f"an object in {param} has a name twice", param=param)

    json.loads(raw, object_pairs_hook=look, parse_int=len, parse_float=len)


def _decoded(raw: msgspec.Raw, param: str) -> Any:
    """The value of a client's JSON. BadRequest where it is none, names something twice, or is so
    much that other requests would wait for it: it is read with the interpreter's lock."""
    text = bytes(raw)
    is_text = text[:1] == b'"'
    if not is_text and text.count(b"[") + text.count(b"{") > BRACKETS_MAX:
        raise BadRequest(f"{param} has more than {BRACKETS_MAX} brackets", param=param)
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, dict | list) and b"{" in text:
            _refuse_doubles(text, param)
        return value
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not valid JSON: {error}", param=param) from None
