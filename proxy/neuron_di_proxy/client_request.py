"""A client's request once it is read and checked: everything the proxy knows of it."""

import msgspec

from neuron_di.wire import PromptOptions, SamplingParams
from neuron_di_proxy.choice_request import AS_IT_IS, BYTES_PER_TOKEN, ChoiceRequest, Endpoint
from neuron_di_proxy.tool_calls import ToolUse

UNLIMITED_TOKENS = 256  # what an answer counts that may be as long as the context allows
# What an answer counts at most. A client may ask for any number, and nobody is computed more; but
# what is added up across requests must stay far below what a float tells apart.
COUNTED_TOKENS_MAX = 1 << 17


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request. Each prompt is the client's own JSON, unread.

    Choice `p * n + j` is the j-th answer to prompt p. `sampling.logprobs` says how many
    alternatives of each token the answer lists, `prompt_logprobs` how many of each prompt token;
    None: none at all.
    """

    endpoint: Endpoint
    model: str
    prompts: tuple[msgspec.Raw, ...]  # chat: one, the messages; else strings or lists of ids
    sampling: SamplingParams
    has_seed: bool = False  # of its own; else `sampling.seed` was drawn
    options: PromptOptions = AS_IT_IS
    n: int = 1
    stream: bool = False
    include_usage: bool = False  # a last chunk with the usage, and `usage: null` in the others
    continuous_usage: bool = False  # only with `include_usage`: each chunk has the usage so far
    echo: bool = False  # the answer's text begins with the prompt
    drop_output: bool = False  # only with `echo`: one token is computed, and not shown
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name a token "token_id:N" instead of by its text
    prompt_logprobs: int | None = None  # asked for by that name, not by `echo` and `logprobs`
    tools: ToolUse | None = None

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def cost(self) -> float:
        """About how many tokens the request takes: what tenants share by their weights.

        Known before anything is computed, so of prompts a token is taken to be four bytes, and
        answers are taken to be as long as they may be. Each answer is a request of its own
        there, which computes its prompt.
        """
        prompt_bytes = 0
        for prompt in self.prompts:
            prompt_bytes += memoryview(prompt).nbytes
        max_tokens = self.sampling.max_tokens or UNLIMITED_TOKENS
        if max_tokens > COUNTED_TOKENS_MAX:
            max_tokens = COUNTED_TOKENS_MAX
        return self.n * (prompt_bytes / BYTES_PER_TOKEN + max_tokens * len(self.prompts))

    def choice(self, index: int, *, cache_scope: str = "") -> ChoiceRequest:
        """The request for one choice. Answer j to a prompt is what n=1 gives with seed + j.

        `cache_scope` is its tenant's: what was read of a body serves those of others, too.
        Without a seed no two choices draw alike, be it for one prompt or for two that are equal.
        """
        prompt_index, repeat = divmod(index, self.n)
        sampling, options = self.sampling, self.options
        if repeat and options.report:  # the prompt's first answer brings it: see `SharedReports`
            options = msgspec.structs.replace(options, report=False, logprobs=None)
        if step := repeat if self.has_seed else index:
            assert sampling.seed is not None, "its own, or drawn"
            seed = (sampling.seed + step + (1 << 63)) % (1 << 64) - (1 << 63)  # stays an int64
            sampling = msgspec.structs.replace(sampling, seed=seed)
        return ChoiceRequest(
            endpoint=self.endpoint,
            model=self.model,
            prompt=self.prompts[prompt_index],
            sampling=sampling,
            options=options,
            cache_scope=cache_scope,
        )
