import io

import msgspec
import pytest
from rich.console import Console

from neuron_di.errors import KvCorrupt
from neuron_di.transfer_bench.measuring_end import Moved
from neuron_di.transfer_bench.report import (
    Failure,
    Samples,
    TransferReport,
    percentile,
    print_report,
    words_of,
)


def moved(transfer_s, *, kv_bytes=1 << 30, cpu_s=0.0, is_verified=False):
    return Moved(
        transfer_s=transfer_s,
        plan_s=1e-4,
        post_s=2e-4,
        cpu_s=cpu_s,
        kv_bytes=kv_bytes,
        is_verified=is_verified,
    )


def figures_of(samples, num_bytes=1 << 30, engine="shm"):
    return samples.figures(
        shape="1GiB", engine=engine, reason="", num_bytes=num_bytes, open_s=0.5, connect_s=0.002
    )


def test_figures_are_medians_and_ratios_are_of_the_copy_just_before():
    samples = Samples()
    for transfer_s, copy_s in ((1.0, 0.5), (2.0, 1.8), (4.0, 1.0)):
        samples.add(moved(transfer_s, cpu_s=1.0), copy_s)
    figures = figures_of(samples, num_bytes=2 * 10**9)
    assert (figures.ms_p50, figures.ms_p99, figures.memcpy_ms) == (2000.0, 4000.0, 1000.0)
    assert figures.gb_per_s == 1.0
    assert (figures.of_memcpy_least, figures.of_memcpy, figures.of_memcpy_most) == (0.25, 0.5, 0.9)
    assert figures.cpu_s_per_gb == 0.5
    assert (figures.plan_us, figures.post_us) == (pytest.approx(100), pytest.approx(200))
    assert (figures.open_ms, figures.set_up_ms) == (500.0, 2.0)
    assert (figures.num_transfers, figures.num_verified) == (3, 0)


def test_who_moves_no_bytes_has_no_speed():
    samples = Samples()
    samples.add(moved(0.001, kv_bytes=0, is_verified=True), 1.0)
    figures = figures_of(samples, engine="handover")
    assert (figures.gb_per_s, figures.of_memcpy, figures.cpu_s_per_gb) == (None, None, None)
    assert figures.num_verified == 1
    assert "0 bytes" in printed(figures)
    assert "every transfer was verified" in printed(figures)


def test_cpu_of_a_small_transfer_is_not_told():
    samples = Samples()
    samples.add(moved(0.001, kv_bytes=4096), 0.001)
    assert figures_of(samples, num_bytes=4096).cpu_s_per_gb is None


def test_samples_do_not_share_their_lists():
    Samples().add(moved(1.0), 1.0)
    assert Samples().transfer_s == []


@pytest.mark.parametrize(
    ("percent", "value"), [(1, 1), (50, 3), (60, 3), (61, 4), (99, 5), (100, 5)]
)
def test_percentiles_are_of_the_sample(percent, value):
    assert percentile([5, 3, 1, 4, 2], percent) == value


def test_the_report_is_json_that_can_be_read_back_and_a_table_of_80_columns():
    samples = Samples()
    samples.add(moved(0.25), 0.2)
    report = TransferReport(peer="here", repeats=1, figures=[figures_of(samples)])
    again = msgspec.json.decode(msgspec.json.encode(report), type=TransferReport)
    assert again == report
    text = printed(*report.figures)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert printed(*report.figures, width=30) == text  # a terminal wraps the lines
    assert "1GiB" in text
    assert "the first transfer of each row was verified" in text


def test_what_failed_alike_is_a_line_and_every_failure_has_its_row():
    error = KvCorrupt("other bytes")
    failures = [Failure.of(shape, "shm", error) for shape in ("64KiB", "1GiB")]
    failures.append(Failure.of("1GiB", "tcp", error))
    assert words_of(failures) == [
        "shm does not work with 64KiB, 1GiB: kv_corrupt: other bytes",
        "tcp does not work with 1GiB: kv_corrupt: other bytes",
    ]
    text = printed(failures=failures)
    assert [line.split()[:3] for line in text.splitlines() if "failed" in line] == [
        ["64KiB", "shm", "failed"],
        ["1GiB", "shm", "failed"],
        ["1GiB", "tcp", "failed"],
    ]
    assert "verified" not in text


def printed(*figures, failures=(), width=80):
    file = io.StringIO()
    report = TransferReport(peer="here", repeats=1, figures=list(figures), failures=list(failures))
    print_report(report, Console(file=file, width=width))
    return file.getvalue()
