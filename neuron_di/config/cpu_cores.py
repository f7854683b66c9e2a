"""How many CPU cores this process may keep busy."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may run on, or fewer where a cgroup grants less time.

    More threads than that only wait for each other: with a quota of two cores, as of a container,
    64 of them stand still for most of each period. At least 1.
    """
    return max(1, min((len(os.sched_getaffinity(0)), *map(int, _quotas(proc, cgroup)))))


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """Each limit on this process, in cores, from its own cgroup (version 2 or 1) to the root."""
    with suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = cgroup / "cpu" if controllers else cgroup
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                # In a container the path may be the host's: what is not there is skipped.
                with suppress(OSError):
                    quota, period = _quota_of(folder, is_first_version=bool(controllers))
                    if quota not in ("max", "-1"):
                        yield int(quota) / int(period)
                if folder == root:
                    break


def _quota_of(folder: Path, *, is_first_version: bool) -> tuple[str, str]:
    if is_first_version:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = ((folder / name).read_text() for name in names)
    else:
        quota, period = (folder / "cpu.max").read_text().split()
    return quota.strip(), period.strip()
