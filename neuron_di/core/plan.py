"""What a scheduler decided for one step, and what a backend is asked to compute."""

from dataclasses import dataclass
from typing import Self

from neuron_di.core.require import require
from neuron_di.request import Request


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute positions [start, end) of one prompt. `is_last` yields the first token's logits."""

    request: Request
    start: int
    end: int

    @classmethod
    def next_of(cls, request: Request, tokens_max: int) -> Self:
        """The positions that come after those computed. LocalProtocolError if none is left."""
        start = request.num_computed
        require(start < request.num_prompt, f"{request!r}: its whole prompt is computed")
        return cls(request, start, min(start + tokens_max, request.num_prompt))

    @property
    def is_last(self) -> bool:
        return self.end == self.request.num_prompt

    def mark_computed(self) -> None:
        """Record that the chunk's KV is in the request's blocks. The engine calls it once."""
        require(self.request.num_computed == self.start, f"{self.request!r}: chunk out of order")
        self.request.num_computed = self.end


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Compute the next token of each request, in this order."""

    requests: tuple[Request, ...]

    def mark_computed(self) -> None:
        """Record one more position of KV for each request. The engine calls it once."""
        for request in self.requests:
            request.num_computed += 1


StepPlan = PrefillChunk | DecodeBatch
