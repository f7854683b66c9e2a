"""What one choice of an answer asks of the workers: one prompt, one set of parameters."""

from typing import Literal

import msgspec

from neuron_di.wire import PromptOptions, SamplingParams

Endpoint = Literal["chat", "completions"]
# The routes that give tokens: their cost per token is the proxy's.
HOT_PATHS: dict[str, Endpoint] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}


AS_IT_IS = PromptOptions()
BYTES_PER_TOKEN = 4  # about: of a prompt that nobody has made into tokens yet


class ChoiceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for one choice. `prompt` is the client's own JSON, unread."""

    endpoint: Endpoint
    model: str
    prompt: msgspec.Raw  # chat: the messages; completions: one string or one list of ids
    sampling: SamplingParams
    options: PromptOptions = AS_IT_IS
    cache_scope: str = ""  # as in the prefill leg
    traceparent: str | None = None

    @property
    def num_prompt_about(self) -> float:
        """Tokens of the prompt, as far as its bytes tell."""
        return memoryview(self.prompt).nbytes / BYTES_PER_TOKEN
