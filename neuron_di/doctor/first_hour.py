"""`neuron-di doctor --first-hour FILE`: what nobody could try yet, tried on this machine.

This project has never run on Neuron hardware. Whoever has some answers eight open questions with
this, without a model or with one, and can send what it writes: no names, no addresses, no keys.
A server that runs notices nothing: only free cores are taken, by processes that end.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from neuron_di.clock import Deadline
from neuron_di.config import DoctorOptions
from neuron_di.doctor import first_hour_runtime as runtime
from neuron_di.doctor import first_hour_transfers as transfers
from neuron_di.doctor.checks import CHECKS
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.first_hour_point import QUESTIONS, Point, skipped
from neuron_di.doctor.first_hour_report import write
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.neuron_asked import Asked, ask_library, try_cores
from neuron_di.doctor.runner import run_check
from neuron_di.errors import ConfigError

_CORES_TIMEOUT_S = 300.0
_MODULES = ("neuron_devices", "neuron_software", "neuron_variables", "efa")  # of other checks


def write_report(machine: Machine, options: DoctorOptions, path: Path) -> int:
    """Answer what can be answered, and write it. Returns 1 where something failed, else 0.

    ConfigError, before anything is tried, where the file cannot be written.
    """
    path = _writable(path)
    points: list[Point] = []
    for each in _answers(machine, options):
        _tell(f"{each.number} of {len(QUESTIONS)}  {each.outcome}  {each.answer}")
        points = sorted([*points, each], key=lambda point: point.number)
        write(path, machine, points, [])  # whatever ends this, so much is there
    _tell("the other checks")
    findings = list(_findings(machine, options))
    write(path, machine, points, findings)
    _tell(f"written to {path}: look at it, then send it")
    return 1 if any(each.outcome == Grade.FAILED for each in points) else 0


def _writable(path: Path) -> Path:
    """Where the report goes: what a link leads to. It replaces a file, and nothing else; its
    folder is there.

    ConfigError where it cannot.
    """
    try:
        # Before the link is resolved: that of a pipe leads to no path.
        if path.exists() and not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"--first-hour: {path} is no ordinary file: name one")
        path = path.resolve()
        if path.is_symlink():  # to itself, in the end: from Python 3.13 on that is no error
            raise ConfigError(f"--first-hour: {path} cannot be written: links in a circle")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            return path
    except (OSError, RuntimeError) as error:  # RuntimeError: the same, before
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--first-hour: {path} cannot be written: {why}") from None


def _answers(machine: Machine, options: DoctorOptions) -> Iterator[Point]:
    asked = ask_library(machine, options)
    yield runtime.library(machine, asked)
    total = asked.steps.of("total").get("num_cores", 0)
    free: list[tuple[int, Asked]] = []
    why = "The runtime counts no NeuronCores."
    try:
        if total:
            why = "Other processes have the NeuronCores that were tried."
            deadline = Deadline.after(_CORES_TIMEOUT_S)
            tried = try_cores(machine, options, total, deadline, wanted=2)
            free = [(lnc, said) for lnc, said in tried if not said.is_taken]
    except ConfigError as error:
        why = f"No core may be used: {error.message}."
    if not free:
        yield skipped(2, why)
        yield runtime.fabric(machine)
        yield from _all_skipped(why)
        return
    answered, variables = runtime.send_receive(machine, options, *free[0])
    yield answered
    yield runtime.fabric(machine)
    if len(free) < 2:
        yield from _all_skipped("It takes two NeuronCores, and one is free.")
        return
    cores = (free[0][0], free[1][0])
    bench = transfers.Bench(
        machine=machine, options=options, total=total, cores=cores, variables=variables or {}
    )
    yield from transfers.model(bench)
    yield transfers.nixl(bench)
    if variables is None:
        for number in (7, 8):
            yield skipped(number, "Send and receive does not open (question 2).")
    else:
        yield from transfers.pair(bench)


def _all_skipped(why: str) -> Iterator[Point]:
    """Those that take two cores."""
    for number in (4, 5, 6, 7, 8):
        yield skipped(number, why)


def _findings(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    for check in CHECKS:
        if check.module in _MODULES:
            yield from run_check(check, machine, options)


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
