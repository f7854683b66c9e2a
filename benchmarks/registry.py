"""What it costs to know the workers, and how soon: etcd, the proxy's own registry, and two others.

Announcers of up to 200 workers, a registry and a watching directory, each a process of its own;
the ways take turns, round by round, each time with a fresh registry. See benchmarks/README.md.
Exit code 1 when a worker of ours was not seen, or not again, or a change was seen too late.
"""

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.line_process import LineProcess
from benchmarks.order_statistics import percentile
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.registry_part import record_of
from benchmarks.registry_plot import plot_registries
from benchmarks.registry_process import Server, running, server_of
from benchmarks.registry_report import (
    OURS,
    RegistryReport,
    Sample,
    print_report,
    shortfalls,
    write_report,
)
from benchmarks.registry_seen import Moment
from neuron_di.wire import encode_json

MODULE = "benchmarks.registry"
ANNOUNCER_PROCESSES = 4
ALL_SEEN_TIMEOUT_S = 60.0
BACK_TIMEOUT_S = 60.0
_FIRST_PORT = 20_000


@dataclass(frozen=True, slots=True)
class Way:
    """A way of being known: who announces, who watches, where."""

    name: str
    note: str
    registry: str  # etcd or embedded
    python: str
    module: str
    ttl_s: int
    poll_s: float = 0.0
    client: str = ""  # what has etcd3's names; empty: as the product does

    def command(self, role: str, address: str, **more: Any) -> tuple[str, ...]:
        settings = {
            "role": role,
            "registry": self.registry,
            "address": address,
            "ttl_s": self.ttl_s,
            "poll_s": self.poll_s,
            "module": self.client,
            **more,
        }
        return (self.python, "-m", self.module, json.dumps(settings))


def ways_of(options: argparse.Namespace, console: Console) -> list[Way]:
    """Those that are there; a line about one that is not."""
    ours, threads = "benchmarks.registry_part", "benchmarks.registry_threads"
    here = sys.executable
    found = [
        Way(OURS, "our client, TTL 10 s, a watch", "etcd", here, ours, 10),
        Way("embedded", "the proxy's own registry, over ZMQ", "embedded", here, ours, 10),
    ]
    if options.etcd3_python is None:
        console.print("[dim]without etcd3: --etcd3-python[/dim]")
    else:
        python = str(options.etcd3_python)
        note = "etcd3 0.12.0, TTL 10 s, a watch that is made anew after an exception"
        found.append(Way("etcd3", note, "etcd", python, threads, 10, client="etcd3"))
    note = "as in AWS's document: TTL 60 s, all keys every 3 s; with our client under etcd3's names"
    names = "neuron_di.etcd.etcd3_names"
    found.append(Way("polling", note, "etcd", here, threads, 60, poll_s=3.0, client=names))
    return found


def sample(way: Way, num_workers: int, number: int, options: argparse.Namespace) -> Sample:
    """One way with so many workers, from nothing to the end."""
    names = [f"decode-{_FIRST_PORT + index}" for index in range(num_workers)]
    num_processes = min(ANNOUNCER_PROCESSES, num_workers)
    template = json.loads(encode_json(record_of(names[0], 0)))
    with server_of(way.registry) as server:
        commands = [
            way.command(
                "announce", server.address, workers=names[index::num_processes], record=template
            )
            for index in range(num_processes)
        ]
        commands.append(way.command("watch", server.address))
        with running(commands) as (*announcers, watcher):
            return _measure(way, names, number, options, server, announcers, watcher)


def _measure(
    way: Way,
    names: list[str],
    number: int,
    options: argparse.Namespace,
    server: Server,
    announcers: list[LineProcess],
    watcher: LineProcess,
) -> Sample:
    for part in announcers:
        part.tell_to("announce")
    watcher.tell_to("wait", wanted=dict.fromkeys(names, 0), timeout_s=ALL_SEEN_TIMEOUT_S)
    begun_ns = min(part.answer() for part in announcers)
    missing = len(watcher.answer())
    log: list[Moment] = watcher.ask_to("log")
    all_seen_s = (max(at_ns for _, _, at_ns in log) - begun_ns) / 1e9 if log else float("inf")

    time.sleep(1.0)  # what the announcing leaves to be done
    before = server.cpu_s(), watcher.cpu_s()
    time.sleep(options.quiet_s)
    quiet = [_percent(*each, options.quiet_s) for each in _since(before, server, watcher)]

    before, begun_s = (server.cpu_s(), watcher.cpu_s()), time.monotonic()
    for part in announcers:
        part.tell_to("change", seconds=options.busy_s, per_s=options.changes / len(announcers))
    changes = [change for part in announcers for change in part.answer()]
    busy_s = time.monotonic() - begun_s
    busy = [_percent(*each, busy_s) for each in _since(before, server, watcher)]
    latest = {worker: most for worker, most, _ in sorted(changes)}
    missing += len(watcher.ask_to("wait", wanted=latest, timeout_s=ALL_SEEN_TIMEOUT_S))
    delays_ms = delays(changes, watcher.ask_to("log"))
    sizes = server.rss_bytes(), watcher.rss_bytes()

    server.kill()
    begun_s, before_s = time.monotonic(), watcher.cpu_s()
    touched = [change for part in announcers for change in part.ask_to("touch")]
    time.sleep(max(0.0, options.down_s - (time.monotonic() - begun_s)))
    down = _percent(before_s, watcher.cpu_s(), time.monotonic() - begun_s)
    server.start()
    back_ns, before_s = time.monotonic_ns(), watcher.cpu_s()
    wanted = {worker: least for worker, least, _ in touched}
    lost = len(watcher.ask_to("wait", wanted=wanted, timeout_s=BACK_TIMEOUT_S))
    log = [] if lost else watcher.ask_to("log")
    return Sample(
        way=way.name,
        workers=len(names),
        round=number,
        all_seen_s=all_seen_s,
        quiet_server=quiet[0],
        quiet_watcher=quiet[1],
        busy_server=busy[0],
        busy_watcher=busy[1],
        seen_p50_ms=percentile(delays_ms, 50),
        seen_p99_ms=percentile(delays_ms, 99),
        server_mib=sizes[0] / (1 << 20),
        watcher_mib=sizes[1] / (1 << 20),
        down_watcher=down,
        back_s=(max(at_ns for _, _, at_ns in log) - back_ns) / 1e9 if log else float("inf"),
        back_server_cpu_s=server.cpu_s(),
        back_watcher_cpu_s=watcher.cpu_s() - before_s,
        missing=missing + lost,
    )


def delays(changes: list[Moment], log: list[Moment]) -> list[float]:
    """Milliseconds from each change until it, or a later one of its worker, was seen.

    Infinity for one that never was.
    """
    seen: dict[str, list[tuple[int, int]]] = {}
    for worker, number, at_ns in log:
        seen.setdefault(worker, []).append((at_ns, number))
    found = []
    for worker, number, at_ns in changes:
        later = (when for when, latest in sorted(seen.get(worker, [])) if latest >= number)
        found.append((next(later, float("inf")) - at_ns) / 1e6)
    return found


def _since(
    before: tuple[float, float], server: Server, watcher: LineProcess
) -> list[tuple[float, float]]:
    return [(before[0], server.cpu_s()), (before[1], watcher.cpu_s())]


def _percent(before_s: float, after_s: float, duration_s: float) -> float:
    return (after_s - before_s) / duration_s * 100


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 160)
    begun_s = time.monotonic()
    report = RegistryReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
        changes_per_s=options.changes,
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    ways = ways_of(options, console)
    report.notes = {way.name: way.note for way in ways}
    with console.status("", refresh_per_second=1) as status:
        rounds = range(1, options.rounds + 1)
        for number, workers in itertools.product(rounds, options.workers):
            for way in ways if number % 2 else reversed(ways):
                status.update(f"round {number}, {workers} workers: {way.name}")
                report.samples.append(sample(way, workers, number, options))
    report.took_s = time.monotonic() - begun_s
    print_report(console, report)
    write_report(report, options.results)
    plot_registries(report, options.results / "registry.png")
    console.print(f"written: registry.md, .json, .png in {options.results}")
    return 1 if shortfalls(report) else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 50, 200])
    parser.add_argument("--quiet-s", type=float, default=10.0, help="while nothing changes")
    parser.add_argument("--busy-s", type=float, default=6.0, help="while records change")
    parser.add_argument("--changes", type=float, default=20.0, help="of records per second")
    parser.add_argument("--down-s", type=float, default=2.0, help="the registry is away")
    parser.add_argument("--etcd3-python", type=Path, help="a Python that has etcd3 0.12.0")
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
