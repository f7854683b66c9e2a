"""A process that has a deadline, and leaves nobody behind.

What it starts, and what those start, inherits a mark in the environment: so all of it is found and
ended, sessions of their own included.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "DEVICE_CHECK_MARK"  # no name of an option of ours
GRACE_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True)
class Ended:
    """`code` as Popen's; None: it ran past its deadline. `num_left` others had to be ended, too."""

    code: int | None
    wall_s: float
    num_left: int


def run_with_deadline(
    command: Sequence[str],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    log: Path,
    deadline_s: float,
    grace_s: float = GRACE_S,
) -> Ended:
    """Run to the end, or end it. Its output goes to `log`, and its input is empty."""
    mark = secrets.token_hex(16)
    start_s = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        finally:  # also when this run itself is broken off
            if process.poll() is None:
                process.kill()
                process.wait()
            num_left = _end_marked(mark)
    return Ended(code, time.monotonic() - start_s, num_left)


def _end_marked(mark: str) -> int:
    """Kill every process with this mark. Returns how many there were."""
    wanted = f"{MARK}={mark}".encode()
    ended: set[int] = set()
    for _ in range(100):  # who is being started now is found the next time
        found = {pid for pid in _pids() if wanted in _environ(pid)} - {os.getpid()}
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= found
        time.sleep(0.05)
    return len(ended)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environ(pid: int) -> list[bytes]:
    """Empty for one that has ended, also before its parent knows, and for others' processes."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
