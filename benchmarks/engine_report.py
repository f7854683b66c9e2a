"""The comparison of engines as a table in the terminal, as Markdown and as JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.engine_rounds import Outcome
from benchmarks.order_statistics import Spread
from benchmarks.result_files import table_lines, write_results

COLUMNS = ("phase", "engine", "tokens/s", "ours / it, wall", "ours / it, CPU")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All models' outcomes, by title, and how they came about."""

    command: str
    machine: str
    ours: str
    num_rounds: int
    new_tokens: int
    threads: int
    outcomes: dict[str, Outcome]


def print_model(console: Console, report: EngineReport, title: str) -> None:
    outcome = report.outcomes[title]
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:2] else "right")
    previous = ""
    for row in rows_of(report, outcome):
        if previous not in ("", row[0]):
            table.add_section()
        table.add_row(row[0] if row[0] != previous else "", *row[1:])
        previous = row[0]
    console.print(table)
    for line in notes_of(report, outcome):
        console.print(line)


def rows_of(report: EngineReport, outcome: Outcome) -> list[tuple[str, ...]]:
    """One row per phase and engine: median speed, and ours over its own, median (min to max)."""
    rows = []
    for phase, by_name in outcome.speeds.items():
        for name, speeds in by_name.items():
            speed = Spread.of(speed.wall for speed in speeds).median
            ratios = ["", ""]
            if name != report.ours:
                ratios = [
                    _ratio(Spread.of(outcome.ratios(phase, report.ours, name, clock)))
                    for clock in ("wall", "cpu")
                ]
            rows.append((phase, name, f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}", *ratios))
    return rows


def notes_of(report: EngineReport, outcome: Outcome) -> list[str]:
    """Versions, memory, idling, and whether all engines say the same."""
    notes = []
    for name, version in outcome.versions.items():
        rss_mib = outcome.peak_rss_bytes[name] / (1 << 20)
        idle = outcome.idle_shares[name]
        notes.append(
            f"{name}: {version}, peak RSS {rss_mib:,.0f} MiB, idle CPU at most {idle:.1%} of a core"
        )
    expected = outcome.greedy[report.ours]
    differing = [name for name, token_ids in outcome.greedy.items() if token_ids != expected]
    if differing:
        notes.append(f"MISMATCH: the first {len(expected)} greedy tokens of {', '.join(differing)}")
    else:
        notes.append(f"the first {len(expected)} greedy tokens of all engines are equal")
    return notes


def write_report(report: EngineReport, folder: Path) -> None:
    write_results(folder, "engine", asdict(report), _markdown(report))


def _markdown(report: EngineReport) -> list[str]:
    reading = (
        f"{report.num_rounds} rounds in which the engines took turns, each on {report.threads} "
        "core(s). Tokens/s are medians of wall time. `ours / it` is neuron-di's speed over that "
        "engine's, round by round: median (least to most), by wall time and by CPU time. Decode "
        f"is the difference between generations of {report.new_tokens} tokens and of one."
    )
    lines = [
        "# Engines side by side",
        "",
        f"Made by `{report.command}` on {report.machine}.",
        "",
        reading,
        "",
        "![tokens per second by engine](engine.png)",
    ]
    for title, outcome in report.outcomes.items():
        table = table_lines(COLUMNS, rows_of(report, outcome), left=(0, 1))
        lines += ["", f"## {title}", "", *table]
        lines += ["", *(f"- {note}" for note in notes_of(report, outcome))]
    return lines


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.most:.2f})"
