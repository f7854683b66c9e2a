"""The answer to GET /status: how the proxy is, and every worker as it says itself."""

import asyncio
import os

import msgspec

from neuron_di.errors import PeerError
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.worker_client import WorkerClient


class ProxyStatus(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    num_running: int
    num_admitted: int  # since the proxy started
    is_draining: bool


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the directory has it, and as it answered just now; one of the two is None."""

    record: WorkerRecord
    status: WorkerStatus | None = None
    unreachable: str | None = None  # why it did not answer


class StatusReport(msgspec.Struct, frozen=True, kw_only=True):
    proxy: ProxyStatus
    workers: list[WorkerReport]


async def report_status(
    admission: Admission, client: WorkerClient, records: tuple[WorkerRecord, ...]
) -> StatusReport:
    """Ask all workers at the same time. Takes as long as the slowest, at most its deadline."""
    reports = await asyncio.gather(*(_report_worker(client, record) for record in records))
    proxy = ProxyStatus(
        pid=os.getpid(),
        num_running=admission.num_running,
        num_admitted=admission.num_admitted,
        is_draining=admission.is_draining,
    )
    return StatusReport(proxy=proxy, workers=reports)


async def _report_worker(client: WorkerClient, record: WorkerRecord) -> WorkerReport:
    try:
        status = await client.status(record)
    except PeerError as error:
        return WorkerReport(record=record, unreachable=error.message)
    return WorkerReport(record=record, status=status)
