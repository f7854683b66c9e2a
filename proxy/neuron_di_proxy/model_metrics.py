"""What becomes of one model's requests, under the names that vLLM gives such metrics.

A dashboard made for vLLM shows this proxy too. `docs/metrics.md` says where we mean more.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from neuron_di.errors import Preempted
from neuron_di.types import FinishReason
from neuron_di_proxy.histogram import Histogram, observe_all
from neuron_di_proxy.receipts import Receipt

MODEL_LABEL = "model_name"
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)
REQUEST_BUCKETS_S = (0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKEN_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)

# Each histogram's name, buckets and words. The order is that of `ModelMetrics.histograms`.
_HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", FIRST_TOKEN_BUCKETS_S, "arrival to first token"),
    ("vllm:inter_token_latency_seconds", TOKEN_BUCKETS_S, "between two tokens of an answer"),
    (
        "vllm:request_time_per_output_token_seconds",
        TOKEN_BUCKETS_S,
        "mean time between an answer's tokens",
    ),
    ("vllm:e2e_request_latency_seconds", REQUEST_BUCKETS_S, "arrival to end"),
    ("vllm:request_queue_time_seconds", WAIT_BUCKETS_S, "waited, here and at the worker"),
    ("vllm:request_prefill_time_seconds", FIRST_TOKEN_BUCKETS_S, "computed the prompt"),
    ("vllm:request_decode_time_seconds", REQUEST_BUCKETS_S, "computed the rest of the answer"),
    ("vllm:request_prompt_tokens", TOKEN_COUNTS, "tokens of a prompt"),
    ("vllm:request_generation_tokens", TOKEN_COUNTS, "tokens of an answer"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "tokens of prompts that were computed or found"),
    ("vllm:generation_tokens", "tokens of answers, counted as they come"),
    ("vllm:prefix_cache_queries", "tokens of prompts whose KV was looked for"),
    ("vllm:prefix_cache_hits", "tokens of prompts whose KV was found"),
    ("vllm:num_preemptions", "attempts that ended because a worker's pool was full"),
)
_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "error": "error",
}


class ModelMetrics:
    """Counts one model's choices. A choice is what vLLM calls a request."""

    def __init__(self) -> None:
        self.histograms = tuple(Histogram(bounds) for _, bounds, _ in _HISTOGRAMS)
        (
            self._first_token,
            self.gaps,  # a token came so many seconds after the one before
            self._per_token,
            self._request,
            self._queue,
            self._prefill,
            self._decode,
            self._prompt_tokens,
            self._answer_tokens,
        ) = self.histograms
        self.num_running = 0  # choices of requests that run, by those who run them
        self.num_waiting = 0  # likewise, of those that wait for their turn
        self.num_unrouted = 0  # of those that run, by the runner: they wait for a worker
        self.num_by_reason = dict.fromkeys(_REASONS.values(), 0)
        self._num_prompt = 0
        self._num_cached = 0
        self._num_preempted = 0
        self._num_beside_gaps = 0  # tokens that came after no other, or never reached the proxy

    def count(self, receipt: Receipt) -> None:
        """A choice ended."""
        self.num_by_reason[_REASONS[receipt.finish_reason]] += 1
        observed: list[tuple[Histogram, float]] = [(self._request, receipt.e2e_s)]
        queued_s, prefill, decode = receipt.queued_s, receipt.prefill, receipt.decode
        if prefill is not None:
            queued_s += prefill.queued_s
            observed.append((self._prefill, prefill.prefill_s))
        if decode is not None:
            observed.append((self._decode, decode.decode_s))
        observed.append((self._queue, queued_s))
        if receipt.ttft_s is not None:
            observed.append((self._first_token, receipt.ttft_s))
        if receipt.itl_mean_s is not None:
            observed.append((self._per_token, receipt.itl_mean_s))
        if receipt.num_prompt:
            self._num_prompt += receipt.num_prompt
            self._num_cached += receipt.num_cached
            observed.append((self._prompt_tokens, receipt.num_prompt))
            observed.append((self._answer_tokens, receipt.num_generated))
        observe_all(observed)
        num_gaps = -1
        for attempt in receipt.attempts:
            num_gaps += attempt.num_tokens
            self._num_preempted += attempt.code == Preempted.code
        num_beside_gaps = receipt.num_generated - max(0, num_gaps)
        if num_beside_gaps > 0:
            self._num_beside_gaps += num_beside_gaps

    def count_left(self, num_choices: int, waited_s: float) -> None:
        """Choices of a client that left before their turn."""
        self.num_by_reason["abort"] += num_choices
        for _ in range(num_choices):
            self._request.observe(waited_s)
            self._queue.observe(waited_s)

    def totals(self) -> tuple[int, ...]:
        """As `_COUNTERS` names them. None of them ever falls."""
        num_generated = self.gaps.count() + self._num_beside_gaps
        found = self._num_prompt, self._num_cached
        return self._num_prompt, num_generated, *found, self._num_preempted


def model_families(models: dict[str, ModelMetrics]) -> Iterable[Metric]:
    """All that was counted, by the models' names."""
    for place, (name, _, words) in enumerate(_HISTOGRAMS):
        histograms = HistogramMetricFamily(name, words, labels=(MODEL_LABEL,))
        for model, metrics in models.items():
            histogram = metrics.histograms[place]
            histograms.add_metric((model,), histogram.buckets(), histogram.total)
        yield histograms
    totals = {model: metrics.totals() for model, metrics in models.items()}
    for place, (name, words) in enumerate(_COUNTERS):
        counters = CounterMetricFamily(name, words, labels=(MODEL_LABEL,))
        for model, numbers in totals.items():
            counters.add_metric((model,), numbers[place])
        yield counters
    ended = CounterMetricFamily(
        "vllm:request_success", "answers by how they ended", labels=(MODEL_LABEL, "finished_reason")
    )
    running = GaugeMetricFamily(
        "vllm:num_requests_running", "answers that are computed", labels=(MODEL_LABEL,)
    )
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting",
        "answers that wait, for their turn or for a worker",
        labels=(MODEL_LABEL,),
    )
    for model, metrics in models.items():
        for reason, count in metrics.num_by_reason.items():
            ended.add_metric((model, reason), count)
        num_unrouted = metrics.num_unrouted
        running.add_metric((model,), metrics.num_running - num_unrouted)
        waiting.add_metric((model,), metrics.num_waiting + num_unrouted)
    yield from (ended, running, waiting)
