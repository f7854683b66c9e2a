"""`neuron-di status`: the proxy's view of its workers, as a table or as JSON.

    proxy http://127.0.0.1:8000 pid 4711 serving, 3 requests running, 812 since start
    worker     role     state   model  layout      load  KV  age  peers
    prefill-0  prefill  ready   tiny   1f0c93aa…   1/8  12%   3h      2

`load` is requests by slots, `peers` how many workers it has a connection to. What moves
KV between them, and what keeps a worker or a pair from being used, stands below the table.
"""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

import msgspec
from rich.console import Console
from rich.table import Table

from neuron_di.proxy_answers import ask_status
from neuron_di.terminal_text import print_table, printable
from neuron_di.types import Role
from neuron_di.wire import WorkerStatus
from neuron_di_proxy.partners import shown_digest
from neuron_di_proxy.status import ProxyStatus, StatusReport, WorkerReport
from neuron_di_proxy.worker_metrics import kv_usage

REFUSED_SHOWN_MAX = 8
PEERS_SHOWN_MAX = 4
MODEL_CHARS_MAX = 24
WIDE_CHARS = 96  # of a terminal that has room for a long model's name
_ROLES: tuple[Role, ...] = get_args(Role)
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


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
    console.print(f"proxy {url} {_proxy_words(report.proxy)}")
    for sibling in report.siblings:
        console.print(f"  and {_proxy_words(sibling)}")
    if report.workers:
        print_table(console, _table(report.workers, is_wide=console.width >= WIDE_CHARS))
    else:
        console.print("no worker is known")
    for words in lanes(report):
        console.print(words)
    for words in notes(report):
        console.print(words)


def _proxy_words(proxy: ProxyStatus) -> str:
    state = "draining" if proxy.is_draining else "serving"
    requests = "request" if proxy.num_running == 1 else "requests"
    counts = f"{proxy.num_running} {requests} running, {proxy.num_admitted} since start"
    return f"pid {proxy.pid} {state}, {counts}"


def _table(workers: list[WorkerReport], *, is_wide: bool) -> Table:
    """As wide as there is room: a long name of a worker is folded, that of a model cut."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    model_chars = MODEL_CHARS_MAX if is_wide else MODEL_CHARS_MAX // 2
    table.add_column("worker", overflow="fold", min_width=9)
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("model", overflow="ellipsis", no_wrap=True, max_width=model_chars)
    table.add_column("layout", no_wrap=True)
    for name in ("load", "KV", "age", "peers"):
        table.add_column(name, justify="right", no_wrap=True)
    names = Counter(worker.record.worker_id for worker in workers)
    for worker in sorted(workers, key=place_in_table):
        is_one_of_several = names[worker.record.worker_id] > 1
        table.add_row(*_row(worker, with_process=is_one_of_several))
    return table


def place_in_table(worker: WorkerReport) -> tuple[int, str, float]:
    """A key to sort by: roles together, then names, then lives of one name."""
    record = worker.record
    return _ROLES.index(record.role), record.worker_id, record.started_unix_s


def lanes(report: StatusReport) -> Iterator[str]:
    """What moves KV to each decode worker, and why not something else: a line for each kind."""
    # A worker that changed its role gives no KV any more, and its peers may still be connected.
    no_source = {each.record.worker_id for each in report.workers if each.record.role == "decode"}
    for worker in sorted(report.workers, key=place_in_table):
        peers: dict[tuple[str, str], list[str]] = {}
        for lane in worker.status.lanes if worker.status is not None else ():
            if lane.peer in no_source:
                continue
            peers.setdefault((lane.engine, lane.reason), []).append(lane.peer)
        for (engine, reason), names in peers.items():
            shown = ", ".join(sorted(names)[:PEERS_SHOWN_MAX])
            more = f" and {len(names) - PEERS_SHOWN_MAX} more" * (len(names) > PEERS_SHOWN_MAX)
            words = f"{worker.record.worker_id} takes KV from {shown}{more} by {engine} ({reason})"
            yield printable(words)


def notes(report: StatusReport) -> Iterator[str]:
    """What an operator should know, a line each."""
    yield from map(printable, report.remarks)
    yield from notes_of_workers(report)


def notes_of_workers(report: StatusReport) -> Iterator[str]:
    """Of that, what is about one worker, one pair, or one key of the registry."""
    yield from map(printable, _notes(report))


def _notes(report: StatusReport) -> Iterator[str]:
    for worker in report.workers:
        yield from _notes_of(worker)
    for pair in report.pairs:
        if pair.outcome == "failed":
            yield f"{pair.prefill} cannot hand over to {pair.decode}: {pair.reason}"
    for refused in report.refused[-REFUSED_SHOWN_MAX:]:
        yield f"{refused.worker_id or refused.key} is not used: {refused.reason}"
    if num_ignored := sum(report.ignored.values()):
        kinds = ", ".join(f"{fault} {num}" for fault, num in sorted(report.ignored.items()))
        yield f"{num_ignored} keys of the registry were left out since the start: {kinds}"


def _notes_of(worker: WorkerReport) -> Iterator[str]:
    worker_id = worker.record.worker_id
    if worker.is_shunned:
        yield f"{worker_id} gets no requests: {worker.health_reason or worker.health}"
    elif worker.unreachable is not None:
        yield f"{worker_id} does not answer: {worker.unreachable}"
    elif worker.vanished_s is not None:
        gone = shown_duration(worker.vanished_s)
        yield f"{worker_id} answers, and is used; its key has been gone for {gone}"
    if worker.why_alone:
        yield f"{worker_id} gets no requests: {worker.why_alone}"
    if worker.status is not None:
        troubles = _troubles(worker.status)
        if troubles:
            yield f"{worker_id} since its start: {', '.join(troubles)}"


def _troubles(status: WorkerStatus) -> list[str]:
    counted = (
        (status.num_kv_mismatched, "hand-overs with KV that was not as promised"),
        (status.num_leases_ended, "prompts whose KV nobody pulled in time"),
        (status.num_signals_refused, "signals refused"),
        (status.num_lanes_failed, "connections to KV that broke"),
        (status.num_fallbacks, "connections to KV by another way than the preferred"),
        (status.num_streams_refused, "prompts whose layers were not as promised, pulled whole"),
    )
    troubles = [f"{count} {words}" for count, words in counted if count]
    if status.num_blocks_quarantined:
        troubles.append(f"{status.num_blocks_quarantined} blocks await a transfer's end")
    return troubles


def _row(worker: WorkerReport, *, with_process: bool) -> list[str]:
    record, status = worker.record, worker.status
    name = f"{record.worker_id} ({record.incarnation[:6]})" if with_process else record.worker_id
    names = [printable(name), record.role, worker.shown_state()]
    model = record.model.rpartition("/")[2]  # without whose it is
    layout = printable(shown_digest(record.layout_digest))
    kind = [printable(model), f"{layout} tp={record.num_ranks}" if record.num_ranks > 1 else layout]
    age = "-" if worker.age_s is None else shown_duration(worker.age_s)
    if status is None:
        return [*names, *kind, "-", "-", age, "-"]
    used = f"{kv_usage(status):.0%}"
    return [*names, *kind, shown_load(worker), used, age, str(len(status.record.connections))]


def shown_load(worker: WorkerReport) -> str:
    """The requests it has by its slots, as it said last."""
    status = worker.status
    num_legs = worker.record.num_legs if status is None else status.num_legs
    return f"{num_legs}/{worker.record.slots}"


def shown_duration(duration_s: float) -> str:
    """In the largest unit that is not 0: 59s, 2h, 3d."""
    for unit_s, letter in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "m")):
        if duration_s >= unit_s:
            return f"{duration_s / unit_s:.0f}{letter}"
    return f"{duration_s:.0f}s"
