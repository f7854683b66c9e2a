"""What one choice of an answer asks of the workers: one prompt, one set of parameters."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from neuron_di.wire import PromptOptions, SamplingParams

Endpoint = Literal["chat", "completions"]
# The routes that give tokens: their cost per token is the proxy's.
HOT_PATHS: dict[str, Endpoint] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}


_AS_IT_IS = PromptOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRequest:
    """A checked request for one choice. `prompt` is the client's own JSON, unread."""

    endpoint: Endpoint
    model: str
    prompt: msgspec.Raw  # chat: the messages; completions: one string or one list of ids
    sampling: SamplingParams
    options: PromptOptions = _AS_IT_IS
    traceparent: str | None = None
