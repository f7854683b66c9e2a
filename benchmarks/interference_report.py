"""What a long prompt did to the streams that were running: numbers, Markdown and JSON."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.interference_client import Arrival
from benchmarks.order_statistics import Spread, percentile
from benchmarks.result_files import table_lines, write_results

PROMISED_RATIO = 2.0  # 1P1D: the largest gap stays below this many medians
COLUMNS = (
    "set-up",
    "median ITL",
    "p99 ITL",
    "largest gap at an arrival",
    "largest / median",
    "prefill",
    "largest / prefill",
)


@dataclass(frozen=True, slots=True)
class Observation:
    """One round of one set-up. Times are seconds since all streams were running.

    `gaps` are (end, duration) of every inter-token gap of every stream, as the client saw them.
    """

    gaps: list[tuple[float, float]]
    arrivals: list[Arrival]

    def durations(self) -> list[float]:
        return [duration_s for _, duration_s in self.gaps]

    def largest_at(self, arrival: Arrival) -> float:
        """The largest gap of any stream while this prompt was being served."""
        return max(
            duration_s
            for end_s, duration_s in self.gaps
            if end_s > arrival.sent_s and end_s - duration_s < arrival.done_s
        )


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One round in figures, in seconds; `largest_s` and `prefill_s` have one entry per arrival."""

    median_s: float
    p99_s: float
    largest_s: list[float]
    prefill_s: list[float]

    @classmethod
    def of(cls, observation: Observation) -> "RoundSummary":
        durations = observation.durations()
        return cls(
            Spread.of(durations).median,
            percentile(durations, 99),
            [observation.largest_at(arrival) for arrival in observation.arrivals],
            [arrival.prefill_s for arrival in observation.arrivals],
        )

    def ratio_to_median(self) -> float:
        return max(self.largest_s) / self.median_s

    def ratios_to_prefill(self) -> list[float]:
        return [a / b for a, b in zip(self.largest_s, self.prefill_s, strict=True)]


@dataclass(frozen=True, slots=True)
class InterferenceReport:
    """All rounds by set-up, and how they came about."""

    command: str
    machine: str
    scene: str
    placements: dict[str, str]
    rounds: dict[str, list[RoundSummary]]

    def verdict(self) -> tuple[bool, str]:
        """Whether both promises hold in every round, in words."""
        apart = max(summary.ratio_to_median() for summary in self.rounds["1P1D"])
        combined = Spread.of(
            ratio for summary in self.rounds["combined"] for ratio in summary.ratios_to_prefill()
        )
        is_kept = apart < PROMISED_RATIO
        return is_kept and combined.median >= 1, (
            f"1P1D: the largest gap was {apart:.2f} medians, which is "
            f"{'below' if is_kept else 'NOT below'} {PROMISED_RATIO:g}. "
            f"Combined: the largest gap was {combined.median:.2f} times the prefill."
        )


def rows_of(report: InterferenceReport) -> list[tuple[str, ...]]:
    """One row per set-up: over all rounds and arrivals, the median (least to most)."""
    rows: list[tuple[str, ...]] = []
    for name, rounds in report.rounds.items():
        rows.append(
            (
                name,
                _ms([summary.median_s for summary in rounds]),
                _ms([summary.p99_s for summary in rounds]),
                _ms([largest_s for summary in rounds for largest_s in summary.largest_s]),
                _times([summary.ratio_to_median() for summary in rounds]),
                _ms([prefill_s for summary in rounds for prefill_s in summary.prefill_s]),
                _times([ratio for summary in rounds for ratio in summary.ratios_to_prefill()]),
            )
        )
    return rows


def print_report(console: Console, report: InterferenceReport) -> None:
    table = Table(title=report.scene, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "set-up" else "right")
    for row in rows_of(report):
        table.add_row(*row)
    console.print(table)
    console.print(report.verdict()[1])


def write_report(report: InterferenceReport, folder: Path) -> None:
    write_results(folder, "interference", asdict(report), _markdown(report))


def _markdown(report: InterferenceReport) -> list[str]:
    num_rounds = max(len(rounds) for rounds in report.rounds.values())
    reading = (
        f"{report.scene}. Seen from the client, in {num_rounds} rounds in which the set-ups took "
        "turns: median (least to most)."
    )
    return [
        "# A long prompt arrives",
        "",
        f"Made by `{report.command}` on {report.machine}.",
        "",
        reading,
        "",
        *(f"- {name}: {placement}" for name, placement in report.placements.items()),
        "",
        *table_lines(COLUMNS, rows_of(report)),
        "",
        report.verdict()[1],
        "",
        "![ITL over time in both set-ups](interference.png)",
    ]


def _ms(durations_s: list[float]) -> str:
    spread = Spread.of(duration_s * 1000 for duration_s in durations_s)
    return f"{spread.median:,.1f} ms ({spread.least:,.1f} to {spread.most:,.1f})"


def _times(ratios: list[float]) -> str:
    spread = Spread.of(ratios)
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.most:.2f})"
