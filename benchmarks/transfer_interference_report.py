"""What a transfer costs those who compute: step times in spells with it, by those without."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.order_statistics import Spread, percentile
from benchmarks.printed_table import print_table
from benchmarks.result_files import table_lines, write_results

QUIET = "quiet"
ENGINES = ("shm", "tcp")
DECODE_LONGER_MAX = 1.02
COLUMNS = (
    "role",
    "meanwhile",
    "step ms",
    "p99 ms",
    "by quiet",
    "p99 by quiet",
    "steps begun during",
)


LEGEND = (
    "{num} spells of each kind, in turns; steps on one core, transfers of {shape} on the other. "
    "*By quiet*: the median step of a spell by that of the quiet spell of its round (least–most). "
    "*memcpy elsewhere*: another process copies as many bytes within its own memory, which is what "
    "sharing the memory costs by itself. *busy elsewhere*: another process counts within its own "
    "caches, which is what sharing anything but the memory costs, as where both cores are one's "
    "threads."
)


@dataclass(frozen=True, slots=True)
class Spell:
    """Some steps, one after the other. `kind` is what moved KV meanwhile."""

    role: str
    kind: str
    durations_s: list[float]
    num_during: int  # steps that began while a transfer was open
    num_moved: int  # transfers that ended

    @property
    def median_s(self) -> float:
        return Spread.of(self.durations_s).median


@dataclass(slots=True)
class TransferInterferenceReport:
    """All spells in their order, and how they came about."""

    command: str
    machine: str
    commit: str
    shape: str
    spells: list[Spell] = field(default_factory=list)

    def of(self, role: str, kind: str) -> list[Spell]:
        return [spell for spell in self.spells if (spell.role, spell.kind) == (role, kind)]

    def kinds(self, role: str) -> list[str]:
        found = {spell.kind for spell in self.spells if spell.role == role}
        return sorted(found, key=lambda kind: (kind != QUIET, kind not in ENGINES, kind))

    def by_quiet(self, role: str, kind: str) -> Spread:
        """The median step of each spell by that of the quiet one of the same round."""
        pairs = zip(self.of(role, kind), self.of(role, QUIET), strict=True)
        return Spread.of(spell.median_s / quiet.median_s for spell, quiet in pairs)


def shortfalls(report: TransferInterferenceReport) -> list[str]:
    """What is not as promised; in words."""
    found = []
    for engine in ENGINES:
        if report.of("decode", engine):
            longer = report.by_quiet("decode", engine).median
            if longer > DECODE_LONGER_MAX:
                found.append(f"decode steps take {longer - 1:.1%} longer while {engine} receives")
        spells = report.of("prefill", engine)
        if spells and not all(spell.num_during for spell in spells if spell.num_moved):
            found.append(f"no prefill step began in a whole spell while {engine} sent")
    return found


def verdict(report: TransferInterferenceReport) -> str:
    found = shortfalls(report)
    if found:
        return "\n".join(["Not as promised:", "", *(f"- {each}" for each in found)])
    most = max(report.by_quiet("decode", engine).median for engine in ENGINES)
    num = sum(spell.num_during for e in ENGINES for spell in report.of("prefill", e))
    return (
        f"A decode step takes {most - 1:+.1%} while KV is received (median of the worse engine), "
        f"and {num:,} prefill steps began while KV was being sent."
    )


def rows_of(report: TransferInterferenceReport) -> list[tuple[str, ...]]:
    rows = []
    for role in ("decode", "prefill"):
        quiet = [s for spell in report.of(role, QUIET) for s in spell.durations_s]
        for kind in report.kinds(role):
            spells = report.of(role, kind)
            steps = [s for spell in spells for s in spell.durations_s]
            ratio = report.by_quiet(role, kind)
            during = sum(spell.num_during for spell in spells)
            rows.append(
                (
                    role,
                    kind,
                    f"{Spread.of(steps).median * 1e3:.3f}",
                    f"{percentile(steps, 99) * 1e3:.3f}",
                    f"{ratio.median:.3f} ({ratio.least:.3f}–{ratio.most:.3f})",
                    f"{percentile(steps, 99) / percentile(quiet, 99):.2f}",
                    f"{during:,} of {len(steps):,}" if kind != QUIET else "-",
                )
            )
    return rows


def print_report(console: Console, report: TransferInterferenceReport) -> None:
    print_table(console, COLUMNS, rows_of(report), left=(0, 1))
    console.print(verdict(report))


def write_report(report: TransferInterferenceReport, folder: Path) -> None:
    num_spells = len(report.of("decode", QUIET))
    lines = [
        "# What a transfer costs those who compute",
        "",
        f"Made by `{report.command}` on {report.machine}, at commit {report.commit}.",
        "",
        verdict(report),
        "",
        LEGEND.format(num=num_spells, shape=report.shape),
        "",
        *table_lines(COLUMNS, rows_of(report), left=(0, 1)),
    ]
    write_results(folder, "transfer_interference", asdict(report), lines, indent=None)
