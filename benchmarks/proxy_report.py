"""What the proxies cost: medians over rounds, ratios within rounds, and what is concluded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.order_statistics import Spread

OURS = "neuron-di"
OURS_TWICE = "neuron-di x2"  # two processes: the routers have a thread for each core
ROUTERS = ("sglang-router", "vllm-router")
# CPU per token; travel and first token in milliseconds; MiB resident.
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
    wall_s: float
    requests_per_s: float
    tokens: int
    cpu_us_per_token: float
    cpu_ms_per_request: float
    harness_cpu_ms_per_request: float  # of client and stub workers
    travel_p50_ms: float
    travel_p99_ms: float
    first_p50_ms: float  # from the request to the first token, the stub's prefill included
    first_p99_ms: float
    rss_mib: float
    complete: int
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
            wall_s=seen["wall_s"],
            requests_per_s=seen["complete"] / seen["wall_s"],
            tokens=seen["tokens"],
            cpu_us_per_token=_each(seen["cpu_s"] * 1e6, seen["tokens"]),
            cpu_ms_per_request=_each(seen["cpu_s"] * 1e3, seen["complete"]),
            harness_cpu_ms_per_request=_each(seen["harness_cpu_s"] * 1e3, seen["complete"]),
            travel_p50_ms=travel.get("p50", nothing) / 1e6,
            travel_p99_ms=travel.get("p99", nothing) / 1e6,
            first_p50_ms=first.get("p50", nothing) / 1e6,
            first_p99_ms=first.get("p99", nothing) / 1e6,
            rss_mib=seen["rss_bytes"] / (1 << 20),
            **{kind: seen[kind] for kind in ("complete", "short", "cut", "refused", "late")},
        )

    def num_bad(self) -> int:
        """Streams that lost tokens, were cut or refused, or came late."""
        return self.short + self.cut + self.refused + self.late


def _each(total: float, count: int) -> float:
    return total / count if count else float("inf")


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
    idle_percent: dict[str, float] = field(default_factory=dict)  # of a core, with no request
    took_s: float = 0.0

    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(each.cell for each in self.samples))

    def of(self, proxy: str, cell: Cell) -> list[Sample]:
        """One proxy's samples under one load, by round."""
        samples = [each for each in self.samples if (each.proxy, each.cell) == (proxy, cell)]
        return sorted(samples, key=lambda each: each.round)

    def ratio(
        self, cell: Cell, value: Callable[[Sample], float], name: str = OURS
    ) -> Spread | None:
        """Ours to the better of the routers, within each round. None: somebody is missing."""
        ours = self.of(name, cell)
        routers = [samples for name in ROUTERS if (samples := self.of(name, cell))]
        if not ours or not routers:
            return None
        return Spread.of(
            value(mine) / min(value(router[index]) for router in routers)
            for index, mine in enumerate(ours)
        )


JUDGED: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("CPU per token", lambda each: each.cpu_us_per_token),
    ("travel p50", lambda each: each.travel_p50_ms),
    ("travel p99", lambda each: each.travel_p99_ms),
    ("first token p50", lambda each: each.first_p50_ms),
    ("memory", lambda each: each.rss_mib),
)
RATIO_COLUMNS = ("streams", "reply", "prompt", *(name for name, _ in JUDGED))
STREAM_COLUMNS = ("proxy", "complete", "lost or doubled tokens", "cut", "refused", "late")


def shortfalls(report: ProxyReport) -> list[str]:
    """Where ours is not below both routers, or treated a stream badly; in words."""
    found = []
    for ours, words in ((OURS, ""), (OURS_TWICE, "two processes, ")):
        for cell in report.cells():
            for name, value in JUDGED:
                ratio = report.ratio(cell, value, ours)
                if ratio is not None and ratio.median >= 1:
                    times = f"{_times(ratio)} of the better router's"
                    found.append(f"{words}{cell}: {name} is {times}")
            if num_bad := sum(each.num_bad() for each in report.of(ours, cell)):
                found.append(f"{words}{cell}: {num_bad} streams were lost, cut, refused or late")
    return found


def row_of(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Medians over rounds; bad streams are added up."""

    def middle(value: Callable[[Sample], float]) -> float:
        return Spread.of(value(each) for each in samples).median

    has_process = any(each.rss_mib for each in samples)
    return (
        f"{samples[0].cell.streams:,}",
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


def ratio_rows(report: ProxyReport, ours: str = OURS) -> list[tuple[str, ...]]:
    """Ours to the better router, per cell. Empty without either."""
    rows = []
    for cell in sorted(report.cells(), key=lambda each: (each[1], each[2], each[0])):
        ratios = [report.ratio(cell, value, ours) for _, value in JUDGED]
        if all(ratio is not None for ratio in ratios):
            load = (f"{cell.streams:,}", str(cell.reply_tokens), f"{cell.prompt_tokens:,}")
            rows.append((*load, *(_times(ratio) for ratio in ratios if ratio is not None)))
    return rows


def stream_rows(report: ProxyReport) -> list[tuple[str, ...]]:
    """What became of each contender's streams, in all loads together."""
    kinds = ("complete", "short", "cut", "refused", "late")
    rows = []
    for name in report.notes:
        own = [each for each in report.samples if each.proxy == name]
        rows.append((name, *(f"{sum(getattr(each, kind) for each in own):,}" for kind in kinds)))
    return rows


def _times(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.least:.2f}–{ratio.most:.2f})"
