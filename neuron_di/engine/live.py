"""A request that an engine has, and since when it is in which phase."""

from dataclasses import dataclass, field

from neuron_di.clock import now_s
from neuron_di.engine.events import Timing
from neuron_di.engine.prompt_scores import PromptScores
from neuron_di.request import Request


@dataclass(slots=True)
class Live:
    """The engine's, from when it was added until it ends or its KV was taken."""

    request: Request
    timing: Timing = field(default_factory=Timing)
    since_s: float = field(default_factory=now_s)  # when the current phase began
    prompt: PromptScores | None = None  # where the client asked for a report
