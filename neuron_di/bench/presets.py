"""Named sets of flags, as well known benchmarks use them. What is given beside one goes first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """`values` are by the name of the setting."""

    summary: str
    values: Mapping[str, Any]


PRESETS: Mapping[str, Preset] = {
    "llmperf": Preset(
        "1,024 tokens in, 100 ± 10 out, 200 requests, 4 at a time: LLMPerf in Neuron's guides",
        {
            "input_tokens": "1024",
            "output_tokens": "normal:100,10",
            "requests": 200,
            "concurrency": 4,
        },
    ),
    "vllm-random": Preset(
        "1,024 tokens in, 128 out, 1,000 requests, all at once: `vllm bench serve`'s own default",
        {
            "input_tokens": "1024",
            "output_tokens": "128",
            "requests": 1000,
            "rate": float("inf"),
        },
    ),
}
