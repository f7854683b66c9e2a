"""Checks run apart: what one breaks stays with it, and nothing of it is left."""

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from neuron_di.clock import Deadline, sleep_s
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.runner import FINDINGS_MAX, run_apart

# Python 3.12 and later warn of a fork where any library has a thread. The command has none.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

TIMEOUT_S = 60.0


def fine(name: str, **facts: int) -> Finding:
    return Finding(check=f"test.{name}", grade=Grade.OK, says="fine", facts=facts)


def hang() -> None:
    while True:
        signal.pause()


def is_gone(pid: int) -> bool:
    """Within a time: it may be waited for by somebody else, or by nobody."""
    deadline = Deadline.after(TIMEOUT_S)
    while not deadline.has_passed():
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        sleep_s(0.01)
    return False


def test_findings_come_from_another_process_as_they_are_found() -> None:
    def check() -> Iterator[Finding]:
        yield fine("first", pid=os.getpid(), parent=os.getppid())
        hang()

    with closing(run_apart(check, name="waits", timeout_s=TIMEOUT_S)) as findings:
        first = next(findings)
        assert first.facts["parent"] == os.getpid()
        pid = first.facts["pid"]
        assert isinstance(pid, int)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)  # not read on, so it was ended and waited for


def test_all_of_a_finding_comes_back() -> None:
    whole = Finding(
        check="test.whole",
        grade=Grade.WARNING,
        says="ümlaut and \n line",
        mend="→",
        facts={"a": 1, "b": [1.5, "x", None], "c": {"d": True}},
    )
    assert list(run_apart(lambda: iter([whole]), name="x", timeout_s=TIMEOUT_S)) == [whole]


def test_a_check_that_raises_keeps_what_it_found_and_says_where() -> None:
    def check() -> Iterator[Finding]:
        yield fine("first")
        raise ValueError("no such thing")

    first, bug = run_apart(check, name="raises", timeout_s=TIMEOUT_S)
    assert first == fine("first")
    assert (bug.check, bug.grade) == ("doctor.bug", Grade.FAILED)
    assert "raises has a bug: ValueError: no such thing" in bug.says
    assert str(bug.facts["place"]).startswith("test_doctor_runner.py:")


def test_a_check_that_hangs_is_ended_with_all_that_it_started() -> None:
    def check() -> Iterator[Finding]:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        yield fine("first", pid=os.getpid(), child=child.pid)
        hang()

    first, late = run_apart(check, name="hangs", timeout_s=2)
    assert (late.check, late.grade) == ("doctor.deadline", Grade.FAILED)
    assert late.facts == {"check": "hangs", "timeout_s": 2}
    for name in ("pid", "child"):
        pid = first.facts[name]
        assert isinstance(pid, int)
        assert is_gone(pid)


def test_a_check_that_dies_of_a_library_is_told_with_its_last_words() -> None:
    def check() -> Iterator[Finding]:
        faulthandler.disable()  # pytest's
        yield fine("first")
        os.write(1, b"a line\nthe last words\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    first, crash = run_apart(check, name="dies", timeout_s=TIMEOUT_S)
    assert first == fine("first")
    assert (crash.check, crash.grade) == ("doctor.crash", Grade.FAILED)
    assert "ended with SIGSEGV; it printed last: the last words" in crash.says
    assert crash.facts == {"check": "dies", "status": -signal.SIGSEGV}


def test_a_check_that_ends_its_process_is_told() -> None:
    def check() -> Iterator[Finding]:
        yield fine("first")
        os._exit(7)

    _, crash = run_apart(check, name="leaves", timeout_s=TIMEOUT_S)
    assert "ended with code 7" in crash.says


def test_a_child_that_keeps_the_pipes_open_is_not_waited_for() -> None:
    def check() -> Iterator[Finding]:
        pid = os.fork()
        if pid == 0:
            hang()
        yield fine("first", child=pid)

    (first,) = run_apart(check, name="leaves", timeout_s=TIMEOUT_S)
    child = first.facts["child"]
    assert isinstance(child, int)
    assert is_gone(child)


def test_what_a_check_prints_is_nobodys_output(capfd: pytest.CaptureFixture[str]) -> None:
    def check() -> Iterator[Finding]:
        os.write(1, b"x" * 1_000_000)  # more than a pipe holds
        os.write(2, b"y" * 1_000_000)
        yield fine("first")

    assert list(run_apart(check, name="talks", timeout_s=TIMEOUT_S)) == [fine("first")]
    assert capfd.readouterr() == ("", "")


def test_endless_findings_end() -> None:
    def check() -> Iterator[Finding]:
        while True:
            yield fine("again")

    *findings, last = run_apart(check, name="endless", timeout_s=TIMEOUT_S)
    assert findings == [fine("again")] * FINDINGS_MAX
    assert last.check == "doctor.bug"


def test_ctrl_c_reaches_the_doctor_alone() -> None:
    def check() -> Iterator[Finding]:
        yield fine("first", session=os.getsid(0))

    (first,) = run_apart(check, name="apart", timeout_s=TIMEOUT_S)
    assert first.facts["session"] != os.getsid(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_moment_of_a_fork_is_heard(number: signal.Signals) -> None:
    """Python prints, and forgets, what a handler raises while it runs the hooks of a fork."""
    program = (
        "import os, signal, sys\n"
        "from neuron_di.cli import main\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup's child would not hear it
        f"os.register_at_fork(after_in_parent=lambda: signal.raise_signal({int(number)}))\n"
        "sys.exit(main(['doctor', '--only', 'host,cpu']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, b"", b"")


def test_a_check_hears_signals() -> None:
    def check() -> Iterator[Finding]:
        yield fine("mask", num_blocked=len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))

    num_blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    (finding,) = run_apart(check, name="masked", timeout_s=TIMEOUT_S)
    assert finding == fine("mask", num_blocked=num_blocked)
    assert len(signal.pthread_sigmask(signal.SIG_BLOCK, [])) == num_blocked


def test_names_that_are_not_utf_8_come_back_with_marks() -> None:
    lone = os.fsdecode(b"a\xff")
    odd = Finding(
        check="test.odd",
        grade=Grade.WARNING,
        says=f"{lone} says",
        mend=lone,
        facts={lone: [lone, {"x": lone}], "n": 1},
    )
    (found,) = run_apart(lambda: iter([odd]), name="x", timeout_s=TIMEOUT_S)
    assert (found.check, found.says, found.mend) == ("test.odd", "a? says", "a?")
    assert found.facts == {"a?": ["a?", {"x": "a?"}], "n": 1}
