"""One attempt at a request inside one worker: its ids, its blocks and where it stands.

Status, by role (seed N-56, N-60); no other move is legal:

    prefill   WAITING -> RUNNING -> TRANSFERRING -> FINISHED     parked until pulled
    decode    WAITING -> TRANSFERRING -> RUNNING -> FINISHED     received before it runs
    both      WAITING -> RUNNING -> FINISHED

and any state -> FINISHED when it is cancelled or fails. A scheduler owns the moves.
"""

from enum import Enum

from neuron_di.request.output_text import OutputText
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
    `generated` holds the output ids; on a decode worker it starts with token 0, which is given.
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
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.max_tokens = max_tokens  # resolved against the context, at least 1
        self.output = output
        self.generated: list[int] = []
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.block_ids: list[BlockId] = []
        self.num_computed = 0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_kv_at_most(self) -> int:
        """Token positions this request can ever hold KV for: the last token needs none."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def key(self) -> tuple[RequestId, int]:
        """(request_id, attempt): the identity that every table uses."""
        return self.request_id, self.attempt

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, attempt={self.attempt}, {self.status.value}, "
            f"prompt={self.num_prompt}, generated={len(self.generated)})"
        )
