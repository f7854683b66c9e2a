"""A question that only hardware can answer, and what this machine answered."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from neuron_di.doctor.finding import Grade

QUESTIONS = {
    1: "Which runtime is it, and does it have what the bindings expect?",
    2: "Does send and receive open, with which limits, and which variables does it need?",
    3: "Does libfabric see EFA, and does it know Neuron memory?",
    4: "Is the address that torch gives for a model's KV one that the runtime and EFA know?",
    5: "Does NIXL read one core's memory from another core's process?",
    6: "How much longer do decode steps take while the same core sends?",
    7: "What becomes of posted requests, and of the core, when the peer is killed?",
    8: "Are received bytes there before a flush?",
}


@dataclass(frozen=True, slots=True)
class Point:
    """The answer to the question of this number, in one sentence. `outcome`: ok, a note, failed or
    skipped. `facts` are JSON's."""

    number: int
    outcome: Grade
    answer: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        return QUESTIONS[self.number]


def skipped(number: int, why: str) -> Point:
    return Point(number, Grade.SKIPPED, why)
