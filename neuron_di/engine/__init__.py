"""The step loop, the sampler, and the events that tell of each request."""

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

__all__ = [
    "Broken",
    "Emitted",
    "Ended",
    "Engine",
    "EngineEvent",
    "Key",
    "PrefillParked",
    "StartTransfer",
    "Timing",
]
