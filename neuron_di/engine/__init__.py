"""The step loop, the sampler, and the offline LLM."""

from neuron_di.engine.engine import Engine, StartTransfer
from neuron_di.engine.events import (
    Broken,
    Emitted,
    Ended,
    EngineEvent,
    Key,
    PrefillParked,
    Timing,
)
from neuron_di.engine.sampler import SampledToken, describe_logprobs, sample

__all__ = [
    "Broken",
    "Emitted",
    "Ended",
    "Engine",
    "EngineEvent",
    "Key",
    "PrefillParked",
    "SampledToken",
    "StartTransfer",
    "Timing",
    "describe_logprobs",
    "sample",
]
