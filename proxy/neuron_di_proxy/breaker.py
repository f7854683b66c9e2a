"""Keeps requests from a worker that answers when asked how it is, and fails what it is given.

    closed --5 failures in 60 s--> open --10 s--> half open --2 successes--> closed
                                     ^---------- one failure ----'

While half open it admits one request at a time, until that request's first good event.
"""

from collections import deque
from typing import Literal

from neuron_di.clock import now_s

FAILURES_MAX = 5
WINDOW_S = 60.0
OPEN_S = 10.0
SUCCESSES_TO_CLOSE = 2
BURST_S = 0.1  # one broken connection may end many requests: together they are one failure

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """The breaker of one worker."""

    def __init__(self) -> None:
        self._failed_s: deque[float] = deque(maxlen=FAILURES_MAX)
        self.opened_s: float | None = None  # None: closed
        self._num_good = 0  # since it was half open
        self._num_trials = 0

    def state(self) -> BreakerState:
        if self.opened_s is None:
            return "closed"
        return "open" if now_s() < self.opened_s + OPEN_S else "half_open"

    def admits(self) -> bool:
        """True when a request may be given to the worker now."""
        state = self.state()
        return state == "closed" or (state == "half_open" and self._num_trials == 0)

    def begin_trial(self) -> bool:
        """A request begins. Whether it finds out if the worker is good again: then `end_trial`."""
        is_trial = self.state() == "half_open"
        self._num_trials += is_trial
        return is_trial

    def end_trial(self) -> None:
        """It has had its first good event, or is over."""
        self._num_trials -= 1

    def succeed(self) -> None:
        """A request had its first good event."""
        if self.state() == "half_open":
            self._num_good += 1
            if self._num_good >= SUCCESSES_TO_CLOSE:
                self.opened_s = None
                self._failed_s.clear()

    def fail(self) -> None:
        now = now_s()
        if self.state() == "half_open":
            self._open(now)
            return
        if self._failed_s and now - self._failed_s[-1] < BURST_S:
            return
        self._failed_s.append(now)
        is_full = len(self._failed_s) == FAILURES_MAX
        if self.opened_s is None and is_full and now - self._failed_s[0] <= WINDOW_S:
            self._open(now)

    def _open(self, now: float) -> None:
        self.opened_s = now
        self._num_good = 0
        self._failed_s.clear()
