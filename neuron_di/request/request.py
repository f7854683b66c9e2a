"""One attempt at a request inside one worker: its ids, its blocks and where it stands.

Status, by role (N-56, N-60); no other move is legal:

    prefill   WAITING -> RUNNING -> TRANSFERRING -> FINISHED     parked until pulled
    decode    WAITING -> TRANSFERRING -> RUNNING -> FINISHED     received before it runs
    both      WAITING -> RUNNING -> FINISHED

and any state -> FINISHED when it is cancelled or fails. A scheduler owns the moves.
"""

from collections.abc import Sequence
from enum import Enum

from neuron_di.request.output_text import OutputText
from neuron_di.request.prompt_wish import PromptWish
from neuron_di.request.seen_tokens import SeenTokens
from neuron_di.request.token_rules import TokenRules
from neuron_di.types import BlockId, FinishReason, RequestId
from neuron_di.wire import SamplingParams


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    TRANSFERRING = "transferring"
    FINISHED = "finished"


class Request:
    """Owned by one engine. Only the engine's thread touches it after it was added.

    `num_computed` counts the token positions whose KV is in `block_ids`.
    `given` are output ids that are known before this worker does anything: those that a decode
    worker goes on from, or those that a client has from an attempt that failed. The engine makes
    them the first of `generated`, which holds all output ids.

    `num_prefilled` is for how many positions a prefill computes KV, or a transfer brings it. By
    default those of the prompt and of all given ids, as a prefill needs it to choose the next
    token. A decode worker feeds the newest id itself and passes one less.

    Of two requests the one with the smaller `age_order` is older: it starts first, and gives way to
    others last. A worker takes the moment at which the request came: so a later attempt is as old
    as the request.

    `cache_scope`: KV may be shared with requests of the same scope only.
    """

    def __init__(
        self,
        request_id: RequestId,
        attempt: int,
        *,
        prompt_ids: list[int],
        sampling: SamplingParams,
        max_tokens: int,
        output: OutputText,
        given: Sequence[int] = (),
        num_prefilled: int | None = None,
        rules: TokenRules | None = None,
        begins_in_reasoning: bool = False,
        age_order: float = 0.0,
        cache_scope: str = "",
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.age_order = age_order
        self.cache_scope = cache_scope
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.max_tokens = max_tokens  # resolved against the context, at least 1
        self.output = output
        self.rules = rules  # None: every token is as good as its logit
        if rules is not None and rules.grammar is not None:
            rules.grammar.begin(prompt_ids, in_reasoning=begins_in_reasoning)
        self.given = tuple(given)
        known = len(prompt_ids) + len(self.given)
        self.num_prefilled = known if num_prefilled is None else num_prefilled
        self.generated: list[int] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_ids: list[BlockId] = []
        self.num_computed = 0
        self.num_cached = 0  # positions of the prompt whose KV was found, and not computed
        self.piece_keys: list[bytes] | None = None  # by which KV of its prompt is found and kept
        self.prompt_wish: PromptWish | None = None  # what token 0 tells of the prompt
        self.begins_in_reasoning = begins_in_reasoning  # the prompt itself opened it
        self._seen: SeenTokens | None = None  # once a penalty asked for it

    def seen_tokens(self) -> SeenTokens:
        """Of the prompt and all that was generated so far."""
        if self._seen is None:
            self._seen = SeenTokens(self.prompt_ids)
        self._seen.follow(self.generated)
        return self._seen

    @property
    def needs_all_logits(self) -> bool:
        """Whether those of its whole prompt are asked for, and not only the last."""
        return self.prompt_wish is not None and self.prompt_wish.num_top is not None

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_kv_at_most(self) -> int:
        """Token positions this request can ever hold KV for: the last token needs none."""
        return self.num_prompt + self.max_tokens - 1

    def token_ids(self, start: int, end: int) -> list[int]:
        """The ids of positions [start, end), across the prompt and what is generated."""
        border = self.num_prompt
        prompt = self.prompt_ids[start:end]
        return prompt + self.generated[max(start - border, 0) : max(end - border, 0)]

    @property
    def key(self) -> tuple[RequestId, int]:
        """(request_id, attempt): the identity that every table uses."""
        return self.request_id, self.attempt

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, attempt={self.attempt}, {self.status.value}, "
            f"prompt={self.num_prompt}, generated={len(self.generated)})"
        )
