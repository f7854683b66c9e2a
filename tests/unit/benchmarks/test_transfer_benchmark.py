import os
import shutil
from contextlib import ExitStack

import psutil
import pytest
from rich.console import Console

from benchmarks.contenders.transfer_segment import Settings, pieces_of
from benchmarks.transfer import CONTIGUOUS, PAGED, blocks_of, by_block_bytes, make_parser, opened
from benchmarks.transfer_plot import plot_transfers
from benchmarks.transfer_report import (
    C_TCP,
    C_TWO_CORES,
    TABLES,
    TCP_TWO_CORES,
    Cell,
    TransferReport,
    cost_table,
    cpu_table,
    duel_table,
    ratio_table,
    shortfalls,
    verdict,
    write_report,
)
from benchmarks.transfer_ways import CReference, SetUp
from neuron_di.errors import ConfigError
from neuron_di.transfer_bench.places import Choice

SPEEDS = {
    "shm": 0.9,
    "tcp": 0.5,
    TCP_TWO_CORES: 0.63,
    "handover": 5.0,
    C_TCP: 0.55,
    C_TWO_CORES: 0.7,
    "NIXL shm READ": 0.6,
    "NIXL shm WRITE": 0.7,
    "NIXL tcp READ": 0.2,
    "NIXL tcp WRITE": 0.4,
    "Mooncake tcp READ": 0.1,
    "Mooncake tcp WRITE": 0.05,
}


def cell(shape, way, number, of_memcpy, **more):
    num_blocks, block_bytes, _ = blocks_of(shape)
    fields = {"prepare_s": 1e-4, "post_s": 2e-4, "writer_s": 0.0, "cpu_s": 0.1} | more
    return Cell(
        shape=shape,
        way=way,
        round=number,
        num_bytes=num_blocks * block_bytes,
        num_blocks=num_blocks,
        repeats=1,
        memcpy_s=0.01 * number,
        wall_s=0.01 * number / of_memcpy,
        **fields,
    )


@pytest.fixture
def report():
    report = TransferReport("a command", "a machine", "a commit")
    for shape in ("64KiB", "4096x16KiB"):
        for number in (1, 2, 3):
            report.cells += [cell(shape, way, number, v) for way, v in SPEEDS.items()]
    report.set_ups = {way: [SetUp(open_s=0.5, pair_s=0.002)] for way in SPEEDS}
    return report


def test_all_shapes_are_served_by_three_pairs_of_pools():
    groups = by_block_bytes([*CONTIGUOUS, *PAGED])
    assert {size >> 10: len(names) for size, names in groups.items()} == {64: 7, 16: 1, 4: 1}
    assert blocks_of("1GiB") == (16_384, 65_536, True)
    assert blocks_of("4KiB") == (1, 4096, True)
    assert blocks_of("4096x16KiB") == (4096, 16_384, False)
    with pytest.raises(ConfigError):
        blocks_of("100KiB")


def test_the_flags_have_the_defaults_of_the_whole_run():
    options = make_parser().parse_args([])
    assert (options.shapes, options.rounds) == ([*CONTIGUOUS, *PAGED], 7)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--engines", "carrier-pigeon"])


def test_neighbours_at_both_ends_are_one_piece():
    assert pieces_of([1, 2, 3, 7, 8], [4, 5, 9, 10, 11], 10) == (
        [10, 30, 70],
        [40, 90, 100],
        [20, 10, 20],
    )
    assert pieces_of([5], [0], 10) == ([50], [0], [10])


def test_ours_is_compared_with_the_better_of_anothers_ways(report):
    headings, rows = duel_table(report)
    row = dict(zip(headings, rows[0], strict=True))
    assert row["shm / NIXL shm"] == "1.29 (1.29–1.29)"
    assert row["shm / Mooncake tcp"] == "9.00 (9.00–9.00)"
    assert row["tcp / NIXL tcp"] == "1.25 (1.25–1.25)"
    assert row["tcp / C over TCP"] == "0.91 (0.91–0.91)"
    assert row["tcp on two cores / C on two cores"] == "0.90 (0.90–0.90)"
    assert report.best("NIXL tcp", "64KiB") == "NIXL tcp WRITE"
    assert report.best("nobody", "64KiB") is None


def test_ratios_to_memcpy_are_within_rounds_and_leave_out_who_moves_nothing(report):
    headings, rows = ratio_table(report)
    assert "handover" not in headings
    assert rows[0][1] == "0.90 (0.90–0.90)"


def test_cpu_is_told_where_it_is_that_of_the_bytes(report):
    _, rows = cpu_table(report)
    assert [row[0] for row in rows] == ["4096x16KiB"]
    assert rows[0][1] == f"{0.1 / (4096 * 16_384) * 1e9:.2f}"


def test_costs_before_the_bytes(report):
    headings, rows = cost_table(report)
    row = dict(zip(headings, rows[0], strict=True))
    assert row["set-up of a pair, ms"] == "2.0"
    assert (row["plan 4,096, µs"], row["post, µs"]) == ("100", "200")
    assert row["its write alone"] == "-"


def test_nothing_falls_short_where_all_is_as_promised(report):
    assert shortfalls(report) == []
    assert verdict(report).endswith(
        "as fast as promised and ahead of Mooncake and NIXL in every row."
    )


@pytest.mark.parametrize(
    ("shape", "way", "speed", "words"),
    [
        ("4096x16KiB", "shm", 0.84, "4096x16KiB: shm has 0.84 of memcpy's speed, promised 0.85"),
        ("64KiB", "tcp", 0.44, "64KiB: tcp has 0.80 of the speed of C over TCP, promised 0.85"),
        (
            *("64KiB", TCP_TWO_CORES, 0.56),
            "64KiB: tcp on two cores has 0.80 of the speed of C on two cores, promised 0.85",
        ),
        ("64KiB", "shm", 0.63, "64KiB: shm has 0.90 of the speed of NIXL shm WRITE"),
    ],
)
def test_what_falls_short_is_said(report, shape, way, speed, words):
    report.cells = [
        cell(c.shape, c.way, c.round, speed) if (c.shape, c.way) == (shape, way) else c
        for c in report.cells
    ]
    assert shortfalls(report) == [words]
    assert words in verdict(report)


def test_slow_planning_is_said(report):
    report.cells = [
        cell(c.shape, c.way, c.round, SPEEDS[c.way], prepare_s=4e-4)
        if (c.shape, c.way) == ("4096x16KiB", "tcp")
        else c
        for c in report.cells
    ]
    assert shortfalls(report) == ["4096x16KiB: tcp plans and posts in 600 µs, promised 500"]


def test_the_files_also_where_others_are_missing(report, tmp_path):
    for ways in (set(SPEEDS), {"shm", "tcp", C_TCP}):
        report.cells = [each for each in report.cells if each.way in ways]
        write_report(report, tmp_path)
        plot_transfers(report, tmp_path / "transfer.png")
        text = (tmp_path / "transfer.md").read_text()
        assert all(f"| {make(report)[0][0]} |" in text for make in TABLES)
        assert (tmp_path / "transfer.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("is_kept", [False, True], ids=["anywhere", "kept on its core"])
def test_the_c_program_moves_the_blocks_that_it_is_told(tmp_path, is_kept):
    cpus = sorted(os.sched_getaffinity(0))
    num_blocks, size = 64, 4096
    path = tmp_path / "segment"
    path.write_bytes(b"".join(bytes([index]) * size for index in range(num_blocks)))
    segment = Settings("", str(path), 0, num_blocks * size, size, "")
    with ExitStack() as stack:
        way = CReference(segment, tmp_path, stack, cpus=(cpus[-1], cpus[0]) if is_kept else None)
        found = way.move(Choice.of([3, 4, 9, 1], [40, 41, 30, 31]))
    blocks = [path.read_bytes()[at : at + size] for at in range(0, num_blocks * size, size)]
    expected = {40: 3, 41: 4, 30: 9, 31: 1, num_blocks - 1: 0}  # the last one: at its set-up
    assert blocks == [bytes([expected.get(index, index)]) * size for index in range(num_blocks)]
    assert 0 < found.wall_s < 10
    assert way.set_up.pair_s > 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_end_of_ours_is_kept_on_a_core_of_its_own():
    options = make_parser().parse_args(["--engines", "tcp", "--pool-mib", "4"])
    cores = sorted(os.sched_getaffinity(0))
    before, threads = set(psutil.Process().children()), _threads()
    with opened(4096, options, Console(quiet=True)) as bench:
        assert [way.name for way in bench.ours] == ["tcp", TCP_TWO_CORES]
        moved = bench.ours[1].move_anywhere(5, is_contiguous=False, verify=True)
        added = _threads() - threads
        kept = [thread for thread in added if os.sched_getaffinity(thread) == {cores[0]}]
        ends = [end for end in psutil.Process().children() if "--serve" in end.cmdline()]
        of_ends = [os.sched_getaffinity(end.pid) for end in ends]
    assert moved.wall_s > 0
    assert 0 < len(kept) < len(added)  # those of the other pair run anywhere
    assert sorted(of_ends, key=len) == [{cores[1]}, set(cores)]
    assert os.sched_getaffinity(0) == set(cores)
    assert set(psutil.Process().children()) == before


def _threads():
    return {int(name) for name in os.listdir("/proc/self/task")}
