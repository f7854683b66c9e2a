import threading

import pytest

from benchmarks.transfer_interference import Mover, spell_of
from benchmarks.transfer_interference_report import (
    QUIET,
    Spell,
    TransferInterferenceReport,
    rows_of,
    shortfalls,
    verdict,
    write_report,
)


def spells(role, kind, step_s, *, num_during=5):
    during = 0 if kind == QUIET else num_during
    return [Spell(role, kind, [step_s * number] * 10, during, 3) for number in (1, 2)]


@pytest.fixture
def report():
    report = TransferInterferenceReport("a command", "a machine", "a commit", "4096x16KiB")
    for role in ("decode", "prefill"):
        for kind, step_s in ((QUIET, 1.0), ("shm", 1.01), ("tcp", 1.02), ("memcpy elsewhere", 1.5)):
            report.spells += spells(role, kind, step_s)
    return report


def test_spells_are_compared_with_the_quiet_one_of_their_round(report):
    assert report.by_quiet("decode", "shm").median == pytest.approx(1.01)
    assert shortfalls(report) == []
    assert verdict(report).startswith("A decode step takes +2.0% while KV is received")
    assert "20 prefill steps began" in verdict(report)
    rows = {row[:2]: row for row in rows_of(report)}
    assert rows["decode", "tcp"][4] == "1.020 (1.020–1.020)"
    assert rows["decode", "tcp"][6] == "10 of 20"


def test_what_is_not_as_promised_is_said(report):
    report.spells = [spell for spell in report.spells if spell.kind != "tcp"]
    report.spells += spells("decode", "tcp", 1.03) + spells("prefill", "tcp", 1.0, num_during=0)
    assert shortfalls(report) == [
        "decode steps take 3.0% longer while tcp receives",
        "no prefill step began in a whole spell while tcp sent",
    ]


def test_the_file(report, tmp_path):
    write_report(report, tmp_path)
    text = (tmp_path / "transfer_interference.md").read_text()
    assert "| decode | quiet | " in text
    assert "2 spells of each kind" in text


def test_a_mover_moves_while_it_is_told_to_and_steps_during_that_are_counted():
    has_stepped, may_end = threading.Event(), threading.Event()
    moved = []

    def move():
        assert has_stepped.wait(30)
        moved.append(1)
        may_end.set()

    mover = Mover(move)
    try:

        def step():
            has_stepped.set()
            assert may_end.wait(30)

        spell = spell_of("decode", "shm", step, mover, 0.05)
        num_moved = len(moved)
        assert spell.num_moved == num_moved >= 1
        assert not mover.is_moving
        assert spell_of("decode", QUIET, lambda: None, None, 0.001).num_during == 0
        assert len(moved) == num_moved
    finally:
        mover.end()
