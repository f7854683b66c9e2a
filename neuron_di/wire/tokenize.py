"""What the proxy, which has no tokenizer, asks of a worker that has one.

    POST /tokenize     TokenizePrompt -> TokenizedPrompt
    POST /detokenize   DetokenizeIds  -> DetokenizedText
    either of them                    -> Failed, with its HTTP status

The answers are the documents that clients get.
"""

from typing import Literal

import msgspec

from neuron_di.wire.codec import LEG_BYTES_MAX, Decoder
from neuron_di.wire.legs import PromptOptions


class TokenizePrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Read a prompt as a prefill leg with these fields would. `with_strings`: tokens as text."""

    endpoint: Literal["chat", "completions"]
    prompt: msgspec.Raw
    options: PromptOptions = PromptOptions()
    with_strings: bool = False

    def __repr__(self) -> str:
        return f"TokenizePrompt({self.endpoint}, {len(bytes(self.prompt))} bytes)"


class DetokenizeIds(msgspec.Struct, frozen=True):
    """Give the text of these token ids, special ones included."""

    tokens: list[int]

    def __repr__(self) -> str:
        return f"DetokenizeIds({len(self.tokens)} tokens)"


class TokenizedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs` spells tokens as the model's own vocabulary does."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None

    def __repr__(self) -> str:
        return f"TokenizedPrompt({self.count} tokens)"


class DetokenizedText(msgspec.Struct, frozen=True):
    prompt: str

    def __repr__(self) -> str:
        return f"DetokenizedText({len(self.prompt)} characters)"


tokenize_decoder: Decoder[TokenizePrompt] = Decoder(
    TokenizePrompt, bytes_max=LEG_BYTES_MAX, as_json=True
)
detokenize_decoder: Decoder[DetokenizeIds] = Decoder(
    DetokenizeIds, bytes_max=LEG_BYTES_MAX, as_json=True
)
