"""What the proxies cost: medians over rounds, ratios within rounds, Markdown and JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.order_statistics import Spread

OURS = "neuron-di"
ROUTERS = ("sglang-router", "vllm-router")
# Travel and first token in milliseconds.
COLUMNS = (
    "streams",
    "proxy",
    "req/s",
    "CPU µs",
    "travel p50",
    "travel p99",
    "first p50",
    "first p99",
    "MiB",
    "bad",
)


class Cell(NamedTuple):
    """One load: how many streams, how long each answer, how long each prompt."""

    streams: int
    reply_tokens: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"{self.streams} × {self.reply_tokens} tokens, prompts of {self.prompt_tokens:,}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One proxy under one load. `travel` is from a stub worker to the client, per token."""

    proxy: str
    cell: Cell
    round: int
    requests_per_s: float
    tokens: int
    cpu_us_per_token: float
    travel_p50_ms: float
    travel_p99_ms: float
    first_p50_ms: float  # from the request to the first token, the stub's prefill included
    first_p99_ms: float
    rss_mib: float
    short: int
    cut: int
    refused: int
    late: int

    @classmethod
    def of(cls, proxy: str, cell: Cell, number: int, seen: dict[str, Any]) -> "Sample":
        """`seen` is what the client saw, and what the proxy used meanwhile."""
        travel, first = seen["travel_ns"], seen["first_ns"]
        nothing = float("inf")  # no token came at all
        return cls(
            proxy=proxy,
            cell=cell,
            round=number,
            requests_per_s=seen["complete"] / seen["wall_s"],
            tokens=seen["tokens"],
            cpu_us_per_token=seen["cpu_s"] * 1e6 / seen["tokens"] if seen["tokens"] else nothing,
            travel_p50_ms=travel.get("p50", nothing) / 1e6,
            travel_p99_ms=travel.get("p99", nothing) / 1e6,
            first_p50_ms=first.get("p50", nothing) / 1e6,
            first_p99_ms=first.get("p99", nothing) / 1e6,
            rss_mib=seen["rss_bytes"] / (1 << 20),
            **{kind: seen[kind] for kind in ("short", "cut", "refused", "late")},
        )

    def num_bad(self) -> int:
        """Streams that lost tokens, were cut or refused, or came late."""
        return self.short + self.cut + self.refused + self.late


@dataclass(slots=True)
class ProxyReport:
    """All samples, and how they came about."""

    command: str
    machine: str
    commit: str
    tick_ms: float
    prefill_ms: float
    notes: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(each.cell for each in self.samples))

    def of(self, proxy: str, cell: Cell) -> list[Sample]:
        """One proxy's samples under one load, by round."""
        samples = [each for each in self.samples if (each.proxy, each.cell) == (proxy, cell)]
        return sorted(samples, key=lambda each: each.round)

    def ratio(self, cell: Cell, value: Callable[[Sample], float]) -> Spread | None:
        """Ours to the better of the routers, within each round. None: somebody is missing."""
        ours = self.of(OURS, cell)
        routers = [samples for name in ROUTERS if (samples := self.of(name, cell))]
        if not ours or not routers:
            return None
        return Spread.of(
            value(mine) / min(value(router[index]) for router in routers)
            for index, mine in enumerate(ours)
        )

    def shortfalls(self) -> list[str]:
        """Where ours is not below both routers, or treated a stream badly; in words."""
        found = []
        for cell in self.cells():
            for name, value in (
                ("CPU per token", lambda each: each.cpu_us_per_token),
                ("travel p50", lambda each: each.travel_p50_ms),
                ("first token p50", lambda each: each.first_p50_ms),
            ):
                ratio = self.ratio(cell, value)
                if ratio is not None and ratio.median >= 1:
                    found.append(f"{cell}: {name} is {ratio.median:.2f} of the better router's")
            if num_bad := sum(each.num_bad() for each in self.of(OURS, cell)):
                found.append(f"{cell}: {num_bad} streams were lost, cut, refused or late")
        return found

    def is_kept(self) -> bool:
        return not self.shortfalls()


def row_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Medians over rounds; bad streams are added up."""

    def middle(value: Callable[[Sample], float]) -> float:
        return Spread.of(value(each) for each in samples).median

    has_process = any(each.rss_mib for each in samples)
    return (
        str(samples[0].cell.streams),
        samples[0].proxy,
        f"{middle(lambda each: each.requests_per_s):,.1f}",
        f"{middle(lambda each: each.cpu_us_per_token):,.1f}" if has_process else "",
        f"{middle(lambda each: each.travel_p50_ms):,.2f}",
        f"{middle(lambda each: each.travel_p99_ms):,.1f}",
        f"{middle(lambda each: each.first_p50_ms):,.1f}",
        f"{middle(lambda each: each.first_p99_ms):,.1f}",
        f"{middle(lambda each: each.rss_mib):,.0f}" if has_process else "",
        str(sum(each.num_bad() for each in samples)),
    )


def rows_of(report: ProxyReport, cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    return [
        row_of(samples)
        for cell in cells
        for name in report.notes
        if (samples := report.of(name, cell))
    ]


def groups_of(report: ProxyReport) -> dict[str, list[Cell]]:
    """Cells that share a table, under its title."""
    groups: dict[str, list[Cell]] = {}
    for cell in sorted(report.cells(), key=lambda each: (each[1], each[2], each[0])):
        title = f"Answers of {cell.reply_tokens} tokens, prompts of {cell.prompt_tokens:,}"
        groups.setdefault(title, []).append(cell)
    return groups


def ratio_rows(report: ProxyReport) -> list[tuple[str, ...]]:
    """Ours to the better router, per cell: CPU, travel, first token. Empty without either."""
    rows = []
    for cell in report.cells():
        ratios = [
            report.ratio(cell, value)
            for value in (
                lambda each: each.cpu_us_per_token,
                lambda each: each.travel_p50_ms,
                lambda each: each.travel_p99_ms,
                lambda each: each.first_p50_ms,
            )
        ]
        if all(ratio is not None for ratio in ratios):
            rows.append((str(cell), *(_times(ratio) for ratio in ratios if ratio is not None)))
    return rows


RATIO_COLUMNS = ("ours / the better router", "CPU", "travel p50", "travel p99", "first token p50")


def print_report(console: Console, report: ProxyReport) -> None:
    for title, cells in groups_of(report).items():
        _print_table(console, title, COLUMNS, rows_of(report, cells), num_left=2)
    if rows := ratio_rows(report):
        _print_table(console, "Ratios within rounds", RATIO_COLUMNS, rows, num_left=1)
    console.print(verdict(report))


def verdict(report: ProxyReport) -> str:
    if not ratio_rows(report):
        return "No verdict: it takes ours and a router."
    found = report.shortfalls()
    if not found:
        return "Ours is below both routers in every row, and no stream was treated badly."
    return "\n".join(["Ours is NOT below both routers everywhere:", *(f"- {e}" for e in found)])


def write_report(report: ProxyReport, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(asdict(report), indent=1)
    (folder / "proxy.json").write_text(document + "\n", encoding="utf-8")
    (folder / "proxy.md").write_text(_markdown(report), encoding="utf-8")


def _markdown(report: ProxyReport) -> str:
    num_rounds = max(each.round for each in report.samples)
    reading = (
        f"Stub workers make a token per stream every {report.tick_ms:g} ms, the first one "
        f"{report.prefill_ms:g} ms after its request. Medians of {num_rounds} rounds in which the "
        "proxies took turns. *CPU*: of all the proxy's processes per relayed token, requests "
        "included. *Travel*: from the worker's making a token to the client's reading it; "
        "*first*: from a request to its first token; both in ms. *Bad*: streams with lost "
        "tokens, cut, refused or late, in all rounds."
    )
    lines = [
        "# What a proxy costs",
        "",
        f"Made by `{report.command}` on {report.machine}, at commit {report.commit}.",
        "",
        reading,
        "",
        *(f"- {name}: {note}" for name, note in report.notes.items()),
    ]
    for title, cells in groups_of(report).items():
        lines += ["", f"## {title}", "", *_table(COLUMNS, rows_of(report, cells), num_left=2)]
    if rows := ratio_rows(report):
        lines += ["", "## Ratios within rounds", "", "Median (least to most).", ""]
        lines += _table(RATIO_COLUMNS, rows, num_left=1)
    lines += ["", verdict(report), "", "![CPU, travel and time to the first token](proxy.png)"]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * num_left + "---:|" * (len(columns) - num_left),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _print_table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_left: int,
) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    for index, column in enumerate(columns):
        is_left = index < num_left
        table.add_column(column, justify="left" if is_left else "right", no_wrap=is_left)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.most:.2f})"
