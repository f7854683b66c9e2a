"""`neuron-di doctor`: what it does with its flags."""

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from neuron_di.clock import now_s
from neuron_di.doctor.checks import Check, chosen
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.options import DoctorOptions, read_options
from neuron_di.doctor.report import Doing, FindingPrinter, Report
from neuron_di.doctor.runner import run_check
from neuron_di.errors import ConfigError, NeuronDiError


def run(flags: argparse.Namespace) -> int:
    """Returns the exit code: 1 when something failed. Raises ConfigError.

    SystemExit on SIGTERM and SIGHUP, with what a shell makes of that signal.
    """
    _open_streams()
    with _signals_raise():
        return _run(flags)


def _open_streams() -> None:
    """A stream that was closed swallows all, and its number is no check's; one that lacks a
    character of ours writes another."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _run(flags: argparse.Namespace) -> int:
    machine = Machine()
    options = read_options(flags, machine.environment)
    checks = chosen(options)
    if flags.first_hour is not None:
        _refuse_beside_first_hour(flags, options)
        from neuron_di.doctor.first_hour import write_report

        return write_report(machine, options, Path(flags.first_hour))
    start_s = now_s()
    findings: list[Finding] = []
    printer = None if flags.json else FindingPrinter()
    with Doing() as doing:
        for check in checks:
            findings += _examine(check, machine, options, doing, printer)
    report = Report.of(findings, now_s() - start_s)
    with _writing():
        if printer is None:
            sys.stdout.write(report.json() + "\n")
            sys.stdout.flush()
        else:
            printer.show_summary(report)
    return 0 if report.is_well else 1


def _refuse_beside_first_hour(flags: argparse.Namespace, options: DoctorOptions) -> None:
    """ConfigError for what would change nothing: it asks its own questions, and has its report."""
    if options.only:
        raise ConfigError(
            "--first-hour asks its own questions, and takes no --only: leave one of them out",
            param="only",
        )
    if flags.json:
        raise ConfigError(
            "--first-hour writes its JSON into its report, and takes no --json: leave one of them "
            "out",
            param="json",
        )


@contextmanager
def _writing() -> Iterator[None]:
    """NeuronDiError where standard output takes no more, as on a disk that is full."""
    try:
        yield
    except BrokenPipeError:  # who read has seen enough
        raise
    except OSError as error:
        # What is still to be written would fail anew at the end, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise NeuronDiError(f"standard output cannot be written: {error.strerror}") from error


@contextmanager
def _signals_raise() -> Iterator[None]:
    """As Ctrl-C does, so that what was begun is ended in order. One that is ignored stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may set no handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _examine(
    check: Check,
    machine: Machine,
    options: DoctorOptions,
    doing: Doing,
    printer: FindingPrinter | None,
) -> list[Finding]:
    findings = []
    doing.show(f"checking {check.group}")
    for finding in run_check(check, machine, options):
        findings.append(finding)
        if printer is not None:
            doing.clear()
            with _writing():
                printer.show(finding)
            doing.show(f"checking {check.group}")
    return findings
