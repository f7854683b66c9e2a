"""What control groups leave to this process: a container's limits, or a systemd unit's.

Version 2 has a folder per group, and each group has what all above it leave; version 1 has one
tree per kind, of which a container sees its own part at the top. `read` gives a file's text, by its
absolute path, or None where there is no such file.
"""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

Read = Callable[[str], str | None]

_ROOT = PurePosixPath("/sys/fs/cgroup")
_NO_LIMIT_FROM = 1 << 62  # version 1 says the most that it can count, in whole pages


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
    texts = (*_texts(read, "memory.max"), *_texts(read, "memory.limit_in_bytes", "memory"))
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < _NO_LIMIT_FROM), default=None)


def _texts(read: Read, name: str, kind: str = "") -> Iterator[str]:
    """A file of this process's group, and of all groups above it: of version 1 with a `kind`."""
    group = _group(read, kind)
    for folder in (group, *group.parents):
        text = read(str(_ROOT / kind / folder.relative_to("/") / name))
        if text is not None:
            yield text


def _group(read: Read, kind: str) -> PurePosixPath:
    """As the kernel tells it: `0::/a` of version 2, `4:cpu,cpuacct:/a` of version 1."""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if kind in kinds.split(",") and path.startswith("/"):
            return PurePosixPath(path)
    return PurePosixPath("/")
