"""What a registry costs: medians over rounds, ratios within rounds, and what is concluded."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.order_statistics import Spread
from benchmarks.printed_table import print_table
from benchmarks.result_files import table_lines, write_results

OURS = "etcd"
SEEN_MS_MAX = 1000.0  # a worker serves within a second of being ready: less than that to be seen


@dataclass(frozen=True, slots=True)
class Sample:
    """One way of being known, with so many workers. Shares are percent of a core."""

    way: str
    workers: int
    round: int
    all_seen_s: float  # from the word to announce until all are seen
    quiet_server: float  # while nothing changes
    quiet_watcher: float
    busy_server: float  # while records change
    busy_watcher: float
    seen_p50_ms: float  # from a change in a worker until the watcher has it
    seen_p99_ms: float
    server_mib: float
    watcher_mib: float
    down_watcher: float  # while the registry is away
    back_s: float  # from its start until every change made meanwhile is seen
    back_server_cpu_s: float
    back_watcher_cpu_s: float
    missing: int  # workers that were not seen, or not again


@dataclass(slots=True)
class RegistryReport:
    """All samples, and how they came about."""

    command: str
    machine: str
    commit: str
    changes_per_s: float
    notes: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    took_s: float = 0.0

    def of(self, way: str, workers: int) -> list[Sample]:
        found = [each for each in self.samples if (each.way, each.workers) == (way, workers)]
        return sorted(found, key=lambda each: each.round)

    def sizes(self) -> list[int]:
        return sorted({each.workers for each in self.samples})


Measure = tuple[str, Callable[[Sample], float], str]
MEASURES: tuple[Measure, ...] = (
    ("all seen s", lambda each: each.all_seen_s, ".2f"),
    ("put to seen p50 ms", lambda each: each.seen_p50_ms, ",.1f"),
    ("p99 ms", lambda each: each.seen_p99_ms, ",.1f"),
    ("registry, quiet %", lambda each: each.quiet_server, ".2f"),
    ("busy %", lambda each: each.busy_server, ".2f"),
    ("watcher, quiet %", lambda each: each.quiet_watcher, ".2f"),
    ("busy %", lambda each: each.busy_watcher, ".2f"),
    ("down %", lambda each: each.down_watcher, ".2f"),
    ("registry MiB", lambda each: each.server_mib, ".0f"),
    ("watcher MiB", lambda each: each.watcher_mib, ".0f"),
    ("back s", lambda each: each.back_s, ".2f"),
    ("registry's CPU for it, s", lambda each: each.back_server_cpu_s, ".2f"),
)
COLUMNS = ("workers", "way", *(name for name, _, _ in MEASURES), "missing")
RATIO_COLUMNS = (
    *("workers", "beside", "all seen", "put to seen p50", "p99", "registry, quiet", "busy"),
    *("watcher, quiet", "busy", "down", "back"),
)
_RATIOS = (0, 1, 2, 3, 4, 5, 6, 7, 10)  # of MEASURES


def rows_of(report: RegistryReport) -> list[tuple[str, ...]]:
    rows = []
    for workers in report.sizes():
        for way in report.notes:
            samples = report.of(way, workers)
            if not samples:
                continue
            middles = (
                format(Spread.of(value(each) for each in samples).median, form)
                for _, value, form in MEASURES
            )
            missing = sum(each.missing for each in samples)
            rows.append((str(workers), way, *middles, str(missing)))
    return rows


def ratio_rows(report: RegistryReport) -> list[tuple[str, ...]]:
    """Ours divided by each other way, within each round."""
    rows = []
    for workers in report.sizes():
        ours = report.of(OURS, workers)
        for way in report.notes:
            others = report.of(way, workers)
            if way == OURS or len(others) != len(ours):
                continue
            cells = (_ratio(ours, others, MEASURES[index][1]) for index in _RATIOS)
            rows.append((str(workers), way, *cells))
    return rows


def _ratio(
    ours: Sequence[Sample], others: Sequence[Sample], value: Callable[[Sample], float]
) -> str:
    pairs = [(value(mine), value(other)) for mine, other in zip(ours, others, strict=True)]
    if any(below <= 0 for _, below in pairs):
        return "-"
    spread = Spread.of(above / below for above, below in pairs)
    return f"{spread.median:.2g} ({spread.least:.2g}–{spread.most:.2g})"


def shortfalls(report: RegistryReport) -> list[str]:
    """Where a registry of ours does not do what is promised of it; in words."""
    found = []
    for each in report.samples:
        if each.way not in (OURS, "embedded"):
            continue
        name = f"{each.way}, {each.workers} workers, round {each.round}"
        if each.missing:
            found.append(f"{name}: {each.missing} workers were not seen, or not again")
        if each.seen_p99_ms > SEEN_MS_MAX:
            found.append(f"{name}: put to seen takes {each.seen_p99_ms:.0f} ms at p99")
    return found


def verdict(report: RegistryReport) -> str:
    found = shortfalls(report)
    if found:
        return "\n".join(["Ours falls short:", "", *(f"- {each}" for each in found)])
    most = max(report.sizes(), default=0)
    samples = report.of(OURS, most)
    if not samples:
        return "No verdict: ours is missing."
    quiet = Spread.of(each.quiet_server for each in samples).median
    watcher = Spread.of(each.quiet_watcher for each in samples).median
    slow = max(each.seen_p99_ms for each in samples)
    return (
        f"With {most} workers etcd takes {quiet:.1f} % of a core and a watching directory "
        f"{watcher:.1f} % while nothing changes; a change is seen within {slow:.0f} ms (p99 of the "
        "worst round), and after a restart all are there again."
    )


LEGEND = (
    "Shares are percent of a core. *Registry*: etcd, or the process that holds the proxy's own. "
    "*Watcher*: a process with a directory and nothing else. *Quiet*: while nothing changes: "
    "leases are kept alive, and ours puts each record again at every second beat, as it is. "
    "*Busy*: while {rate:g} records a second change. *Put to seen*: from a change within a worker "
    "until the watcher has it, or a later one of the same worker. *Down*: while the registry is "
    "killed. *Back*: from its start until all changes made meanwhile are seen. *Missing*: workers "
    "that were not seen in time, all rounds."
)


def print_report(console: Console, report: RegistryReport) -> None:
    for columns, rows in ((RATIO_COLUMNS, ratio_rows(report)), (COLUMNS, rows_of(report))):
        print_table(console, columns, rows, left=(1,))
    console.print(verdict(report))


def write_report(report: RegistryReport, folder: Path) -> None:
    write_results(folder, "registry", asdict(report), _markdown(report))


def _markdown(report: RegistryReport) -> list[str]:
    num_rounds = max(each.round for each in report.samples)
    made = f"Made in {report.took_s / 60:.0f} minutes by `{report.command}` on {report.machine}"
    return [
        "# What it costs to know the workers",
        "",
        f"{made}, at commit {report.commit}.",
        "",
        verdict(report),
        "",
        "![Put to seen, CPU and the way back after a restart](registry.png)",
        "",
        f"Medians of {num_rounds} rounds in which the ways took turns, each with a fresh registry. "
        + LEGEND.format(rate=report.changes_per_s),
        "",
        *(f"- {way}: {note}" for way, note in report.notes.items()),
        "",
        "## Ours with etcd / the others, within rounds: median (range)",
        "",
        *table_lines(RATIO_COLUMNS, ratio_rows(report), left=(1,)),
        "",
        "## All",
        "",
        *table_lines(COLUMNS, rows_of(report), left=(1,)),
    ]
