"""KV from one process to another, beside memcpy and others: `python -m benchmarks.transfer`.

Ours, a C program over loopback, NIXL and Mooncake move the same blocks of the same memory, one
after another in every round, with a memcpy of as many bytes before each. See benchmarks/README.md.
Exit code 1 when ours is slower than promised, or than another.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console

from benchmarks.contenders.transfer_segment import Settings
from benchmarks.provenance import command_line, commit_description, machine_description
from benchmarks.transfer_plot import plot_transfers
from benchmarks.transfer_report import (
    TCP,
    Cell,
    TransferReport,
    print_report,
    shortfalls,
    write_report,
)
from benchmarks.transfer_ways import CReference, Ours, Sample, Way, peer_ways, running_on
from neuron_di.errors import ConfigError, KvCorrupt
from neuron_di.kv import ArenaPool
from neuron_di.transfer_bench.block_bytes import clear, digest
from neuron_di.transfer_bench.local_end import local_serving_end
from neuron_di.transfer_bench.measuring_end import EXCHANGES, MeasuringEnd
from neuron_di.transfer_bench.plain_copy import PlainCopy
from neuron_di.transfer_bench.resources import REGION_BYTES_MAX
from neuron_di.transfer_bench.shape import Shape

MODULE = "benchmarks.transfer"
OURS = ("shm", "tcp", EXCHANGES)
CONTIGUOUS = ("64KiB", "1MiB", "16MiB", "256MiB", "1GiB")
PAGED = ("256x64KiB", "4096x16KiB", "4096x64KiB", "16384x4KiB")
CONTIGUOUS_BLOCK_BYTES = 64 << 10  # as a pool has them: neighbours at both ends
_REPEATS = ((64 << 10, 30), (1 << 20, 16), (16 << 20, 4))  # up to so many bytes


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, 150)
    begun_s = time.monotonic()
    report = TransferReport(
        command=command_line(MODULE, options, parser.parse_args([])),
        machine=machine_description(),
        commit=commit_description(),
    )
    console.print(f"[dim]{report.machine}\n{report.command}[/dim]", soft_wrap=True)
    copy = PlainCopy(min(REGION_BYTES_MAX, options.pool_mib << 20))
    with console.status("", refresh_per_second=1) as status:
        for block_bytes, names in by_block_bytes(options.shapes).items():
            status.update(f"set-up for blocks of {block_bytes >> 10} KiB")
            with opened(block_bytes, options, console) as bench:
                bench.measure(names, options.rounds, copy, report, status.update)
    copy.close()
    report.took_s = time.monotonic() - begun_s
    print_report(console, report)
    write_report(report, options.results)
    plot_transfers(report, options.results / "transfer.png")
    console.print(f"written: transfer.md, .json, .png in {options.results}")
    return 1 if shortfalls(report) else 0


def by_block_bytes(names: list[str]) -> dict[int, list[str]]:
    """Shapes that one pair of pools serves."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(blocks_of(name)[1], []).append(name)
    return found


def blocks_of(name: str) -> tuple[int, int, bool]:
    """Number, size, and whether they lie side by side."""
    shape = Shape.of(name)
    if shape.num_blocks > 1:
        return shape.num_blocks, shape.block_bytes, False
    size = min(shape.num_bytes, CONTIGUOUS_BLOCK_BYTES)
    if shape.num_bytes % size:
        raise ConfigError(f"shape {name}: contiguous ones are multiples of 64 KiB")
    return shape.num_bytes // size, size, True


class Bench:
    """Pools of one block size, and every way between them."""

    def __init__(self, end: MeasuringEnd, ours: list[Ours], others: list[Way]) -> None:
        self._end = end
        self.ours = ours
        self._others = others

    def measure(
        self,
        names: list[str],
        rounds: int,
        copy: PlainCopy,
        report: TransferReport,
        tell: Callable[[str], object],
    ) -> None:
        for name in names:
            num_blocks, _, is_contiguous = blocks_of(name)
            ways = [*self.ours, *self._others]
            for way in ways:
                tell(f"{name}: {way.name}, verified")
                self._verify(way, num_blocks, is_contiguous)
            for number in range(1, rounds + 1):
                for way in ways if number % 2 else reversed(ways):
                    tell(f"{name}, round {number} of {rounds}: {way.name}")
                    cell = self._cell(way, name, number, copy)
                    report.cells.append(cell)
            for way in ways:
                self._verify(way, num_blocks, is_contiguous)
        for way in [*self.ours, *self._others]:
            report.set_ups.setdefault(way.name, []).append(way.set_up)
            if way.version and way.version not in report.others:
                report.others.append(way.version)

    def _cell(self, way: Ours | Way, name: str, number: int, copy: PlainCopy) -> Cell:
        """A round's turn of one way: medians, where there is time for several."""
        num_blocks, block_bytes, is_contiguous = blocks_of(name)
        num_bytes = num_blocks * block_bytes
        repeats = next((count for most, count in _REPEATS if num_bytes <= most), 1)
        if way.name == EXCHANGES:
            repeats = max(2, repeats)  # there and back
        copied_s, samples = [], []
        for _ in range(repeats):
            copied_s.append(copy.seconds(num_bytes))
            samples.append(self._move(way, num_blocks, is_contiguous))
        return Cell(
            shape=name,
            way=way.name,
            round=number,
            num_bytes=num_bytes,
            num_blocks=num_blocks,
            repeats=repeats,
            memcpy_s=median(copied_s),
            wall_s=median(sample.wall_s for sample in samples),
            prepare_s=median(sample.prepare_s for sample in samples),
            post_s=median(sample.post_s for sample in samples),
            writer_s=median(sample.writer_s for sample in samples),
            cpu_s=sum(sample.cpu_s for sample in samples) / repeats,
        )

    def _move(self, way: Ours | Way, num_blocks: int, is_contiguous: bool) -> Sample:
        if isinstance(way, Ours):
            scattered = way.name == EXCHANGES
            return way.move_anywhere(num_blocks, is_contiguous=is_contiguous and not scattered)
        return way.move(self._end.places.choose(num_blocks, is_contiguous=is_contiguous))

    def _verify(self, way: Ours | Way, num_blocks: int, is_contiguous: bool) -> None:
        """Move once more, and compare every byte. Raises KvCorrupt."""
        if isinstance(way, Ours):
            for _ in range(2 if way.name == EXCHANGES else 1):
                way.move_anywhere(num_blocks, is_contiguous=False, verify=True)
            return
        pool = self._end.pool
        memory, block_bytes = pool.memory(), pool.layout.block_bytes
        choice = self._end.places.choose(num_blocks, is_contiguous=is_contiguous)
        clear(memory, choice.block_ids, block_bytes)
        way.move(choice)
        sent, received = (
            digest(memory, ids, block_bytes) for ids in (choice.source_ids, choice.block_ids)
        )
        if sent != received:
            raise KvCorrupt(f"{way.name} brought other bytes than were sent")


@contextmanager
def opened(block_bytes: int, options: argparse.Namespace, console: Console) -> Iterator[Bench]:
    """Two pools of at least `--pool-mib` each, and every way that is there."""
    with ExitStack() as stack:
        ends = [end := _measuring_end(block_bytes, options, stack)]
        pool = end.pool
        assert isinstance(pool, ArenaPool), "the pools are not in one memory"
        ours: list[Ours] = []
        for number, engine in enumerate(options.engines):
            try:
                ours.append(Ours(end, number, engine))
            except ConfigError as error:
                console.print(f"[dim]without {engine}: {error.message}[/dim]")
        cores = sorted(os.sched_getaffinity(0))
        two = (cores[0], cores[1]) if len(cores) > 1 else None
        if TCP in options.engines and two is not None:
            with running_on({two[1]}):
                ends.append(_measuring_end(block_bytes, options, stack))
            ours.append(Ours(ends[1], 0, TCP, cpus=two))
        segment = Settings(
            role="",
            path=f"/proc/{pool.region().pid}/fd/{pool.region().fd}",
            offset=pool.arena.data_offset,
            num_bytes=pool.arena.num_granted * block_bytes,
            block_bytes=block_bytes,
            transport="",
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-transfer-")))
        others: list[Way] = [CReference(segment, folder, stack)]
        if two is not None:
            others.append(CReference(segment, folder, stack, cpus=two))
        others += peer_ways(options.nixl_python, options.mooncake_python, segment, stack)
        yield Bench(end, ours, others)
        for each in ends:
            each.close_pools()


def _measuring_end(block_bytes: int, options: argparse.Namespace, stack: ExitStack) -> MeasuringEnd:
    """With a process of its own at the other end, and a pool of at least `--pool-mib` at each."""
    end = MeasuringEnd(stack.enter_context(local_serving_end()), has_arena=True)
    stack.callback(end.close)
    end.open_pools(Shape(1, block_bytes), options.pool_mib << 20)
    return end


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", default=[*CONTIGUOUS, *PAGED], metavar="SHAPE")
    parser.add_argument("--engines", nargs="+", default=list(OURS), choices=OURS, help="of ours")
    parser.add_argument(
        "--pool-mib", type=int, default=1024, help="of each end: more than a cache holds"
    )
    parser.add_argument("--nixl-python", type=Path, help="a Python that has nixl-cu12 1.5.1")
    parser.add_argument(
        "--mooncake-python", type=Path, help="one that has mooncake-transfer-engine-non-cuda"
    )
    parser.add_argument(
        "--results", type=Path, default=Path(__file__).parent / "results", help="folder to write to"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
