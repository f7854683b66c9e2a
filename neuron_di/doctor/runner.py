"""Runs a check in a process of its own: it may hang, or die of a library, and the next one runs.

The process is a fork, which costs milliseconds, has nothing heavy in it, and gives each check a
device's runtime that nobody has touched yet. Findings come through one pipe, a line of JSON each,
and whatever else the check or its libraries print through another one.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from neuron_di.clock import Deadline
from neuron_di.config import DoctorOptions
from neuron_di.doctor.checks import Check
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine, last_line
from neuron_di_bindings.process import end_with_parent

FINDINGS_MAX = 500  # of one check
WORDS_MAX = 300
_LINE_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 16
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_EVERY_S = 0.1  # whether the process ended, where one of its own keeps the pipes open

Run = Callable[[], Iterator[Finding]]


def run_check(check: Check, machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """What the check finds, as it finds it, and what became of it where it did not end well.

    Its process, and what that started, are gone at the end, also when this is not read on.
    """
    yield from run_apart(
        lambda: check.function()(machine, options), name=check.module, timeout_s=check.timeout_s
    )


def run_apart(run: Run, *, name: str, timeout_s: float) -> Iterator[Finding]:
    """The same for any function. `name` is what it is called where it did not end well."""
    deadline = Deadline.after(timeout_s)
    process = _Process(run, name)
    has_ended = False
    try:
        for number, line in enumerate(process.lines(deadline)):
            if number == FINDINGS_MAX:
                yield _bug(name, ValueError(f"it finds more than {FINDINGS_MAX} things"))
                return
            yield msgspec.json.decode(line, type=Finding)
        has_ended = process.wait(deadline)
    finally:
        status = process.end()
    if not has_ended:
        yield _late(name, timeout_s)
    elif status != 0:
        yield _died(name, status, process.last_words())


class _Process:
    """A fork of this process that runs a check. Whoever made it calls `end`."""

    def __init__(self, run: Run, name: str) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._findings, findings = os.pipe()
        self._printed, printed = os.pipe()
        self._tail = b""  # of what was printed
        parent = os.getpid()
        # What a signal's handler raises while Python runs the hooks of a fork is lost.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _be_the_check(run, name, findings, printed, parent, blocked_before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        os.close(findings)
        os.close(printed)

    def lines(self, deadline: Deadline) -> Iterator[bytes]:
        """What it writes, until it ends or the deadline has passed."""
        waiting = b""
        pipes = [self._findings, self._printed]
        while not deadline.has_passed() and len(waiting) < _LINE_BYTES_MAX:
            has_ended = self._has_ended()  # before looking: what it wrote is there then
            wait_s = 0 if has_ended else min(_LOOK_EVERY_S, deadline.remaining_s())
            readable, _, _ = select.select(pipes, [], [], wait_s)
            if not readable and has_ended:
                return
            for pipe in readable:
                piece = os.read(pipe, _READ_BYTES)
                if not piece:
                    pipes.remove(pipe)
                elif pipe == self._printed:
                    self._tail = (self._tail + piece)[-_READ_BYTES:]
                else:
                    *whole, waiting = (waiting + piece).split(b"\n")
                    yield from whole
            if not pipes:
                return

    def wait(self, deadline: Deadline) -> bool:
        """Whether it ended before the deadline."""
        while not self._has_ended():
            if deadline.has_passed():
                return False
            select.select([], [], [], min(_LOOK_EVERY_S, deadline.remaining_s()))
        return True

    def end(self) -> int:
        """End it and all of its session. Returns its status: a code, or minus a signal's number."""
        os.close(self._findings)
        os.close(self._printed)
        # Not waited for yet, so its number is still its own. Before setsid there is no such group.
        for kill in (os.killpg, os.kill):
            try:
                kill(self._pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def last_words(self) -> str:
        """The last line that it printed, empty where it printed nothing."""
        return last_line(self._tail.decode("utf-8", "replace"))[:WORDS_MAX]

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _be_the_check(
    run: Run, name: str, findings: int, printed: int, parent: int, blocked: set[int]
) -> NoReturn:
    """The forked process. It never returns into what its parent was doing."""
    status = 1
    try:
        os.setsid()  # a session of its own: it ends as a whole, and hears no Ctrl-C
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        end_with_parent(parent)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        try:
            for finding in run():
                _write(findings, finding)
        except Exception as error:  # a bug in one check is a finding like others
            _write(findings, _bug(name, error))
        sys.stderr.flush()
        status = 0
    finally:
        os._exit(status)


def _write(pipe: int, finding: Finding) -> None:
    line = finding.encoded() + b"\n"
    while line:
        line = line[os.write(pipe, line) :]


def _bug(name: str, error: Exception) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Finding.failed(
        "doctor.bug",
        f"the check {name} has a bug: {type(error).__name__}: {str(error)[:WORDS_MAX]}",
        "Report it with this output; the other checks do not depend on it.",
        facts={"check": name, "error": type(error).__name__, "place": place},
    )


def _late(name: str, timeout_s: float) -> Finding:
    return Finding.failed(
        "doctor.deadline",
        f"the check {name} did not end within {timeout_s:g} s and was ended",
        "Look at what it found last, above: what it looks at next hangs.",
        facts={"check": name, "timeout_s": timeout_s},
    )


def _died(name: str, status: int, words: str) -> Finding:
    how = signal.Signals(-status).name if status < 0 else f"code {status}"
    said = f"; it printed last: {words}" if words else ""
    return Finding.failed(
        "doctor.crash",
        f"the check {name} ended with {how}{said}",
        "Look at what it found last, above: a library that it uses next ends its process, as "
        "it would end a worker.",
        facts={"check": name, "status": status},
    )
