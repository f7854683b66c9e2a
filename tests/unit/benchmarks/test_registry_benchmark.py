import threading

import pytest

from benchmarks.registry import delays
from benchmarks.registry_part import record_of
from benchmarks.registry_plot import plot_registries
from benchmarks.registry_report import (
    RegistryReport,
    Sample,
    ratio_rows,
    rows_of,
    shortfalls,
    verdict,
    write_report,
)
from benchmarks.registry_seen import Changes, Seen
from neuron_di.wire import encode_json, record_decoder

MS = 1_000_000


def sample(way, workers, number, *, missing=0, **values):
    names = ("all_seen_s", "quiet_server", "quiet_watcher", "busy_server", "busy_watcher",
             "seen_p50_ms", "seen_p99_ms", "server_mib", "watcher_mib", "down_watcher",
             "back_s", "back_server_cpu_s", "back_watcher_cpu_s")  # fmt: skip
    measured = dict.fromkeys(names, 1.0) | values
    return Sample(way=way, workers=workers, round=number, missing=missing, **measured)


@pytest.fixture
def report():
    report = RegistryReport("a command", "a machine", "a commit", 20.0)
    report.notes = {"etcd": "ours", "embedded": "ours, too", "polling": "looks"}
    for number in (1, 2):
        for way, slow in (("etcd", 2.0), ("embedded", 40.0), ("polling", 1500.0)):
            report.samples.append(sample(way, 200, number, seen_p50_ms=slow * number))
    return report


def test_a_directory_takes_the_records_that_are_announced():
    record = record_of("decode-20000", 3)
    assert record_decoder.decode(encode_json(record)) == record


def test_a_change_is_seen_when_a_later_one_of_its_worker_is():
    changes = [("a", 1, 0), ("a", 2, 5 * MS), ("b", 1, 5 * MS), ("b", 2, 6 * MS)]
    log = [("a", 2, 9 * MS), ("b", 1, 7 * MS)]
    assert delays(changes, log) == [9.0, 4.0, 2.0, float("inf")]


def test_ratios_are_within_rounds(report):
    beside = {row[1]: row for row in ratio_rows(report)}
    assert set(beside) == {"embedded", "polling"}
    assert beside["embedded"][3] == "0.05 (0.05–0.05)"
    assert [row[:2] for row in rows_of(report)] == [
        ("200", way) for way in ("etcd", "embedded", "polling")
    ]


def test_what_falls_short_is_ours_and_not_anothers(report):
    assert shortfalls(report) == []
    assert verdict(report).startswith("With 200 workers etcd takes 1.0 % of a core")
    report.samples.append(sample("polling", 200, 3, missing=7, seen_p99_ms=3000.0))
    assert shortfalls(report) == []
    report.samples.append(sample("etcd", 200, 3, missing=2, seen_p99_ms=1500.0))
    assert shortfalls(report) == [
        "etcd, 200 workers, round 3: 2 workers were not seen, or not again",
        "etcd, 200 workers, round 3: put to seen takes 1500 ms at p99",
    ]
    assert verdict(report).startswith("Ours falls short:")


def test_the_files(report, tmp_path):
    report.samples.append(sample("etcd", 1, 1, back_s=float("inf")))
    write_report(report, tmp_path)
    plot_registries(report, tmp_path / "registry.png")
    assert "| 200 | etcd | " in (tmp_path / "registry.md").read_text()
    assert (tmp_path / "registry.png").read_bytes().startswith(b"\x89PNG")


def test_who_waits_hears_of_all_and_who_is_missing():
    seen = Seen()
    seen.note("a", 3)
    seen.note("a", 2)  # older: it is known
    assert seen.wait({"a": 3, "b": 0}, 0.0) == ["b"]
    thread = threading.Thread(target=seen.note, args=("b", 1))
    thread.start()
    assert seen.wait({"a": 3, "b": 1}, 30.0) == []
    thread.join()
    assert [(worker, number) for worker, number, _ in seen.take_log()] == [("a", 3), ("b", 1)]
    assert seen.take_log() == []


def test_changes_are_made_in_turn():
    announced = []
    changes = Changes(["a", "b"], announced.append)
    assert [changes.one_more()[:2] for _ in range(3)] == [("b", 1), ("a", 1), ("b", 2)]
    assert [moment[:2] for moment in changes.touch_all()] == [("a", 2), ("b", 3)]
    assert announced == ["b", "a", "b", "a", "b"]
