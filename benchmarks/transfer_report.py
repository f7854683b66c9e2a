"""What moving KV costs: medians over rounds, ratios within rounds, and what is concluded."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks.order_statistics import Spread
from benchmarks.printed_table import print_table
from benchmarks.result_files import table_lines, write_results
from benchmarks.transfer_ways import SetUp

SHM, TCP, HANDOVER = "shm", "tcp", "handover"
C_TCP = "C over TCP"
TCP_TWO_CORES = "tcp on two cores"
C_TWO_CORES = "C on two cores"
TCP_AND_C = ((TCP, C_TCP), (TCP_TWO_CORES, C_TWO_CORES))  # on equal terms
# What is promised of ours, as parts of another's speed.
SHM_OF_MEMCPY = {"4096x16KiB": 0.85, "256MiB": 0.95}
TCP_OF_C = 0.85
PLAN_AND_POST_US_MAX = 500.0  # of 4,096 block ids
PLAN_BLOCKS = 4096
CPU_BYTES_MIN = 16 << 20
LATENCY_SHAPE = "64KiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way with one shape in one round: medians of its repeats. Seconds, of one transfer."""

    shape: str
    way: str
    round: int
    num_bytes: int
    num_blocks: int
    repeats: int
    memcpy_s: float  # of as many bytes, just before
    wall_s: float  # from asking until all is there, for the receiver
    prepare_s: float  # before that: from ids to what can be posted
    post_s: float  # part of wall_s: the call that posts; ours only
    writer_s: float  # part of wall_s: a write, as the writing end saw it
    cpu_s: float  # of both ends

    @property
    def of_memcpy(self) -> float:
        return self.memcpy_s / self.wall_s


@dataclass(slots=True)
class TransferReport:
    """All cells, and how they came about."""

    command: str
    machine: str
    commit: str
    cells: list[Cell] = field(default_factory=list)
    set_ups: dict[str, list[SetUp]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)  # and their versions
    took_s: float = 0.0

    def shapes(self) -> list[str]:
        """From small to large, those of one block first."""
        return list(dict.fromkeys(cell.shape for cell in self.cells))

    def ways(self) -> list[str]:
        return list(dict.fromkeys(cell.way for cell in self.cells))

    def of(self, way: str, shape: str) -> list[Cell]:
        """By round."""
        found = [cell for cell in self.cells if (cell.way, cell.shape) == (way, shape)]
        return sorted(found, key=lambda cell: cell.round)

    def spread(self, way: str, shape: str, value: Callable[[Cell], float]) -> Spread | None:
        cells = self.of(way, shape)
        return Spread.of(map(value, cells)) if cells else None

    def best(self, kind: str, shape: str) -> str | None:
        """Of a library's ways over one link, such as "NIXL tcp", the faster one, if it has any."""
        ways = [way for way in self.ways() if way.startswith(f"{kind} ") and self.of(way, shape)]
        return min(ways, key=lambda way: self._median_s(way, shape), default=None)

    def _median_s(self, way: str, shape: str) -> float:
        return Spread.of(cell.wall_s for cell in self.of(way, shape)).median

    def speed(self, way: str, other: str, shape: str) -> Spread | None:
        """How much faster the one is than the other: the other's time in the same round by its."""
        mine, theirs = self.of(way, shape), self.of(other, shape)
        if not mine or len(mine) != len(theirs):
            return None
        return Spread.of(their.wall_s / my.wall_s for my, their in zip(mine, theirs, strict=True))


RIVALS: dict[str, tuple[str, ...]] = {
    SHM: ("NIXL shm", "NIXL tcp", "Mooncake tcp"),
    TCP: ("NIXL tcp", "Mooncake tcp"),
}


def rivals_of(report: TransferReport, way: str, shape: str) -> list[str]:
    """Each other's better way over links as good as this one's."""
    found = (report.best(kind, shape) for kind in RIVALS.get(way, ()))
    return [name for name in found if name is not None]


def shortfalls(report: TransferReport) -> list[str]:
    """Where ours is slower than promised, or than another; in words."""
    found = []
    for shape in report.shapes():
        found += _too_slow(report, shape)
        for way in (SHM, TCP):
            for rival in rivals_of(report, way, shape):
                speed = report.speed(way, rival, shape)
                if speed is not None and speed.median < 1:
                    found.append(f"{shape}: {way} has {speed.median:.2f} of the speed of {rival}")
    return found


def _too_slow(report: TransferReport, shape: str) -> list[str]:
    found = []
    least = SHM_OF_MEMCPY.get(shape)
    copied = report.spread(SHM, shape, lambda cell: cell.of_memcpy)
    if least is not None and copied is not None and copied.median < least:
        found.append(f"{shape}: shm has {copied.median:.2f} of memcpy's speed, promised {least}")
    for way, c_way in TCP_AND_C:
        speed = report.speed(way, c_way, shape)
        if speed is not None and speed.median < TCP_OF_C:
            words = f"{speed.median:.2f} of the speed of {c_way}, promised {TCP_OF_C}"
            found.append(f"{shape}: {way} has {words}")
    for way in (SHM, TCP, HANDOVER):
        posted = report.spread(way, shape, lambda cell: (cell.prepare_s + cell.post_s) * 1e6)
        cells = report.of(way, shape)
        is_asked = bool(cells) and cells[0].num_blocks == PLAN_BLOCKS and "x" in shape
        if is_asked and posted is not None and posted.median > PLAN_AND_POST_US_MAX:
            words = f"{posted.median:.0f} µs, promised {PLAN_AND_POST_US_MAX:.0f}"
            found.append(f"{shape}: {way} plans and posts in {words}")
    return found


def verdict(report: TransferReport) -> str:
    found = shortfalls(report)
    if found:
        return "\n".join(["Ours falls short:", "", *(f"- {each}" for each in found)])
    present = [way for way in (SHM, TCP) if way in report.ways()]
    rivals = {rival.split()[0] for s in report.shapes() for rival in rivals_of(report, SHM, s)}
    beside = f" and ahead of {' and '.join(sorted(rivals))} in every row" if rivals else ""
    return f"{' and '.join(present)}: as fast as promised{beside}."


Rows = tuple[tuple[str, ...], list[tuple[str, ...]]]  # headings, rows


def _table(
    report: TransferReport, ways: Sequence[str], cell: Callable[[str, str], str], first: str
) -> Rows:
    rows = [(shape, *(cell(way, shape) for way in ways)) for shape in report.shapes()]
    return (first, *ways), rows


def ratio_table(report: TransferReport) -> Rows:
    """Speed as a part of memcpy's. Ways that move nothing are left out."""

    def cell(way: str, shape: str) -> str:
        return _range(report.spread(way, shape, lambda each: each.of_memcpy))

    ways = [way for way in report.ways() if way != HANDOVER]
    return _table(report, ways, cell, "x memcpy")


def duel_table(report: TransferReport) -> Rows:
    """Ours by each other, in the same round; of a library's two ways the better one."""
    pairs = [pair for pair in TCP_AND_C if pair[1] in report.ways()]
    pairs += [(way, kind) for way in (SHM, TCP) for kind in RIVALS[way]]
    pairs = [pair for pair in pairs if pair[0] in report.ways()]
    rows = []
    for shape in report.shapes():
        cells = []
        for way, kind in pairs:
            rival = kind if kind in report.ways() else report.best(kind, shape)
            cells.append("-" if rival is None else _range(report.speed(way, rival, shape)))
        rows.append((shape, *cells))
    return ("times as fast", *(f"{way} / {kind}" for way, kind in pairs)), rows


def speed_table(report: TransferReport) -> Rows:
    def cell(way: str, shape: str) -> str:
        found = report.spread(way, shape, lambda each: each.num_bytes / each.wall_s / 1e9)
        return "-" if found is None else f"{found.median:.2f}"

    ways = [way for way in report.ways() if way != HANDOVER]
    return _table(report, ways, cell, "GB/s")


def time_table(report: TransferReport) -> Rows:
    def cell(way: str, shape: str) -> str:
        found = report.spread(way, shape, lambda each: each.wall_s * 1e3)
        return "-" if found is None else _number(found.median)

    return _table(report, report.ways(), cell, "ms")


def cpu_table(report: TransferReport) -> Rows:
    def cell(way: str, shape: str) -> str:
        cells = report.of(way, shape)
        if not cells or cells[0].num_bytes < CPU_BYTES_MIN:
            return "-"
        return f"{Spread.of(each.cpu_s / each.num_bytes * 1e9 for each in cells).median:.2f}"

    ways = [way for way in report.ways() if way != HANDOVER]
    headings, rows = _table(report, ways, cell, "CPU s/GB")
    return headings, [row for row in rows if set(row[1:]) != {"-"}]


def cost_table(report: TransferReport) -> Rows:
    """What comes before the bytes, and the least that a transfer takes."""
    rows = []
    planned = next((s for s in report.shapes() if s.startswith(f"{PLAN_BLOCKS}x")), "")
    for way in report.ways():
        set_ups = report.set_ups.get(way, [])
        rows.append(
            (
                way,
                _range(report.spread(way, LATENCY_SHAPE, lambda each: each.wall_s * 1e6), 0),
                _middle(each.writer_s * 1e6 for each in report.of(way, LATENCY_SHAPE)),
                _middle((each.pair_s * 1e3 for each in set_ups), 1),
                _middle(each.open_s * 1e3 for each in set_ups),
                _middle(each.prepare_s * 1e6 for each in report.of(way, planned)),
                _middle(each.post_s * 1e6 for each in report.of(way, planned)),
            )
        )
    headings = ("64 KiB, µs", "its write alone", "set-up of a pair, ms", "opening both, ms")
    return ("way", *headings, f"plan {PLAN_BLOCKS:,}, µs", "post, µs"), rows


def _range(spread: Spread | None, digits: int = 2) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.{digits}f} ({spread.least:.{digits}f}–{spread.most:.{digits}f})"


def _middle(values: Iterable[float], digits: int = 0) -> str:
    """The median; a dash where there is nothing to tell."""
    sample = list(values)
    return f"{Spread.of(sample).median:.{digits}f}" if any(sample) else "-"


def _number(value: float) -> str:
    return f"{value:,.{3 if value < 1 else 2 if value < 10 else 1}f}"


TABLES: tuple[Callable[[TransferReport], Rows], ...] = (
    *(duel_table, ratio_table, speed_table, time_table, cpu_table, cost_table),
)


def print_report(console: Console, report: TransferReport) -> None:
    for make in TABLES:
        print_table(console, *make(report))
    console.print(verdict(report))


def write_report(report: TransferReport, folder: Path) -> None:
    write_results(folder, "transfer", asdict(report), _markdown(report))


LEGEND = (
    "Medians over rounds (least–most), in which the ways took turns; ratios within a round. *x "
    "memcpy*: the time of a memcpy of as many bytes, just before, by the transfer's. Time goes "
    "from the receiver's asking until it knows that all bytes are there. READ: the receiver "
    "fetches; WRITE: it asks, the other end writes and notifies it. *handover*: blocks change "
    "their owner. *on two cores*: the ends, which may share a core otherwise, are kept each on "
    "one of its own, as two hosts have it. "
    "*CPU s/GB*: of both ends. *Set-up of a pair*: until a first block has arrived. All were "
    "verified, before the first round and after the last."
)


def _markdown(report: TransferReport) -> list[str]:
    num_rounds = max(cell.round for cell in report.cells)
    made = f"Made in {report.took_s / 60:.0f} minutes by `{report.command}` on {report.machine}"
    beside = f"Beside {' and '.join(report.others)}." if report.others else ""
    lines = [
        "# Moving KV between two processes",
        "",
        f"{made}, at commit {report.commit}. {num_rounds} rounds. {beside}".strip(),
        "",
        verdict(report),
        "",
        "![Speed of each way as a part of memcpy's](transfer.png)",
        "",
        LEGEND,
    ]
    for make in TABLES:
        lines += ["", *table_lines(*make(report))]
    return lines
