"""What a monitoring system may know: GET /metrics, in Prometheus' text format.

Every label has a bounded set of values: codes are ours, worker ids the operator's, a model's
name is one that a worker has. Everything is counted in plain numbers, and only written out when
it is asked for. `docs/metrics.md` lists all names.

Next: proxy/neuron_di_proxy/model_metrics.py, proxy/neuron_di_proxy/worker_metrics.py
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from neuron_di.errors import ClientError, KvError, NeuronDiError
from neuron_di_proxy.directory import CandidDirectory
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.model_metrics import ModelMetrics, model_families
from neuron_di_proxy.receipts import Grade, Receipt
from neuron_di_proxy.self_test import PairResult
from neuron_di_proxy.tenant_metrics import TenantMetrics
from neuron_di_proxy.worker_metrics import directory_families, worker_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TRANSFER_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30)
LINKS_MAX = 8  # names of transfer engines, which workers say
MODELS_MAX = 64  # since the start, those that have gone included
OTHER = "other"
_ENDED_WELL = ("stop", "length", "cancelled")  # what failed has a code

TraceOutcome = Literal["sent", "dropped"]


class Gauges(Protocol):
    """What is true at this moment; read at each scrape."""

    def num_running(self) -> int: ...

    def num_waiting(self) -> int: ...

    def retry_budget(self) -> float: ...

    def health_reports(self) -> list[HealthReport]: ...

    def pair_results(self) -> list[PairResult]: ...

    def candid_directory(self) -> CandidDirectory | None: ...


@dataclass(slots=True)
class ConnectionCounts:
    """Of clients' connections. Written by the front that accepts them."""

    num_open: int = 0
    num_refused: int = 0  # beyond the limit, since the start


class Metrics(Collector):
    """Counts what becomes of requests. One per proxy process, owned by its event loop."""

    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._models: dict[str, ModelMetrics] = {}
        # What is not there before it happens first is no increase to a monitoring system.
        codes = sorted(_codes(NeuronDiError))
        self._requests = Counter({(outcome, ""): 0 for outcome in _ENDED_WELL})
        self._requests.update(dict.fromkeys((("error", code) for code in codes), 0))
        self._attempts = Counter(dict.fromkeys((*_ENDED_WELL, *codes), 0))
        self._continued = Counter(dict.fromkeys(get_args(Grade), 0))
        self._transfer_failures = Counter(dict.fromkeys(sorted(_kv_codes), 0))
        self._traces = Counter(dict.fromkeys(get_args(TraceOutcome), 0))
        self._transfers: dict[str, Histogram] = {}  # by link
        self._hand_overs: Counter[tuple[str, str]] = Counter()  # by link and form
        self._kv_bytes: Counter[str] = Counter()  # by link
        self._verify_s = 0.0
        self.connections = ConnectionCounts()
        self.tenants = TenantMetrics()

    def of(self, model: str) -> ModelMetrics:
        """What is counted of a model. All that no worker has are one: clients name anything."""
        known = self._models.get(model)
        if known is not None:
            return known
        names = {report.record.model for report in self._gauges.health_reports()}
        if model not in names or len(self._models) >= MODELS_MAX:
            model = OTHER
        return self._models.setdefault(model, ModelMetrics())

    def count(self, receipt: Receipt, code: str | None) -> None:
        """A choice ended. `code` says why where it failed."""
        ended = receipt.finish_reason
        self.tenants.count(receipt)
        self._requests[ended, bounded_code(code)] += 1
        # What was refused is no answer, and took no time.
        if receipt.num_generated or code not in _refusal_codes():
            self.of(receipt.model).count(receipt)
        last = receipt.attempts[-1] if receipt.attempts else None
        for attempt in receipt.attempts:
            reason = bounded_code(attempt.code)
            if reason in _kv_codes:
                self._transfer_failures[reason] += 1
            self._attempts[reason or (ended if attempt is last else OTHER)] += 1
        if receipt.grade is not None:
            self._continued[receipt.grade] += 1
        self._verify_s += receipt.verify_s
        if receipt.link:
            link = self._bounded_link(receipt.link)
            self._hand_overs[link, receipt.form or ""] += 1
            self._kv_bytes[link] += receipt.kv_bytes
            self._transfers[link].observe(receipt.transfer_s)

    def count_refused(self, code: str) -> None:
        """A request was refused before anything was tried."""
        self._requests["error", bounded_code(code)] += 1

    def count_left(self, model: str, tenant: str, num_choices: int, waited_s: float) -> None:
        """A client left while its request waited for its turn."""
        self._requests["cancelled", ""] += num_choices
        self.tenants.count_left(tenant, num_choices)
        self.of(model).count_left(num_choices, waited_s)

    def count_traces(self, outcome: TraceOutcome, num: int) -> None:
        """What became of traces that were to be exported."""
        self._traces[outcome] += num

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        gauges = self._gauges
        for report in gauges.health_reports():
            self.of(report.record.model)
        yield from model_families(self._models)
        yield self._handed_over()
        counters = (
            ("requests", "requests by outcome", ("outcome", "code"), self._requests),
            ("attempts", "attempts by what became of them", ("reason",), _keyed(self._attempts)),
            ("continued", "answers that were continued", ("grade",), _keyed(self._continued)),
            (
                "transfer_failures",
                "attempts that failed because KV was lost or wrong",
                ("code",),
                _keyed(self._transfer_failures),
            ),
            (
                "hand_overs",
                "answers whose KV went from one worker to another",
                ("link", "form"),
                self._hand_overs,
            ),
            (
                "kv_bytes",
                "bytes of KV that were moved for answers",
                ("link",),
                _keyed(self._kv_bytes),
            ),
            ("kv_verify_seconds", "spent on digests of that KV", (), {(): self._verify_s}),
            ("traces", "traces of answers, by export", ("outcome",), _keyed(self._traces)),
            (
                "connections_refused",
                "clients' connections beyond the limit",
                (),
                {(): self.connections.num_refused},
            ),
        )
        for name, words, labels, values in counters:
            counter = CounterMetricFamily(f"neuron_di_{name}", words, labels=labels)
            for key, value in values.items():
                counter.add_metric(key, value)
            yield counter
        yield from self.tenants.families()
        for name, words, number in (
            ("inflight", "requests that run now", gauges.num_running()),
            ("waiting", "requests that wait, or whose body is being read", gauges.num_waiting()),
            ("retry_budget", "further attempts that may be made at once", gauges.retry_budget()),
            ("connections", "clients' connections that are open", self.connections.num_open),
        ):
            yield GaugeMetricFamily(f"neuron_di_{name}", words, value=number)
        reports = gauges.health_reports()
        yield from worker_families(reports, gauges.pair_results())
        yield from directory_families(reports, gauges.candid_directory())

    def _bounded_link(self, link: str) -> str:
        """The name that a link is counted by: workers might say any."""
        if link not in self._transfers:
            if len(self._transfers) >= LINKS_MAX:
                link = OTHER
            self._transfers.setdefault(link, Histogram(TRANSFER_BUCKETS_S))
        return link

    def _handed_over(self) -> Metric:
        transfers = HistogramMetricFamily(
            "neuron_di_transfer_seconds",
            "moved one prompt's KV from prefill to decode",
            labels=("link",),
        )
        for link, histogram in self._transfers.items():
            transfers.add_metric((link,), histogram.buckets(), histogram.total)
        return transfers


def _keyed(counts: Counter[str]) -> dict[tuple[str, ...], float]:
    return {(key,): count for key, count in counts.items()}


def _kinds(kind: type[NeuronDiError]) -> Iterator[type[NeuronDiError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds(each)


def _codes(kind: type[NeuronDiError]) -> set[str]:
    return {each.code for each in _kinds(kind)}


@cache
def _refusal_codes() -> set[str]:
    """Those by which only clients are at fault. At its first use all kinds are there."""
    return _codes(ClientError) - {
        kind.code for kind in _kinds(NeuronDiError) if not issubclass(kind, ClientError)
    }


_kv_codes = _codes(KvError)
_known_codes: set[str] = set()  # seen in use


def bounded_code(code: str | None) -> str:
    """A code of ours; a worker might say any. Empty for none."""
    if code is None:
        return ""
    if code not in _known_codes:
        if code not in _codes(NeuronDiError):
            return OTHER
        _known_codes.add(code)
    return code
