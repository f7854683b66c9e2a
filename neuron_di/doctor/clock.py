"""Whether this machine's clock follows something, as its kernel sees it.

Hand-overs and leases do not depend on it: they measure durations. Certificates do, and whoever
lays the logs of several hosts beside each other.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass

from neuron_di.config import DoctorOptions
from neuron_di.doctor.finding import Fact, Finding
from neuron_di.doctor.machine import Machine

ERROR_S_MAX = 0.5  # of the kernel's own estimate
_UNSYNCHRONISED = 0x40  # STA_UNSYNC, in linux/timex.h
_DAEMONS = ("chronyd", "systemd-timesyn", "ntpd", "ptp4l", "phc2sys")  # 15 characters are kept
_MEND = (
    "Install and start chrony; on EC2 it finds time at 169.254.169.123 (`server 169.254.169.123 "
    "prefer iburst` in its configuration). In a container it is the host that needs it."
)


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2). What stands behind `status` is not looked at."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClock:
    """What the kernel says of its clock. `max_error_s` grows while nobody sets it right."""

    is_synchronised: bool
    max_error_s: float


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """One finding: the kernel is asked, not a program, so it works in a container, too."""
    try:
        clock = read_kernel_clock()
    except OSError as error:
        yield Finding.note(
            "clock.synchronised",
            f"the kernel does not say whether the clock is synchronised: {error.strerror}",
        )
        return
    yield judged(clock, _daemon(machine))


def read_kernel_clock() -> KernelClock:
    """Asks without changing anything. OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    answer = _Timex()
    if libc.adjtimex(ctypes.byref(answer)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return KernelClock(
        is_synchronised=not answer.status & _UNSYNCHRONISED, max_error_s=answer.maxerror / 1e6
    )


def judged(clock: KernelClock, daemon: str) -> Finding:
    """`daemon` is what keeps the time, empty where none is seen."""
    facts: dict[str, Fact] = {
        "is_synchronised": clock.is_synchronised,
        "max_error_s": clock.max_error_s,
        "daemon": daemon,
    }
    by = f" by {daemon}" if daemon else ""
    if not clock.is_synchronised:
        words = f"{daemon} runs, and has not found the time" if daemon else "nothing here sets it"
        return Finding.warning(
            "clock.synchronised",
            f"the clock is not synchronised: {words}; logs of several hosts cannot be "
            "compared, and certificates may be refused",
            _MEND,
            facts=facts,
        )
    words = f"the clock is synchronised{by}, to {clock.max_error_s:.3g} s at worst"
    if clock.max_error_s > ERROR_S_MAX:
        return Finding.warning(
            "clock.synchronised",
            words,
            "Look at `chronyc tracking` and `chronyc sources`: its sources are far, or gone.",
            facts=facts,
        )
    return Finding.ok("clock.synchronised", words, facts=facts)


def _daemon(machine: Machine) -> str:
    running = {machine.read(path) for path in machine.names("/proc/[0-9]*/comm")}
    return next((name for name in _DAEMONS if name in running), "")
