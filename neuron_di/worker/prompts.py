"""From a client's JSON to a request: tokenised once, off the event loop, and checked here."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.request import (
    ChatExtras,
    OutputText,
    PromptWish,
    Request,
    Tokenizer,
    check_sampling,
    is_in_reasoning,
    resolve_max_tokens,
    template_traits,
)
from neuron_di.request.sampling import LOGPROBS_MAX
from neuron_di.wire import PrefillLeg, PromptOptions, SamplingParams
from neuron_di.worker.rule_thread import RuleThread

# Logprobs of one prompt: its tokens times (1 + alternatives). Each takes memory until token 0.
REPORTED_LOGPROBS_MAX = 65_536


@dataclass(frozen=True, slots=True, repr=False)
class ReadPrompt:
    """A prompt as the model sees it. `begins_in_reasoning` is of the answer."""

    token_ids: list[int]
    text: str | None  # None: the client gave ids
    begins_in_reasoning: bool = False


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
        self.rules_of = rules.rules_of
        self._reasoning_tags = template_traits(tokenizer.chat_template_source).reasoning

    async def read(self, leg: PrefillLeg) -> Request:
        """Tokenise the prompt and check every number. BadRequest names the field."""
        loop = asyncio.get_running_loop()
        # The tokeniser runs without the interpreter lock; a long prompt must not stop the loop.
        prompt = await loop.run_in_executor(
            None, self.read_prompt, leg.endpoint, leg.prompt, leg.options
        )
        check_sampling(leg.sampling, self.num_vocab)
        if not all(0 <= token < self.num_vocab for token in leg.emitted):
            raise BadRequest("an emitted token id is outside of the vocabulary", param="emitted")
        context_tokens = self.context_of(leg.context_tokens)
        prompt = _shortened(prompt, leg.options.keep_last_tokens, leg.sampling, context_tokens)
        max_tokens = resolve_max_tokens(leg.sampling, len(prompt.token_ids), context_tokens)
        rules = await self.rules_of(leg.sampling)
        request = Request(
            leg.request_id,
            leg.attempt,
            prompt_ids=prompt.token_ids,
            sampling=leg.sampling,
            max_tokens=max_tokens,
            output=self.output_text(leg.sampling),
            given=leg.emitted,
            rules=rules,
        )
        request.begins_in_reasoning = prompt.begins_in_reasoning
        if leg.options.report and not leg.emitted:  # else the client has it
            request.prompt_wish = self._wish(prompt, leg.options.logprobs)
        return request

    def context_of(self, leg_context_tokens: int | None) -> int:
        """Tokens that one request's prompt and answer may have together."""
        return min(leg_context_tokens or self.context_tokens, self.context_tokens)

    def output_text(self, sampling: SamplingParams) -> OutputText:
        """Fresh output state: text starts with token 0, on whichever worker it is built."""
        return OutputText(
            self.tokenizer,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            include_stop=sampling.include_stop_str_in_output,
        )

    def read_prompt(
        self,
        endpoint: Literal["chat", "completions"],
        raw_prompt: msgspec.Raw,
        options: PromptOptions,
    ) -> ReadPrompt:
        """The ids of a whole prompt. Any thread; as long as the prompt is. BadRequest, TooLarge."""
        if endpoint == "chat":
            return self._read_chat(raw_prompt, options)
        prompt = _decoded(raw_prompt, "prompt")
        if not isinstance(prompt, str):
            return ReadPrompt(self.checked_ids(prompt, "prompt"), None)
        add_special_tokens = options.add_special_tokens is not False
        return ReadPrompt(
            self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt
        )

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

    def _read_chat(self, raw_messages: msgspec.Raw, options: PromptOptions) -> ReadPrompt:
        messages = _decoded(raw_messages, "messages")
        extras = ChatExtras(
            tools=_decoded(options.tools, "tools"),
            documents=_decoded(options.documents, "documents"),
            template_kwargs=_decoded(options.template_kwargs, "chat_template_kwargs"),
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        text = self.tokenizer.render_chat(messages, extras)
        token_ids = self.tokenizer.encode(
            text, add_special_tokens=options.add_special_tokens is True, param="messages"
        )
        continued = messages[-1].get("content") if options.continue_final_message else None
        return ReadPrompt(token_ids, text, is_in_reasoning(text, self._reasoning_tags, continued))

    def _wish(self, prompt: ReadPrompt, num_top: int | None) -> PromptWish:
        num_prompt = len(prompt.token_ids)
        if num_top is not None:
            if not 0 <= num_top <= LOGPROBS_MAX:
                raise BadRequest(f"logprobs must be between 0 and {LOGPROBS_MAX}", param="logprobs")
            if num_prompt * (num_top + 1) > REPORTED_LOGPROBS_MAX:
                raise BadRequest(
                    f"the prompt has {num_prompt} tokens: with {num_top} alternatives each, their "
                    f"logprobs are more than the limit of {REPORTED_LOGPROBS_MAX}",
                    param="logprobs",
                )
        text = prompt.text
        if text is None:
            text = self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return PromptWish(text, num_top)


def _shortened(
    prompt: ReadPrompt, keep: int | None, sampling: SamplingParams, context_tokens: int
) -> ReadPrompt:
    """The prompt's last `keep` tokens; -1: as many as leave room for the answer."""
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(context_tokens - (sampling.max_tokens or 1), 1)
    if keep < 1:
        raise BadRequest("must be -1, or at least 1", param="truncate_prompt_tokens")
    if len(prompt.token_ids) <= keep:
        return prompt
    return ReadPrompt(prompt.token_ids[-keep:], None, prompt.begins_in_reasoning)


def _decoded(raw: msgspec.Raw, param: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not valid JSON: {error}", param=param) from None
