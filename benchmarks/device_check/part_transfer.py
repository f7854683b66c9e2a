"""KV from one process to another on the same GPU, beside copies within it.

Twice: as `neuron-di bench-transfer` does it, beside a copy of as many bytes in one piece, which
is the target's; and beside a copy of the same runs between two pools of one process.
"""

from benchmarks import cuda_ipc
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import Settings
from neuron_di.transfer_bench.measure import measure_on_this_host
from neuron_di.transfer_bench.report import words_of

SHAPES = (
    *("64KiB", "1MiB", "16MiB", "256MiB", "1GiB"),
    *("256x64KiB", "4096x16KiB", "4096x64KiB", "16384x4KiB"),
)
_SMALL_SHAPES = ("64KiB", "16x4KiB")
_POOL_BYTES = 2 << 30
_COLUMNS = ["shape", "engine", "GB/s", "ms", "copy, ms", "of the copy", "least to most", "post, µs"]


def measure(settings: Settings, record: Record) -> None:
    engine = "cuda_ipc" if settings.device == "cuda" else "shm"
    report = measure_on_this_host(
        [engine],
        _SMALL_SHAPES if settings.is_small else SHAPES,
        repeats=settings.pick(50, 20, 2),
        verify=settings.is_small,
        pool_bytes=settings.pick(_POOL_BYTES, _POOL_BYTES, 1 << 20),
    )
    rows = []
    for each in report.figures:
        assert each.of_memcpy is not None, "this engine moves bytes"
        rows.append(
            [
                each.shape,
                each.engine,
                f"{each.gb_per_s:.1f}",
                f"{each.ms_p50:.3f}",
                f"{each.memcpy_ms:.3f}",
                f"{each.of_memcpy:.2f}",
                f"{each.of_memcpy_least:.2f} to {each.of_memcpy_most:.2f}",
                f"{each.post_us:.0f}",
            ]
        )
        record.figure("transfer_copy", each.shape, each.of_memcpy)
    record.table("Beside one copy of as many bytes", _COLUMNS, rows)
    if settings.device == "cuda":
        beside_the_same_runs(settings, record)
    if report.failures:
        raise RuntimeError("; ".join(words_of(report.failures)))


def beside_the_same_runs(settings: Settings, record: Record) -> None:
    cases = ((1, 256 << 20), (4096, 64 << 10))
    rows = []
    for num_blocks, block_bytes in ((1, 1 << 16), (16, 4 << 10)) if settings.is_small else cases:
        row = cuda_ipc.measure_case(
            num_blocks,
            block_bytes,
            pool_bytes=settings.pick(_POOL_BYTES, _POOL_BYTES, 1 << 18),
            num_rounds=settings.pick(30, 15, 2),
        )
        speeds = (row.gigabytes / row.copy_s, row.gigabytes / row.ipc_s)
        rows.append([row.size, *(f"{speed:,.1f}" for speed in speeds), f"{row.ratio:.2f}"])
        record.figure("", f"transfer beside a copy of the same runs, {row.size}", row.ratio)
    columns = ["blocks", "copy, GB/s", "cuda_ipc, GB/s", "ratio"]
    record.table("Beside a copy of the same runs within one process", columns, rows)
