"""`neuron-di status`: the proxy's view of its workers, as a table or as JSON."""

from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from neuron_di.proxy_answers import ask_status
from neuron_di.wire import WorkerStatus
from neuron_di_proxy.status import StatusReport, WorkerReport


def show_status(url: str, *, key: str | None = None, as_json: bool) -> int:
    """Print who is there. PeerGone when no proxy answers at `url`."""
    report, body = ask_status(url, key)
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
    for words in notes(report):
        console.print(words)


def notes(report: StatusReport) -> Iterator[str]:
    """What an operator should know, a line each."""
    yield from map(printable, _notes(report))


def printable(text: str) -> str:
    """Without what would command a terminal: a worker may say anything."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _notes(report: StatusReport) -> Iterator[str]:
    for worker in report.workers:
        worker_id = worker.record.worker_id
        if worker.is_shunned:
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


def _row(worker: WorkerReport) -> list[str]:
    record, status = worker.record, worker.status
    if status is None:
        return [printable(record.worker_id), record.role, worker.shown_state(), str(record.pid)]
    num_transferring = str(status.num_transferring)
    return [
        printable(record.worker_id),
        record.role,
        worker.shown_state(),
        str(record.pid),
        str(status.num_blocks_free),
        str(status.num_blocks),
        str(status.num_waiting),
        str(status.num_running),
        num_transferring if record.role == "prefill" else "-",
        num_transferring if record.role == "decode" else "-",
    ]
