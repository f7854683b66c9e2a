"""How findings look: to a person, to a pipe, and to a program."""

import io
import json
import sys

import pytest

from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.report import Doing, FindingPrinter, Report

LONG = "a sentence that is so long that no terminal of eighty columns could show it in one line"
FINDINGS = [
    Finding(check="host.system", grade=Grade.OK, says="fine"),
    Finding(check="etcd.member", grade=Grade.FAILED, says=LONG, mend=f"Do this: {LONG}"),
    Finding(check="clock.synchronised", grade=Grade.WARNING, says="late", mend="Set it."),
    Finding(check="neuron.devices", grade=Grade.NOTE, says="none", facts={"num_devices": 0}),
]


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, columns: int | None) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", stream)
    printer = FindingPrinter()
    for finding in FINDINGS:
        printer.show(finding)
    printer.show_summary(Report.of(FINDINGS, 1.25))
    return stream.getvalue()


def test_a_pipe_gets_a_line_for_each_sentence_without_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown(monkeypatch, io.StringIO(), None).splitlines()
    assert lines == [
        "ok       host.system             fine",
        f"failed   etcd.member             {LONG}",
        f"                                 → Do this: {LONG}",
        "warning  clock.synchronised      late",
        "                                 → Set it.",
        "note     neuron.devices          none",
        "",
        "1 failed, 1 warning, 1 note, 1 ok, in 1.2 s",
        "failed: etcd.member",
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_gets_lines_that_fit_it(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(monkeypatch, Terminal(), columns)
    plain = text.replace("\x1b[31m", "").replace("\x1b[1;31m", "").replace("\x1b[0m", "")
    plain = plain.replace("\x1b[32m", "").replace("\x1b[33m", "")
    lines = plain.splitlines()
    assert max(map(len, lines)) < columns
    if columns > 60:
        assert LONG.split() == " ".join(lines[1:3]).split()[2:]
    assert (len(lines) > 11) == (columns <= 80)


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), 120)
    assert "\x1b[32mok" in text
    assert "\x1b[1;31mfailed" in text


def test_words_of_others_do_not_command_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = Finding(check="a.b", grade=Grade.OK, says="x\x1b[2J\ny [bold]z[/bold]")
    FindingPrinter().show(evil)
    assert capsys.readouterr().out == f"ok       {'a.b':<22}  x?[2J?y [bold]z[/bold]\n"


def test_json_has_the_same_keys_each_time() -> None:
    report = json.loads(Report.of(FINDINGS, 1.23456).json())
    assert list(report) == ["is_well", "counts", "duration_s", "findings", "version", "format"]
    assert report["is_well"] is False
    assert report["counts"] == {"ok": 1, "note": 1, "warning": 1, "failed": 1, "skipped": 0}
    assert report["duration_s"] == 1.235
    assert report["findings"][3] == {
        "check": "neuron.devices",
        "grade": "note",
        "says": "none",
        "mend": "",
        "facts": {"num_devices": 0},
    }


def test_without_a_failure_all_is_well() -> None:
    assert Report.of(FINDINGS[2:], 0).is_well
    assert Report.of([], 0).is_well


def test_nothing_found_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    FindingPrinter().show_summary(Report.of([], 0.5))
    assert capsys.readouterr().out == "\nnothing was looked at, in 0.5 s\n"


def test_what_is_being_done_is_shown_on_a_terminal_and_wiped_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, expected in (
        (Terminal(), "\r\x1b[2Kchecking host …\r\x1b[2K\r\x1b[2K"),
        (io.StringIO(), ""),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with Doing() as doing:
            doing.show("checking host")
            doing.clear()
        assert stream.getvalue() == expected
