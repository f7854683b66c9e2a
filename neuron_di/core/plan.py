"""What a scheduler decided for one step, and what a backend is asked to compute."""

from dataclasses import dataclass
from typing import Self

from neuron_di.core.require import require
from neuron_di.request import Request
from neuron_di.types import BlockId


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions [start, end) of one request. `is_last` yields the next token's logits.

    A chunk lies in the prompt, or behind it (`is_replay`). There the positions were computed by
    decode steps once, and must be computed the same way again.

    `reused`: kept blocks that have its KV. It is copied, and nothing is computed.
    """

    request: Request
    start: int
    end: int
    reused: tuple[BlockId, ...] = ()

    @classmethod
    def next_of(cls, request: Request, tokens_max: int) -> Self:
        """The positions that come after those computed. LocalProtocolError if none is left.

        A prompt is cut at the same places whatever follows it: its KV must be the same.
        """
        start = request.num_computed
        require(start < request.num_prefilled, f"{request!r}: all its positions are computed")
        is_replay = start >= request.num_prompt
        border = request.num_prefilled if is_replay else request.num_prompt
        return cls(request, start, min(start + tokens_max, border))

    @property
    def requests(self) -> tuple[Request]:
        """As a DecodeBatch has them."""
        return (self.request,)

    @property
    def is_replay(self) -> bool:
        return self.start >= self.request.num_prompt

    @property
    def is_last(self) -> bool:
        return self.end == self.request.num_prefilled

    def mark_computed(self) -> None:
        """Record that the chunk's KV is in the request's blocks. The engine calls it once."""
        require(self.request.num_computed == self.start, f"{self.request!r}: chunk out of order")
        self.request.num_computed = self.end
        if self.reused:
            self.request.num_cached += self.end - self.start


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Compute the next token of each request, in this order."""

    requests: tuple[Request, ...]

    def mark_computed(self) -> None:
        """Record one more position of KV for each request. The engine calls it once."""
        for request in self.requests:
            request.num_computed += 1


StepPlan = PrefillChunk | DecodeBatch
