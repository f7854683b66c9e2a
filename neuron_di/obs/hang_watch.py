"""Ends a process that hangs, so that whoever started it can start it again.

A step may hang in a device's driver, the event loop at a lock that nobody releases. To everybody
else such a worker, or proxy, is one that does not answer, for ever: only its process can help, by
its end. The watch itself runs in C, without the interpreter's lock, and writes to stderr where each
thread is (files and lines, no data). What becomes of the requests is as after any death.

A process that was stopped (SIGSTOP) does not end meanwhile. If that took longer than the timeout,
it ends when it goes on: for its peers it had been dead for as long.
"""

import asyncio
import faulthandler
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from neuron_di.clock import now_s
from neuron_di.obs.logging import get_logger, log_descriptor

_log = get_logger(__name__)

INTERVAL_S = 1.0
_AT_ONCE_S = 1e-3


@asynccontextmanager
async def watching_for_hangs(
    busy_since_s: Callable[[], float | None],
    timeout_s: float | None,
    interval_s: float = INTERVAL_S,
) -> AsyncIterator[None]:
    """The process ends with code 1 if meanwhile either lasts `timeout_s`; None: nothing is watched.

    - a step: `busy_since_s` says when the one that runs began, None between two;
    - a turn of the event loop that this runs on.

    Both are looked at each `interval_s` seconds: by so much earlier may a turn be ended.
    """
    if timeout_s is None:
        yield
        return
    watching = asyncio.create_task(_watch(busy_since_s, timeout_s, interval_s))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait((watching,))


async def _watch(
    busy_since_s: Callable[[], float | None], timeout_s: float, interval_s: float
) -> None:
    interval_s, is_blind = min(interval_s, timeout_s / 4), False
    fd = log_descriptor()
    file = sys.stderr if fd is None else fd
    try:
        while True:
            since_s = busy_since_s()
            busy_s = 0.0 if since_s is None else now_s() - since_s
            left_s = max(_AT_ONCE_S, timeout_s - busy_s)
            if left_s <= interval_s:
                _log.error("hangs", busy_s=round(busy_s, 3), process_ends_in_s=round(left_s, 3))
            try:
                faulthandler.dump_traceback_later(left_s, exit=True, file=file)
            except RuntimeError as error:  # no stderr to write to, or no further thread just now
                if not is_blind:
                    _log.warning("hang_watch_is_off", reason=str(error))
                is_blind = True
            else:
                is_blind = False
            await asyncio.sleep(interval_s)
    finally:
        faulthandler.cancel_dump_traceback_later()
