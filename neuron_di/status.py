"""`neuron-di status`: the proxy's view of its workers, as a table or as JSON."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from neuron_di.errors import PeerGone, RemoteProtocolError
from neuron_di.wire import WorkerStatus
from neuron_di_proxy.status import StatusReport, WorkerReport

STATUS_TIMEOUT_S = 5.0
_NOT_USED = frozenset({"suspect", "frozen", "down", "broken"})  # states of a worker's health


def show_status(url: str, *, as_json: bool) -> int:
    """Print who is there. PeerGone when no proxy answers at `url`."""
    address = f"{url.rstrip('/')}/status"
    try:
        if not address.startswith(("http://", "https://")):
            raise ValueError("the address must start with http:// or https://")
        with urllib.request.urlopen(address, timeout=STATUS_TIMEOUT_S) as response:  # noqa: S310
            body: bytes = response.read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise PeerGone(f"no proxy answers at {url}: {reason}") from None
    try:
        report = msgspec.json.decode(body, type=StatusReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"{url} is not a neuron-di proxy: {error}") from None
    if as_json:
        print(msgspec.json.format(body, indent=2).decode())
    else:
        _print_table(url, report)
    return 0


def _print_table(url: str, report: StatusReport) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    state = "draining" if report.proxy.is_draining else "serving"
    console.print(
        f"proxy {url} pid {report.proxy.pid} {state}, {report.proxy.num_running} requests running, "
        f"{report.proxy.num_admitted} since start"
    )
    if not report.workers:
        console.print("no worker has announced itself")
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("pid", "free", "blocks", "waiting", "running", "parked", "receiving"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in report.workers:
        table.add_row(*_row(worker))
    console.print(table)
    for words in _notes(report):
        console.print(words)


def _notes(report: StatusReport) -> Iterator[str]:
    """What an operator should know, a line each."""
    for worker in report.workers:
        worker_id = worker.record.worker_id
        if worker.health in _NOT_USED:
            yield f"{worker_id} gets no requests: {worker.health_reason or worker.health}"
        elif worker.unreachable is not None:
            yield f"{worker_id} does not answer: {worker.unreachable}"
        if worker.status is not None:
            troubles = _troubles(worker.status)
            if troubles:
                yield f"{worker_id} since its start: {', '.join(troubles)}"
    for pair in report.pairs:
        if pair.outcome == "failed":
            yield f"{pair.prefill} cannot hand over to {pair.decode}: {pair.reason}"


def _troubles(status: WorkerStatus) -> list[str]:
    counted = (
        (status.num_kv_mismatched, "hand-overs with KV that was not as promised"),
        (status.num_leases_ended, "prompts whose KV nobody pulled in time"),
        (status.num_signals_refused, "signals refused"),
    )
    troubles = [f"{count} {words}" for count, words in counted if count]
    if status.num_blocks_quarantined:
        troubles.append(f"{status.num_blocks_quarantined} blocks await a transfer's end")
    return troubles


def _state(worker: WorkerReport, status: WorkerStatus) -> str:
    """The worker's own word, unless the proxy knows better."""
    return worker.health if worker.health in _NOT_USED else status.record.state


def _row(worker: WorkerReport) -> list[str]:
    record, status = worker.record, worker.status
    if status is None:
        state = worker.health if worker.health in _NOT_USED else "unreachable"
        return [record.worker_id, record.role, state, str(record.pid)]
    num_transferring = str(status.num_transferring)
    return [
        record.worker_id,
        record.role,
        _state(worker, status),
        str(record.pid),
        str(status.num_blocks_free),
        str(status.num_blocks),
        str(status.num_waiting),
        str(status.num_running),
        num_transferring if record.role == "prefill" else "-",
        num_transferring if record.role == "decode" else "-",
    ]
