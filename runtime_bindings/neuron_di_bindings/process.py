"""Process ties that Python's os module does not offer (Linux)."""

import contextlib
import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Get SIGTERM when the parent ends, however it ends: no worker outlives its launcher.

    Linux counts the parent's thread that started this process: it is to live as long as the parent.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the call above
        sys.exit(1)


def lower_thread_priority(nice: int) -> None:
    """Let this process's other threads go first where they share a core (Linux nice, 0 to 19).

    A wish, which never fails: a thread that is as nice already stays as it is.
    """
    thread_id = threading.get_native_id()
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread_id) < nice:
            os.setpriority(os.PRIO_PROCESS, thread_id, nice)
