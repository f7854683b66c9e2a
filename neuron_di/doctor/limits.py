"""What a process may take, as the kernel says it of this one."""

import re
from dataclasses import dataclass

from neuron_di.doctor.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """In the limit's own unit. None: there is none. A process may raise `soft` up to `hard`."""

    soft: int | None
    hard: int | None


def limit_of(machine: Machine, name: str) -> Limit | None:
    """By its name in /proc/self/limits, as in `Max open files`; None where the kernel says none."""
    text = machine.read("/proc/self/limits") or ""
    found = re.search(rf"^{re.escape(name)}\s+(\w+)\s+(\w+)", text, re.MULTILINE)
    if found is None:
        return None
    return Limit(soft=_number(found[1]), hard=_number(found[2]))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
