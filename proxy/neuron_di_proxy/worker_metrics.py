"""What the proxy knows of its workers, and where from, as metrics: read at each scrape."""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from neuron_di.registry.record_reader import Fault
from neuron_di.types import Role
from neuron_di.wire import LANES_MAX, WorkerStatus
from neuron_di_proxy.directory import CandidDirectory
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.model_metrics import MODEL_LABEL
from neuron_di_proxy.self_test import PairResult

# By its status' fields.
_GAUGES = {
    "num_running": ("running", "requests that it computes"),
    "num_waiting": ("waiting", "requests that it has not begun"),
    "num_transferring": ("transferring", "requests whose KV is parked here, or being received"),
    "num_blocks": ("blocks", "blocks of KV that it has"),
    "num_blocks_free": ("blocks_free", "blocks of KV that are free"),
    "num_blocks_cached": ("blocks_cached", "blocks with KV of prompts, free where needed"),
    "num_blocks_quarantined": ("blocks_quarantined", "blocks that a transfer may still touch"),
    "landing_bytes": ("landing_bytes", "bytes of memory for KV of another layout"),
    "landing_bytes_asked": ("landing_bytes_asked", "bytes of that that are taken or waited for"),
}
# Since its process started, or took its role.
_COUNTERS = {
    "kv_bytes_received": ("kv_bytes_received", "bytes of KV that it received"),
    "num_kv_mismatched": ("kv_mismatched", "received KV that was not what was promised"),
    "num_leases_ended": ("leases_ended", "KV that nobody pulled in time"),
    "num_signals_refused": ("signals_refused", "messages of peers that were refused"),
    "num_lanes_failed": ("lanes_failed", "connections to peers' KV that broke in use"),
    "num_fallbacks": ("fallbacks", "connections to peers' KV by other than the preferred engine"),
    "num_streams_refused": ("streams_refused", "prompts whose layers were not as promised"),
    "num_stale": ("stale", "messages of peers that came too late or twice"),
}


def kv_usage(status: WorkerStatus) -> float:
    """How much of a worker's KV is in use, 0 to 1. What is only kept for reuse is not."""
    if status.num_blocks == 0:
        return 0.0
    return 1 - (status.num_blocks_free + status.num_blocks_cached) / status.num_blocks


def worker_families(reports: list[HealthReport], pairs: list[PairResult]) -> Iterable[Metric]:
    """As each worker said when it was last asked."""
    yield _states(reports)
    yield _kv_usages(reports)
    yield from _own_counts(reports)
    yield _lanes(reports)
    degraded = GaugeMetricFamily(
        "neuron_di_pair_degraded",
        "1 where a prefill and a decode worker cannot hand over",
        labels=("prefill", "decode"),
    )
    # By worker, not by process: the later result is the one of the later process.
    results = {
        (result.prefill.worker_id, result.decode.worker_id): result.outcome == "failed"
        for result in pairs
    }
    for pair, is_degraded in results.items():
        degraded.add_metric(pair, float(is_degraded))
    yield degraded


def _states(reports: list[HealthReport]) -> Metric:
    workers = GaugeMetricFamily(
        "neuron_di_workers", "workers by role and state", labels=("role", "state")
    )
    # Who died is soon listed no more: what tells a monitoring system is that fewer are up.
    counts = {(str(role), "up"): 0 for role in get_args(Role)}
    for report in reports:
        key = (str(report.record.role), str(report.state))
        counts[key] = counts.get(key, 0) + 1
    for labels, count in counts.items():
        workers.add_metric(labels, count)
    return workers


def _kv_usages(reports: list[HealthReport]) -> Metric:
    usages = GaugeMetricFamily(
        "vllm:kv_cache_usage_perc",
        "how much of a worker's KV is in use, 0 to 1; `engine` is its id",
        labels=(MODEL_LABEL, "engine"),
    )
    by_worker = {
        (report.record.model, report.record.worker_id): kv_usage(report.status)
        for report in reports
        if report.status is not None
    }
    for labels, usage in by_worker.items():
        usages.add_metric(labels, usage)
    return usages


def _own_counts(reports: list[HealthReport]) -> Iterator[Metric]:
    statuses = {each.record.worker_id: each.status for each in reports}
    for of_kind, make in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
        for field, (name, words) in of_kind.items():
            family = make(f"neuron_di_worker_{name}", words, labels=("worker",))
            for worker_id, status in statuses.items():
                if status is not None:
                    family.add_metric((worker_id,), getattr(status, field))
            yield family


def _lanes(reports: list[HealthReport]) -> Metric:
    lanes = GaugeMetricFamily(
        "neuron_di_worker_lane",
        "1 for each prefill worker (`peer`) that it takes KV from: by which engine, and why",
        labels=("worker", "peer", "engine", "reason"),
    )
    # Two processes of a peer, or two links to it, may be alike.
    found = {
        (report.record.worker_id, lane.peer, lane.engine, lane.verdicts)
        for report in reports
        if report.status is not None
        for lane in report.status.lanes[:LANES_MAX]
    }
    for labels in sorted(found):
        lanes.add_metric(labels, 1)
    return lanes


def directory_families(
    reports: Sequence[HealthReport], directory: CandidDirectory | None
) -> Iterable[Metric]:
    """All of them, whatever kind of directory there is: nothing is wrong with one that is silent.

    Faults are a few words of ours. Neither keys nor worker ids of others become labels.
    """
    ignored = CounterMetricFamily(
        "neuron_di_registry_ignored", "keys that were left out", labels=("fault",)
    )
    # What is not there before it happens first is no increase to a monitoring system.
    counts: dict[str, int] = dict.fromkeys((*get_args(Fault), "unread"), 0)
    if directory is not None:
        counts.update(directory.num_ignored_by_fault())
    for fault, count in counts.items():
        ignored.add_metric((fault,), count)
    yield ignored
    num_vanished = sum(report.vanished_s is not None for report in reports)
    num_refused = 0 if directory is None else len(directory.refused())
    has_trouble = directory is not None and bool(directory.trouble())
    for name, words, number in (
        ("refused", "workers and keys that are left out now and are known by name", num_refused),
        ("vanished", "workers that are used although their key is gone", num_vanished),
        ("trouble", "1 while who is known may be old", int(has_trouble)),
    ):
        yield GaugeMetricFamily(f"neuron_di_registry_{name}", words, value=number)
