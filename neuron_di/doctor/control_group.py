"""What control groups leave to this process: a container's limits, or a systemd unit's.

Version 2 has a folder per group, and each group has what all above it leave; version 1 has one
tree per kind, of which a container sees its own part at the top.
"""

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from neuron_di.doctor.machine import Machine

_ROOT = "/sys/fs/cgroup"


def core_quota(machine: Machine) -> float | None:
    """As much CPU time as so many cores have; None: all there is."""
    quotas = [text.split() for text in _read(machine, "cpu.max")]
    folder = f"{_ROOT}/cpu/cpu.cfs"
    quotas.append([machine.read(f"{folder}_{name}_us") or "" for name in ("quota", "period")])
    given = [
        int(quota[0]) / int(quota[1])
        for quota in quotas
        if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]) > 0
    ]  # a quota of "max", or -1, is none
    return min(given, default=None)


def memory_limit(machine: Machine) -> int | None:
    """In bytes; None: all there is."""
    texts = [*_read(machine, "memory.max")]
    texts.append(machine.read(f"{_ROOT}/memory/memory.limit_in_bytes") or "")
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def _read(machine: Machine, name: str) -> Iterator[str]:
    """A file of this process's group, and of all groups above it, of version 2."""
    found = re.search(r"^0::(/.*)$", machine.read("/proc/self/cgroup") or "", re.MULTILINE)
    group = PurePosixPath(found[1] if found else "/")
    for folder in (group, *group.parents):
        text = machine.read(f"{_ROOT}{folder}/{name}")
        if text is not None:
            yield text
