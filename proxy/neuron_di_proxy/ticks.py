"""Looks at what may have changed: those of the same interval come at the same moment.

An idle process does little else. So it wakes once for all of them, and a look is a plain call.
"""

import asyncio
from collections.abc import Callable

from neuron_di.clock import until_tick_s
from neuron_di.obs import get_logger

_log = get_logger(__name__)


def look_every(interval_s: float, look: Callable[[], object]) -> Callable[[], None]:
    """Call `look` at each of the clock's multiples of `interval_s`, on the running event loop.

    Ends when what is returned is called, which may be done twice. `look` is short; what it raises
    is a bug, is logged, and does not end it.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def ring() -> None:
        nonlocal timer
        timer = loop.call_later(until_tick_s(interval_s), ring)  # first: `look` may stop it
        try:
            look()
        except Exception as error:
            _log.exception("look_failed", raised=error)

    def stop() -> None:
        if timer is not None:
            timer.cancel()

    timer = loop.call_later(until_tick_s(interval_s), ring)
    return stop
