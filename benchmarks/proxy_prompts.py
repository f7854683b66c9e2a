"""What the length of a prompt adds to its first token and to the CPU of its request.

Taken within rounds: a contender's time to the first token less that of `direct`, which is what
client, stub workers and the bytes' one way take by themselves. A proxy of two workers moves the
bytes twice where plain nginx moves them once; whatever grows by more than that is not the bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.order_statistics import Spread
from benchmarks.proxy_load import CHARS_PER_TOKEN
from benchmarks.proxy_report import OURS, ROUTERS, Cell, ProxyReport, Sample

DIRECT = "direct"
BYTES_ALONE = "nginx"
NUM_WORKERS = 2  # that are sent the prompt

Value = Callable[[Sample], float]


class Measure(NamedTuple):
    """Something that grows with a prompt; for each contender less what `direct` has."""

    name: str
    value: Value


FIRST_TOKEN = Measure("first token p50 (ms)", lambda each: each.first_p50_ms)
FIRST_TOKEN_P99 = Measure("first token p99 (ms)", lambda each: each.first_p99_ms)
CPU = Measure("CPU per request (ms)", lambda each: each.cpu_ms_per_request)
HARNESS = Measure(
    "CPU per request of client and stub workers (ms)", lambda each: each.harness_cpu_ms_per_request
)
MEASURES = (FIRST_TOKEN, FIRST_TOKEN_P99, CPU, HARNESS)


def prompt_groups(report: ProxyReport) -> list[list[Cell]]:
    """Cells that differ in nothing but the prompt, the shortest first; two prompts at least."""
    groups: dict[tuple[int, int], list[Cell]] = {}
    for cell in sorted(report.cells()):
        groups.setdefault((cell.streams, cell.reply_tokens), []).append(cell)
    return [cells for cells in groups.values() if len(cells) > 1]


def added(report: ProxyReport, name: str, cell: Cell, measure: Measure) -> list[float]:
    """A contender's value less that of `direct`, round by round. Empty: one of them is missing."""
    by_round = {each.round: measure.value(each) for each in report.of(DIRECT, cell)}
    samples = [each for each in report.of(name, cell) if each.round in by_round]
    return [measure.value(each) - by_round[each.round] for each in samples]


def growth(report: ProxyReport, name: str, cells: list[Cell], measure: Measure) -> Spread | None:
    """By how much more the longest prompt adds than the shortest."""
    shortest, longest = (added(report, name, cells[end], measure) for end in (0, -1))
    if not shortest or len(shortest) != len(longest):
        return None
    return Spread.of(most - least for least, most in zip(shortest, longest, strict=True))


def prompt_tables(report: ProxyReport) -> dict[str, tuple[list[str], list[tuple[str, ...]]]]:
    """Columns and rows under their title: a row per contender, a column per prompt."""
    tables = {}
    for cells in prompt_groups(report):
        for measure in MEASURES:
            rows = [
                _row(report, name, cells, measure)
                for name in report.notes
                if name != DIRECT and added(report, name, cells[0], measure)
            ]
            if not rows:
                continue
            streams = f"{cells[0].streams:,} stream{'s' * (cells[0].streams > 1)}"
            title = f"Above direct, {streams}: {measure.name}"
            tables[title] = (["proxy", *map(_prompt, cells), "growth"], rows)
    return tables


def _prompt(cell: Cell) -> str:
    return f"{cell.prompt_tokens:,} ({cell.prompt_tokens * CHARS_PER_TOKEN / 1024:,.0f} KiB)"


def _row(report: ProxyReport, name: str, cells: list[Cell], measure: Measure) -> tuple[str, ...]:
    medians = [added(report, name, cell, measure) for cell in cells]
    grown = growth(report, name, cells, measure)
    return (
        name,
        *(f"{Spread.of(values).median:,.2f}" if values else "" for values in medians),
        f"{grown.median:,.2f} ({grown.least:,.2f} to {grown.most:,.2f})" if grown else "",
    )


def growth_findings(report: ProxyReport) -> tuple[list[str], list[str]]:
    """Sentences about ours beside the bytes alone: where it adds no more than they, where it does.

    More is more than nginx's growth for each worker that the prompt goes to, by more than the
    rounds differ.
    """
    flat, too_much = [], []
    for cells in prompt_groups(report):
        for measure in (FIRST_TOKEN, CPU):
            ours = growth(report, OURS, cells, measure)
            alone = growth(report, BYTES_ALONE, cells, measure)
            if ours is None or alone is None:
                continue
            routers = [
                grown.median
                for name in ROUTERS
                if (grown := growth(report, name, cells, measure)) is not None
            ]
            words = (
                f"{cells[0].streams:,} × {cells[0].reply_tokens} tokens, prompts of "
                f"{cells[0].prompt_tokens:,} to {cells[-1].prompt_tokens:,}: {measure.name} "
                f"rises by {ours.median:.2f}; with nginx, which only moves the bytes once, by "
                f"{alone.median:.2f}"
            )
            if routers:
                words += f"; with the better router by {min(routers):.2f}"
            is_flat = ours.least <= NUM_WORKERS * max(alone.most, 0.0)
            (flat if is_flat else too_much).append(words)
    return flat, too_much
