"""From a client's JSON to a request: tokenised once, off the event loop, and checked here."""

import asyncio
from typing import Any

import msgspec

from neuron_di.errors import BadRequest
from neuron_di.request import OutputText, Request, Tokenizer, check_sampling, resolve_max_tokens
from neuron_di.wire import PrefillLeg, SamplingParams


class PromptReader:
    """Makes requests of one model. `context_tokens` bounds the prompt plus its answer."""

    def __init__(self, tokenizer: Tokenizer, *, num_vocab: int, context_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_vocab = num_vocab
        self._context_tokens = context_tokens

    async def read(self, leg: PrefillLeg) -> Request:
        """Tokenise the prompt and check every number. BadRequest names the field."""
        loop = asyncio.get_running_loop()
        # The tokeniser runs without the interpreter lock; a long prompt must not stop the loop.
        prompt_ids = await loop.run_in_executor(None, self._prompt_ids, leg)
        check_sampling(leg.sampling, self._num_vocab)
        if not all(0 <= token < self._num_vocab for token in leg.emitted):
            raise BadRequest("an emitted token id is outside of the vocabulary", param="emitted")
        max_tokens = resolve_max_tokens(
            leg.sampling, len(prompt_ids), self.context_of(leg.context_tokens)
        )
        return Request(
            leg.request_id,
            leg.attempt,
            prompt_ids=prompt_ids,
            sampling=leg.sampling,
            max_tokens=max_tokens,
            output=self.output_text(leg.sampling),
            given=leg.emitted,
        )

    def context_of(self, leg_context_tokens: int | None) -> int:
        """Tokens that one request's prompt and answer may have together."""
        return min(leg_context_tokens or self._context_tokens, self._context_tokens)

    def output_text(self, sampling: SamplingParams) -> OutputText:
        """Fresh output state: text starts with token 0, on whichever worker it is built."""
        return OutputText(
            self._tokenizer,
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )

    def _prompt_ids(self, leg: PrefillLeg) -> list[int]:
        try:
            prompt: Any = msgspec.json.decode(leg.prompt)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequest(f"the prompt is not valid JSON: {error}", param="prompt") from None
        if leg.endpoint == "chat":
            return self._tokenizer.encode_chat(prompt)
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        return self._checked_ids(prompt)

    def _checked_ids(self, prompt: object) -> list[int]:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise BadRequest("prompt must be a string or a list of token ids", param="prompt")
        if not all(0 <= token < self._num_vocab for token in prompt):
            raise BadRequest(
                f"prompt has a token id outside of 0..{self._num_vocab - 1}", param="prompt"
            )
        return prompt
