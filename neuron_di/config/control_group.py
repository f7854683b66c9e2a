"""What this process may take of the machine, and what control groups leave it of that: a
container's limits, or a systemd unit's.

Version 2 has a folder per group, and each group has what all above it leave; version 1 has one
tree per kind, of which a container sees its own part at the top. `read` gives a file's text, by its
absolute path, or None where there is no such file.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from neuron_di.errors import ConfigError

Read = Callable[[str], str | None]

_ROOT = PurePosixPath("/sys/fs/cgroup")
_NO_LIMIT_FROM = 1 << 62  # version 1 says the most that it can count, in whole pages
# Of version 2 and of 1: the kind, the files that say the limit and the use, a row of memory.stat.
_MEMORY = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def text_of(path: str) -> str | None:
    """A `read` of this machine's files."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def usable_cores(read: Read = text_of) -> int:
    """The cores that this process may run on, or fewer where a control group grants less time.

    More threads than that only wait for each other: with a quota of two cores, as of a container,
    64 of them stand still for most of each period. At least 1.
    """
    cores, quota = len(os.sched_getaffinity(0)), core_quota(read)
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_memory_bytes(read: Read = text_of) -> int:
    """The machine's, as the kernel estimates it, or less where a control group limits it."""
    found = re.search(r"^MemAvailable:\s*([0-9]+) kB$", read("/proc/meminfo") or "", re.MULTILINE)
    if found is None:
        raise ConfigError("/proc/meminfo does not say how much memory is available")
    machine_bytes, left_bytes = int(found[1]) << 10, memory_left(read)
    return machine_bytes if left_bytes is None else min(machine_bytes, left_bytes)


def core_quota(read: Read) -> float | None:
    """As much CPU time as so many cores have; None: all there is."""
    quotas = [text.split() for text in _texts(read, "cpu.max")]
    pairs = zip(
        _texts(read, "cpu.cfs_quota_us", "cpu"),
        _texts(read, "cpu.cfs_period_us", "cpu"),
        strict=False,
    )
    quotas += [list(pair) for pair in pairs]
    given = [
        int(quota[0]) / int(quota[1])
        for quota in quotas
        if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]) > 0
    ]  # a quota of "max", or -1, is none
    return min(given, default=None)


def memory_limit(read: Read) -> int | None:
    """In bytes; None: all there is."""
    texts = (text for kind, limit, *_ in _MEMORY for text in _texts(read, limit, kind))
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < _NO_LIMIT_FROM), default=None)


def memory_left(read: Read) -> int | None:
    """In bytes, what the tightest limit leaves; None: all there is.

    Files that are kept in memory, and were not used of late, make room.
    """
    left = []
    for kind, limit, used, droppable in _MEMORY:
        for folder in _folders(read, kind):
            text = read(f"{folder}/{limit}")
            if text is not None and text.isdecimal() and int(text) < _NO_LIMIT_FROM:
                rows = (read(f"{folder}/memory.stat") or "").splitlines()
                freed_bytes = int(dict(row.split() for row in rows).get(droppable, 0))
                used_bytes = int(read(f"{folder}/{used}") or 0) - freed_bytes
                left.append(max(0, int(text) - used_bytes))
    return min(left, default=None)


def _texts(read: Read, name: str, kind: str = "") -> Iterator[str]:
    """A file of each of those."""
    texts = (read(f"{folder}/{name}") for folder in _folders(read, kind))
    return (text for text in texts if text is not None)


def _folders(read: Read, kind: str) -> Iterator[PurePosixPath]:
    """Of this process's group, and of all groups above it: of version 1 with a `kind`."""
    group = _group(read, kind)
    return (_ROOT / kind / each.relative_to("/") for each in (group, *group.parents))


def _group(read: Read, kind: str) -> PurePosixPath:
    """As the kernel tells it: `0::/a` of version 2, `4:cpu,cpuacct:/a` of version 1."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kind in kinds.split(",") and path.startswith("/"):
            return PurePosixPath(path)
    return PurePosixPath("/")
