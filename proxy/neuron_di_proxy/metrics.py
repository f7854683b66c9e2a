"""What a monitoring system may know: GET /metrics, in Prometheus' text format.

Every label has a bounded set of values: codes are ours, worker ids the operator's.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from neuron_di.errors import NeuronDiError
from neuron_di_proxy.health import HealthReport
from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.self_test import PairResult

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
ITL_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15)


class Gauges(Protocol):
    """What is true at this moment; read at each scrape."""

    def num_running(self) -> int: ...

    def retry_budget(self) -> float: ...

    def health_reports(self) -> list[HealthReport]: ...

    def pair_results(self) -> list[PairResult]: ...


class Metrics:
    """Counts what becomes of requests. One per proxy, with a registry of its own."""

    def __init__(self, gauges: Gauges) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_GaugeCollector(gauges))
        self._requests = self._counter("requests", "requests by outcome", "outcome", "code")
        self._attempts = self._counter("attempts", "attempts by what became of them", "reason")
        self._continued = self._counter("continued", "answers that were continued", "grade")
        self._kv_bytes = self._counter("kv_bytes", "bytes of KV that were moved for answers")
        self._verify_s = self._counter("kv_verify_seconds", "spent on digests of that KV")
        self._ttft = Histogram(
            "neuron_di_ttft_seconds",
            "from a request to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._itl = Histogram(
            "neuron_di_itl_seconds",
            "between two tokens of an answer",
            buckets=ITL_BUCKETS_S,
            registry=self._registry,
        )

    def count(self, receipt: Receipt, code: str | None) -> None:
        """A request ended. `code` says why where it failed."""
        self._requests.labels(receipt.finish_reason, _bounded(code)).inc()
        for attempt in receipt.attempts:
            is_last = attempt is receipt.attempts[-1]
            reason = _bounded(attempt.code) or (receipt.finish_reason if is_last else "other")
            self._attempts.labels(reason).inc()
        if receipt.grade is not None:
            self._continued.labels(receipt.grade).inc()
        self._kv_bytes.inc(receipt.kv_bytes)
        self._verify_s.inc(receipt.verify_s)
        if receipt.ttft_s is not None:
            self._ttft.observe(receipt.ttft_s)

    def count_refused(self, code: str) -> None:
        """A request was refused before anything was tried."""
        self._requests.labels("error", _bounded(code)).inc()

    def count_gap(self, gap_s: float) -> None:
        """A token came `gap_s` after the one before it."""
        self._itl.observe(gap_s)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"neuron_di_{name}", words, labels, registry=self._registry)


# What each worker counts of itself, by its status' fields; since that process started.
_OF_WORKERS = {
    "num_blocks_free": ("blocks_free", "blocks of KV that are free"),
    "num_blocks_quarantined": ("blocks_quarantined", "blocks that a transfer may still touch"),
    "kv_bytes_received": ("kv_bytes_received", "bytes of KV that it received"),
    "num_kv_mismatched": ("kv_mismatched", "received KV that was not what was promised"),
    "num_leases_ended": ("leases_ended", "KV that nobody pulled in time"),
    "num_signals_refused": ("signals_refused", "messages of peers that were refused"),
    "num_stale": ("stale", "messages of peers that came too late or twice"),
}


class _GaugeCollector(Collector):
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        gauges = self._gauges
        yield GaugeMetricFamily(
            "neuron_di_inflight", "requests that run now", value=gauges.num_running()
        )
        yield GaugeMetricFamily(
            "neuron_di_retry_budget",
            "further attempts that may be made at once",
            value=gauges.retry_budget(),
        )
        workers = GaugeMetricFamily(
            "neuron_di_workers", "workers by role and state", labels=("role", "state")
        )
        reports = gauges.health_reports()
        counts: dict[tuple[str, str], int] = {}
        for report in reports:
            key = (str(report.record.role), str(report.state))
            counts[key] = counts.get(key, 0) + 1
        for labels, count in counts.items():
            workers.add_metric(labels, count)
        yield workers
        yield from _of_workers(reports)
        pairs = GaugeMetricFamily(
            "neuron_di_pair_degraded",
            "1 where a prefill and a decode worker cannot hand over",
            labels=("prefill", "decode"),
        )
        # By worker, not by process: the later result is the one of the later process.
        degraded = {
            (result.prefill.worker_id, result.decode.worker_id): result.outcome == "failed"
            for result in gauges.pair_results()
        }
        for pair, is_degraded in degraded.items():
            pairs.add_metric(pair, float(is_degraded))
        yield pairs


def _of_workers(reports: list[HealthReport]) -> Iterator[Metric]:
    """As each worker said when it was last asked."""
    statuses = {each.record.worker_id: each.status for each in reports}
    for field, (name, words) in _OF_WORKERS.items():
        gauge = GaugeMetricFamily(f"neuron_di_worker_{name}", words, labels=("worker",))
        for worker_id, status in statuses.items():
            if status is not None:
                gauge.add_metric((worker_id,), getattr(status, field))
        yield gauge


def _codes(kind: type[NeuronDiError]) -> Iterator[str]:
    yield kind.code
    for each in kind.__subclasses__():
        yield from _codes(each)


def _bounded(code: str | None) -> str:
    """A code of ours; a worker might say any. Empty for none."""
    if code is None:
        return ""
    return code if code in set(_codes(NeuronDiError)) else "other"
