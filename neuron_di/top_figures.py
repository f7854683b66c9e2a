"""What `neuron-di top` works out from two looks at a proxy: rates, and how long things took."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from prometheus_client.parser import text_string_to_metric_families

from neuron_di_proxy.status import StatusReport

# Of a histogram: how many values were at most this many seconds.
Buckets = Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A proxy as it was at one moment; counts are since it started, all models together."""

    at_s: float
    status: StatusReport
    num_waiting: float = 0.0
    num_prompt_tokens: float = 0.0
    num_answer_tokens: float = 0.0
    first_token: Buckets = field(default_factory=dict)
    gap: Buckets = field(default_factory=dict)

    def kv_bytes(self) -> dict[str, int]:
        """What each process of a worker received."""
        return {
            each.record.incarnation: each.status.kv_bytes_received
            for each in self.status.workers
            if each.status is not None
        }


def read_look(at_s: float, status: StatusReport, metrics: str) -> Look:
    """Put together what /status and /metrics said. ValueError where the latter are none."""
    totals: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for name, labels, value, *_ in family.samples:
            totals[name] = totals.get(name, 0.0) + value
            if name.endswith("_bucket"):
                of_name = buckets.setdefault(name, {})
                end_s = float(labels["le"])
                of_name[end_s] = of_name.get(end_s, 0.0) + value
    return Look(
        at_s=at_s,
        status=status,
        num_waiting=totals.get("neuron_di_waiting", 0.0),
        num_prompt_tokens=totals.get("vllm:prompt_tokens_total", 0.0),
        num_answer_tokens=totals.get("vllm:generation_tokens_total", 0.0),
        first_token=buckets.get("vllm:time_to_first_token_seconds_bucket", {}),
        gap=buckets.get("vllm:inter_token_latency_seconds_bucket", {}),
    )


def rate(before: float, after: float, duration_s: float) -> float:
    """Per second. What was counted anew, as by a process that restarted, began at nothing."""
    if duration_s <= 0:
        return 0.0
    return (after - before if after >= before else after) / duration_s


def quantile(before: Buckets, after: Buckets, part: float) -> float | None:
    """Which value `part` of all values between two looks were below; None: there were none.

    Values are taken to lie evenly in their bucket. Of the last one, only its beginning is known.
    """
    ends = sorted(after)
    counts = [after[end] - before.get(end, 0.0) for end in ends]
    if any(count < 0 for count in counts):  # counted anew
        counts = [after[end] for end in ends]
    if not counts or counts[-1] <= 0:
        return None
    wanted = part * counts[-1]
    below_s, num_below = 0.0, 0.0
    for end_s, count in zip(ends, counts, strict=True):
        if count >= wanted and count > num_below:
            if end_s == inf:
                return below_s
            return below_s + (end_s - below_s) * (wanted - num_below) / (count - num_below)
        below_s, num_below = end_s, count
    return None
