"""What a run of `bench-transfer` found: figures, as a table and as JSON."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Self

import msgspec
from rich.console import Console
from rich.table import Table

from neuron_di.errors import NeuronDiError
from neuron_di.terminal_text import print_table
from neuron_di.transfer_bench.measuring_end import Moved

FORMAT = 1
CPU_BYTES_MIN = 1 << 20  # below that, CPU per byte is that of the questions around it


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with one shape. Medians, unless said. None: nothing was moved, or too little."""

    shape: str
    engine: str
    reason: str  # why this engine, where there was a choice
    num_bytes: int  # of the blocks
    kv_bytes: int  # that a transfer moved: 0 where blocks changed their owner
    num_transfers: int
    num_verified: int
    gb_per_s: float | None
    ms_p50: float
    ms_p99: float
    memcpy_ms: float
    of_memcpy: float | None  # speed: 1 is as fast. Of the copy just before each transfer
    of_memcpy_least: float | None
    of_memcpy_most: float | None
    cpu_s_per_gb: float | None  # both ends together, all of their processes
    plan_us: float
    post_us: float
    open_ms: float  # both ends' engines
    set_up_ms: float  # of the pair: offers, connecting, proof


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why one engine has no figures with one shape: its error's code and words."""

    shape: str
    engine: str  # as it was asked for
    code: str
    message: str

    @classmethod
    def of(cls, shape: str, engine: str, error: NeuronDiError) -> Self:
        return cls(shape=shape, engine=engine, code=error.code, message=error.message)


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """`peer` is where the other end ran. Each engine has figures or a failure with each shape."""

    peer: str
    repeats: int
    figures: list[Figures]
    failures: list[Failure] = []
    format: int = FORMAT


class Samples(msgspec.Struct, kw_only=True):
    """Of one engine with one shape, in order of measuring. Seconds."""

    transfer_s: list[float] = []
    memcpy_s: list[float] = []
    plan_s: list[float] = []
    post_s: list[float] = []
    cpu_s: list[float] = []
    kv_bytes: int = 0
    num_verified: int = 0

    def add(self, moved: Moved, memcpy_s: float) -> None:
        self.memcpy_s.append(memcpy_s)
        self.transfer_s.append(moved.transfer_s)
        self.plan_s.append(moved.plan_s)
        self.post_s.append(moved.post_s)
        self.cpu_s.append(moved.cpu_s)
        self.kv_bytes = moved.kv_bytes
        self.num_verified += moved.is_verified

    def figures(
        self,
        *,
        shape: str,
        engine: str,
        reason: str,
        num_bytes: int,
        open_s: float,
        connect_s: float,
    ) -> Figures:
        """There must be a sample."""
        middle_s = median(self.transfer_s)
        moves = self.kv_bytes > 0
        pairs = zip(self.memcpy_s, self.transfer_s, strict=True)
        ratios = [copy_s / transfer_s for copy_s, transfer_s in pairs]
        has_cpu = moves and num_bytes >= CPU_BYTES_MIN
        return Figures(
            shape=shape,
            engine=engine,
            reason=reason,
            num_bytes=num_bytes,
            kv_bytes=self.kv_bytes,
            num_transfers=len(self.transfer_s),
            num_verified=self.num_verified,
            gb_per_s=num_bytes / middle_s / 1e9 if moves else None,
            ms_p50=middle_s * 1e3,
            ms_p99=percentile(self.transfer_s, 99) * 1e3,
            memcpy_ms=median(self.memcpy_s) * 1e3,
            of_memcpy=median(ratios) if moves else None,
            of_memcpy_least=min(ratios) if moves else None,
            of_memcpy_most=max(ratios) if moves else None,
            cpu_s_per_gb=sum(self.cpu_s) / len(self.cpu_s) / num_bytes * 1e9 if has_cpu else None,
            plan_us=median(self.plan_s) * 1e6,
            post_us=median(self.post_s) * 1e6,
            open_ms=open_s * 1e3,
            set_up_ms=connect_s * 1e3,
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many per cent of them do not exceed."""
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(0, rank - 1)]


def words_of(failures: Sequence[Failure]) -> list[str]:
    """A line for each engine and reason."""
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for each in failures:
        shapes.setdefault((each.engine, each.code, each.message), []).append(each.shape)
    return [
        f"{engine} does not work with {', '.join(names)}: {code}: {message}"
        for (engine, code, message), names in shapes.items()
    ]


def print_report(report: TransferReport, console: Console) -> None:
    """The figures. Of what failed it says no more than that."""
    print_table(console, table_of(report))
    for each in report.figures:
        if each.reason:
            console.print(f"{each.shape}: {each.reason}", soft_wrap=True)
    if not report.figures:
        return
    num_verified = sum(each.num_verified for each in report.figures)
    words = "every transfer" if num_verified else "the first transfer of each row"
    console.print(f"{report.repeats} transfers each; {words} was verified", soft_wrap=True)
    if any(each.kv_bytes == 0 for each in report.figures):
        console.print("0 bytes: blocks change their owner, whatever their size", soft_wrap=True)


def table_of(report: TransferReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("shape", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for name in ("GB/s", "p50\nms", "p99\nms", "x\nmemcpy", "CPU\ns/GB", "set-up\nms", "plan\nµs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("post\nµs", justify="right", no_wrap=True)
    for each in report.figures:
        table.add_row(
            each.shape,
            each.engine,
            _number(each.gb_per_s, "0 bytes"),
            _number(each.ms_p50),
            _number(each.ms_p99),
            _number(each.of_memcpy),
            _number(each.cpu_s_per_gb),
            _number(each.set_up_ms),
            _number(each.plan_us),
            _number(each.post_us),
        )
    for failure in report.failures:
        table.add_row(failure.shape, failure.engine, "failed", *["-"] * 7)
    return table


def _number(value: float | None, otherwise: str = "-") -> str:
    if value is None:
        return otherwise
    digits = 3 if value < 0.1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
