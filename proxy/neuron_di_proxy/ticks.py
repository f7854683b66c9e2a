"""Waits of what looks around now and then: looks of the same interval come at the same moment.

An idle process then wakes once for all of them.
"""

from neuron_di.clock import now_s


def until_tick_s(interval_s: float) -> float:
    """Seconds until the clock's next multiple of `interval_s`.

    Not until one that is very near: a timer may ring a little early, and must not ring twice.
    """
    wait_s = interval_s - now_s() % interval_s
    return wait_s if wait_s > interval_s / 8 else wait_s + interval_s
