"""Where the proxy knows its workers from, as metrics: what is wrong, and who is left out."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from neuron_di_proxy.directory import CandidDirectory
from neuron_di_proxy.health import HealthReport


def directory_families(
    reports: Sequence[HealthReport], directory: CandidDirectory | None
) -> Iterable[Metric]:
    """All of them, whatever kind of directory there is: nothing is wrong with one that is silent.

    Faults are a few words of ours. Neither keys nor worker ids of others become labels.
    """
    ignored = CounterMetricFamily(
        "neuron_di_registry_ignored", "keys that were left out", labels=("fault",)
    )
    if directory is not None:
        for fault, count in directory.num_ignored_by_fault().items():
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
