"""How the proxy and its workers are: the answers to GET /status and GET /health."""

import asyncio
import os
from typing import Literal

import msgspec

from neuron_di.errors import PeerError
from neuron_di.types import WorkerId
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.health import Health, HealthReport
from neuron_di_proxy.route import Router
from neuron_di_proxy.self_test import PairBook
from neuron_di_proxy.workers import Workers


class ProxyStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    num_running: int
    num_admitted: int  # since the proxy started
    is_draining: bool


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the directory has it, and as it answered just now; one of the two is None.

    `health` is what the proxy goes by when it gives requests to workers.
    """

    record: WorkerRecord
    status: WorkerStatus | None = None
    unreachable: str | None = None  # why it did not answer
    health: str = "new"
    health_reason: str = ""

    @property
    def is_shunned(self) -> bool:
        """Whether the proxy gives it no requests because something is wrong with it."""
        return self.health in ("suspect", "frozen", "down", "broken")

    def shown_state(self) -> str:
        """The worker's own word, unless the proxy knows better."""
        if self.is_shunned:
            return self.health
        return "unreachable" if self.status is None else self.status.record.state


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last hand-over that was tried on purpose, to see whether it works."""

    prefill: WorkerId
    decode: WorkerId
    outcome: Literal["ok", "failed", "skipped"]
    reason: str = ""


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """`siblings` are the other processes of a proxy that is several; `proxy` is who answers."""

    proxy: ProxyStatus
    siblings: list[ProxyStatus] = []
    workers: list[WorkerReport]
    pairs: list[PairReport] = []


class Degraded(msgspec.Struct, frozen=True, kw_only=True):
    """What does not work although requests are served: a pair, or one worker."""

    prefill: WorkerId | None
    decode: WorkerId | None
    reason: str


class HealthAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether requests are served. `reason`: why not."""

    status: Literal["ok", "degraded", "unavailable"]
    reason: str | None = None
    degraded: list[Degraded] = []


async def report_status(
    admission: Admission, workers: Workers, health: Health, pairs: PairBook
) -> StatusReport:
    """Ask all workers at the same time. Takes as long as the slowest, at most its deadline."""
    reports = await asyncio.gather(*(_report_worker(workers, each) for each in health.reports()))
    return StatusReport(proxy=report_proxy(admission), workers=reports, pairs=_pair_reports(pairs))


def report_proxy(admission: Admission) -> ProxyStatus:
    """How this process is."""
    return ProxyStatus(
        pid=os.getpid(),
        num_running=admission.num_running,
        num_admitted=admission.num_admitted,
        is_draining=admission.is_draining,
    )


def report_health(router: Router, health: Health, pairs: PairBook) -> HealthAnswer:
    """Whether requests are served, and what does not work. Asks nobody."""
    reason = router.why_unserved()
    if reason is not None:
        return HealthAnswer(status="unavailable", reason=reason)
    degraded = [_degraded_worker(each) for each in health.reports() if _is_down(each)]
    degraded += [
        Degraded(prefill=pair.prefill, decode=pair.decode, reason=pair.reason)
        for pair in _pair_reports(pairs)
        if pair.outcome == "failed"
    ]
    return HealthAnswer(status="degraded" if degraded else "ok", degraded=degraded)


def _is_down(report: HealthReport) -> bool:
    return report.state in ("frozen", "down", "broken")


def _degraded_worker(report: HealthReport) -> Degraded:
    worker_id, role = report.record.worker_id, report.record.role
    return Degraded(
        prefill=None if role == "decode" else worker_id,
        decode=None if role == "prefill" else worker_id,
        reason=report.reason or f"worker {worker_id} failed too often",
    )


def _pair_reports(pairs: PairBook) -> list[PairReport]:
    return [
        PairReport(
            prefill=result.prefill.worker_id,
            decode=result.decode.worker_id,
            outcome=result.outcome,
            reason=result.reason,
        )
        for result in pairs.results()
    ]


async def _report_worker(workers: Workers, report: HealthReport) -> WorkerReport:
    status, unreachable = None, None
    try:
        status = await workers.status(report.record)
    except PeerError as error:
        unreachable = error.message
    return WorkerReport(
        record=report.record,
        status=status,
        unreachable=unreachable,
        health=report.state,
        health_reason=report.reason,
    )
