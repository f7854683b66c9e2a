"""How the proxy and its workers are: the answers to GET /status and GET /health."""

import asyncio
import os
from typing import Literal

import msgspec

from neuron_di.clock import unix_s
from neuron_di.errors import PeerError
from neuron_di.types import WorkerId
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.directory import NamedDirectory
from neuron_di_proxy.failure import without_places
from neuron_di_proxy.health import Health
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.partners import shared_names, why_alone
from neuron_di_proxy.route import Router
from neuron_di_proxy.self_test import PairBook
from neuron_di_proxy.workers import Process, Workers, place_of, process_of

LOST = ("frozen", "down")


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
    why_alone: str = ""  # why no other worker fits it, where it is half of a pair
    vanished_s: float | None = None  # how long its key has been gone from the registry
    age_s: float | None = None  # since its process started, by the clocks of both machines
    num_open: int = 0  # legs that this proxy process has there

    @property
    def is_shunned(self) -> bool:
        """Whether the proxy gives it no requests because something is wrong with it."""
        return self.health in ("suspect", "frozen", "down", "broken")

    def shown_state(self) -> str:
        """The worker's own word, unless the proxy knows better."""
        if self.is_shunned or self.health == "vanished":
            return self.health
        return "unreachable" if self.status is None else self.status.record.state


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last hand-over that was tried on purpose, to see whether it works."""

    prefill: WorkerId
    decode: WorkerId
    outcome: Literal["ok", "failed", "skipped"]
    reason: str = ""


class RefusedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A key of the registry whose worker is not used. `worker_id` is empty where none is named."""

    key: str
    worker_id: str
    reason: str


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    """`siblings` are the other processes of a proxy that is several; `proxy` is who answers.

    Another proxy at the same registry has a view of its own, and is asked for itself.
    """

    proxy: ProxyStatus
    siblings: list[ProxyStatus] = []
    workers: list[WorkerReport]
    pairs: list[PairReport] = []
    refused: list[RefusedReport] = []  # the latest of them
    ignored: dict[str, int] = {}  # keys that were left out since the start, by what was wrong
    remarks: list[str] = []  # what else an operator should know, a sentence each


class Degraded(msgspec.Struct, frozen=True, kw_only=True):
    """What does not work although requests are served: a pair, one worker, or neither is named."""

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
    known = health.reports()
    alone = why_alone([each.record for each in known if each.state not in LOST])
    asking = (
        _report_worker(workers, each, alone.get(process_of(each.record), "")) for each in known
    )
    reports = await asyncio.gather(*asking)
    directory = health.candid_directory()
    refused = [] if directory is None else directory.refused()
    return StatusReport(
        proxy=report_proxy(admission),
        workers=reports,
        pairs=_pair_reports(pairs, known),
        refused=[RefusedReport(key=e.key, worker_id=e.worker_id, reason=e.reason) for e in refused],
        ignored={} if directory is None else dict(directory.num_ignored_by_fault()),
        remarks=_remarks(health, known),
    )


def _remarks(health: Health, known: list[HealthReport]) -> list[str]:
    trouble = _directory_trouble(health)
    names = shared_names(each.record for each in known if each.state not in LOST)
    return ([trouble] if trouble else []) + names


def _directory_trouble(health: Health) -> str:
    directory = health.candid_directory()
    trouble = "" if directory is None else directory.trouble()
    return f"who is known may be old: {trouble}" if trouble else ""


def report_proxy(admission: Admission) -> ProxyStatus:
    """How this process is."""
    return ProxyStatus(
        pid=os.getpid(),
        num_running=admission.num_running,
        num_admitted=admission.num_admitted,
        is_draining=admission.is_draining,
    )


def report_health(router: Router, health: Health, pairs: PairBook) -> HealthAnswer:
    """Whether requests are served, and what does not work. Asks nobody.

    Anybody may read it, so it does not say where things are, as /status does.
    """
    reason = router.why_unserved()
    trouble = _directory_trouble(health)
    directory = health.candid_directory()
    lacks = [trouble] if trouble else []
    lacks += directory.missing() if isinstance(directory, NamedDirectory) else []
    if reason is not None:
        reason = "; ".join([reason, *lacks])
        return HealthAnswer(status="unavailable", reason=without_places(reason))
    reports = health.reports()
    replaced = _replaced(reports)
    degraded = [
        _degraded_worker(each)
        for each in reports
        if each.state in (*LOST, "broken") and process_of(each.record) not in replaced
    ]
    degraded += [
        Degraded(prefill=pair.prefill, decode=pair.decode, reason=pair.reason)
        for pair in _pair_reports(pairs, reports)
        if pair.outcome == "failed"
    ]
    degraded += [Degraded(prefill=None, decode=None, reason=each) for each in lacks]
    degraded = [
        msgspec.structs.replace(each, reason=without_places(each.reason)) for each in degraded
    ]
    return HealthAnswer(status="degraded" if degraded else "ok", degraded=degraded)


def _replaced(reports: list[HealthReport]) -> set[Process]:
    """Who is lost, and has a successor under its name or at its address that is not.

    Its key stays for as long as its lease: nothing is amiss because of it.
    """
    alive = [each.record for each in reports if each.state not in LOST]
    names, places = {each.worker_id for each in alive}, {place_of(each) for each in alive}
    return {
        process_of(each.record)
        for each in reports
        if each.state in LOST
        and (each.record.worker_id in names or place_of(each.record) in places)
    }


def _degraded_worker(report: HealthReport) -> Degraded:
    worker_id, role = report.record.worker_id, report.record.role
    return Degraded(
        prefill=None if role == "decode" else worker_id,
        decode=None if role == "prefill" else worker_id,
        reason=report.reason or f"worker {worker_id} failed too often",
    )


def _pair_reports(pairs: PairBook, reports: list[HealthReport]) -> list[PairReport]:
    """What pairs of living workers did. What the dead did together is over."""
    lost = {process_of(each.record) for each in reports if each.state in LOST}
    return [
        PairReport(
            prefill=result.prefill.worker_id,
            decode=result.decode.worker_id,
            outcome=result.outcome,
            reason=result.reason,
        )
        for result in pairs.results()
        if not lost & {process_of(result.prefill), process_of(result.decode)}
    ]


async def _report_worker(workers: Workers, report: HealthReport, alone: str) -> WorkerReport:
    status, unreachable = None, None
    try:
        status = await workers.status(report.record)
    except PeerError as error:
        unreachable = error.message
    else:
        if status.record.incarnation != report.record.incarnation:
            unreachable = f"{status.record.worker_id}, another process, answers at its address"
            status = None
    return WorkerReport(
        record=report.record,
        status=status,
        unreachable=unreachable,
        health=report.state,
        health_reason=report.reason,
        why_alone=alone,
        vanished_s=report.vanished_s,
        age_s=max(0.0, unix_s() - report.record.started_unix_s),
        num_open=report.num_open,
    )
