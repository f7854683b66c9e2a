"""What a case brought about, and all of them as a table."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .fault import PHASE_NAMES, Outcome, Phase

COLUMNS = (
    ("fault", 5),
    ("phase", 12),
    ("due", 3),
    ("req", 4),
    ("compl", 5),
    ("equal", 5),
    ("contd", 5),
    ("retr", 4),
    ("wrong", 5),
    ("index", 5),
    ("stuck", 5),
    ("leaked", 6),
    ("detect ms", 9),
    ("gap ms", 7),
    ("freed ms", 8),
    ("errors", 0),
)


@dataclass(slots=True, kw_only=True)
class CaseReport:
    """One run of one case. Times are seconds; None where there is nothing to measure."""

    fault: str
    title: str
    phase: Phase
    outcome: Outcome
    num_requests: int = 0
    num_completed: int = 0
    num_equal: int = 0
    num_due: int = 0  # that the fault must not end
    num_due_equal: int = 0
    num_continued: int = 0
    num_retried: int = 0
    num_left: int = 0
    num_wrong: int = 0
    num_misnumbered: int = 0  # with a token missing or doubled
    num_stuck: int = 0
    num_leaked: int = 0  # blocks, legs and slots of live workers
    errors: Counter[str] = field(default_factory=Counter)
    detect_s: float | None = None
    gap_s: float | None = None
    freed_s: float | None = None
    failures: list[str] = field(default_factory=list)  # why it is not as it should be

    @property
    def is_good(self) -> bool:
        return not self.failures

    def to_plain(self) -> dict[str, Any]:
        """As what any process can be sent: numbers, texts, lists and dicts."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return plain | {"errors": dict(self.errors)}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "CaseReport":
        return cls(**plain | {"errors": Counter(plain["errors"])})


def table(reports: Sequence[CaseReport]) -> list[str]:
    """A line per run, a line of sums, and what went wrong."""
    lines = [_row([name for name, _ in COLUMNS])]
    lines += [_row(_cells(report)) for report in reports]
    lines += ["", *_summary(reports)]
    for report in reports:
        lines += [f"FAILED {report.fault} {report.phase}: {words}" for words in report.failures]
    return lines


def _cells(report: CaseReport) -> list[str]:
    counts = (
        report.num_requests,
        report.num_completed,
        report.num_equal,
        report.num_continued,
        report.num_retried,
        report.num_wrong,
        report.num_misnumbered,
        report.num_stuck,
        report.num_leaked,
    )
    times = (report.detect_s, report.gap_s, report.freed_s)
    errors = " ".join(f"{code}:{count}" for code, count in sorted(report.errors.items()))
    return [
        report.fault,
        PHASE_NAMES[report.phase],
        report.outcome,
        *map(str, counts),
        *("-" if each is None else f"{1000 * each:.0f}" for each in times),
        errors,
    ]


def _row(cells: Sequence[str]) -> str:
    padded = (
        cell.ljust(width) if number in (0, 1, 2, len(COLUMNS) - 1) else cell.rjust(width)
        for number, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
    )
    return "  ".join(padded).rstrip()


def _summary(reports: Sequence[CaseReport]) -> list[str]:
    def total(name: str) -> int:
        return sum(getattr(report, name) for report in reports)

    num_due, num_equal = total("num_due"), total("num_due_equal")
    sums = (
        f"{len(reports)} runs, {sum(report.is_good for report in reports)} as they should be; "
        f"{total('num_requests')} requests: {total('num_wrong')} wrong, "
        f"{total('num_misnumbered')} with a token missing or doubled, {total('num_stuck')} stuck; "
        f"{total('num_leaked')} blocks leaked"
    )
    lines = [sums]
    if num_due:
        lines.append(
            f"of {num_due} requests that a fault must not end, {num_equal} were completed with "
            f"the very tokens of an undisturbed run ({100 * num_equal / num_due:.2f} %)"
        )
    for name, words in (
        ("detect_s", "from the fault to its detection"),
        ("gap_s", "the longest gap of a case's streams"),
        ("freed_s", "from the client's leaving to the last block's return"),
    ):
        values = sorted(v for r in reports if (v := getattr(r, name)) is not None)
        if values:
            lines.append(
                f"{words}: median {1000 * statistics.median(values):.0f} ms, "
                f"p99 {1000 * _quantile(values, 0.99):.0f} ms, max {1000 * values[-1]:.0f} ms"
            )
    return lines


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
