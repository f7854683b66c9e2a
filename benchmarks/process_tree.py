"""What a process and everything it started uses: CPU to the nanosecond, and memory."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def tree_of(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """CPU time of the tree so far. psutil's own counts clock ticks."""
    total_s = 0.0
    for process in tree_of(pid):
        with contextlib.suppress(OSError):  # one that has just ended
            total_s += time.clock_gettime(_cpu_clock(process.pid))
    return total_s


def rss_bytes(tree: Iterable[psutil.Process]) -> int:
    """What they have resident now; pages that are shared count in each process."""
    total = 0
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def peak_rss_bytes(pid: int) -> int:
    """The most that each process of the tree ever had resident, added up."""
    return sum(_peak_rss_bytes(process.pid) for process in tree_of(pid))


def _cpu_clock(pid: int) -> int:
    """The clock id that `clock_getcpuclockid` gives on Linux, which Python does not wrap."""
    return ((~pid) << 3) | 2


def _peak_rss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0  # a process that has just ended
