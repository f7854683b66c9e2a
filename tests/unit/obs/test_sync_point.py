"""A process that reaches an armed place stops there; any other place costs nothing."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from neuron_di.obs import sync_point
from neuron_di.obs.sync_point import VARIABLE, reach

SCRIPT = """
from neuron_di.obs.sync_point import reach
reach("here")
print("passed", flush=True)
"""


@pytest.fixture
def armed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The two ends of a place called "here": what arrives, and what lets go."""
    monkeypatch.setattr(sync_point, "_folder", str(tmp_path))
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    for name in ("here", "here.go"):
        os.mkfifo(tmp_path / name)
    arrivals = os.open(tmp_path / "here", os.O_RDWR | os.O_NONBLOCK)
    go = os.open(tmp_path / "here.go", os.O_RDWR)
    yield arrivals, go
    os.close(arrivals)


def start() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE)


def pid_from(arrivals: int) -> int:
    os.set_blocking(arrivals, True)
    return int(os.read(arrivals, 100))


@pytest.mark.parametrize("by", ["a byte", "the end of the test"])
def test_a_process_stops_where_it_is_held_until_it_may_go(armed, by):
    arrivals, go = armed
    with start() as process:
        assert pid_from(arrivals) == process.pid
        assert process.stdout is not None
        # Nothing can be waited for that shows a process that stays where it is.
        assert select.select([process.stdout], [], [], 0.3)[0] == []
        if by == "a byte":
            os.write(go, b"\n")
        else:
            os.close(go)
        assert process.communicate(timeout=30)[0] == b"passed\n"
    if by == "a byte":
        os.close(go)


def test_what_is_not_armed_holds_nobody(armed, tmp_path):
    arrivals, go = armed
    reach("elsewhere")
    (tmp_path / "here").unlink()
    reach("here")
    os.mkfifo(tmp_path / "here")  # nobody reads it
    reach("here")
    os.close(go)  # whatever had stopped here would go on by now, too
    with pytest.raises(BlockingIOError):
        os.read(arrivals, 1)


def test_without_the_variable_nothing_is_looked_up(monkeypatch):
    monkeypatch.setattr(sync_point, "_folder", None)
    monkeypatch.setattr(sync_point, "_stop", pytest.fail)
    reach("here")
