"""A loopback of one's own, which can be made as slow as a network between two hosts."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

PROGRAMS = ("ip", "tc")
_CLONE_NEWNET = 0x40000000
_QUEUE = ("burst", "1mb", "limit", "4mb")  # at most a few milliseconds of a fast link


def leave_network() -> str:
    """Move this thread, and what it starts, to a network with nothing but a loopback.

    Returns why that cannot be, or nothing. Call it before anything listens or connects.
    """
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        return f"no network of its own: {os.strerror(ctypes.get_errno())}"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    limited = _limit(10.0)
    _tc("del")
    return limited


@contextlib.contextmanager
def slowed_link(gbit_per_s: float | None) -> Iterator[None]:
    """While entered, the loopback carries so much, both directions together. None: all it can.

    Only after leave_network(). RuntimeError where it cannot be slowed.
    """
    if gbit_per_s is None:
        yield
        return
    if why := _limit(gbit_per_s):
        raise RuntimeError(f"the loopback cannot be slowed: {why}")
    try:
        yield
    finally:
        _tc("del")


def _limit(gbit_per_s: float) -> str:
    return _tc("replace", "tbf", "rate", f"{gbit_per_s * 1000:.0f}mbit", *_QUEUE)


def _tc(verb: str, *words: str) -> str:
    """Empty, or what it complains of."""
    command = ["tc", "qdisc", verb, "dev", "lo", "root", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or "tc failed"
