"""What an engine tells the worker around it, in order, for each request."""

from dataclasses import dataclass

from neuron_di.errors import NeuronDiError
from neuron_di.request import Request
from neuron_di.types import FinishReason, RequestId
from neuron_di.wire import Token

Key = tuple[RequestId, int]  # request id and attempt


@dataclass(slots=True)
class Timing:
    """Where a request's time went, in seconds."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Emitted:
    """One more token."""

    key: Key
    token: Token


@dataclass(frozen=True, slots=True)
class PrefillParked:
    """A prefill worker's request is complete but for its hand-over. Its blocks stay its own."""

    key: Key
    request: Request
    timing: Timing


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is complete; its blocks are free. `text` is what was held back until now."""

    key: Key
    reason: FinishReason
    stop: str | int | None
    text: str
    num_prompt: int
    num_generated: int
    num_cached: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Broken:
    """The request failed; its blocks are free, or will be when its transfer ended."""

    key: Key
    error: NeuronDiError


EngineEvent = Emitted | PrefillParked | Ended | Broken
