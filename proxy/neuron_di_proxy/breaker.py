"""Keeps requests from a worker that answers when asked how it is, and fails what it is given.

    closed --5 failures in 60 s--> open --10 s--> half open --2 successes--> closed
                                     ^---------- one failure ----'

While half open it admits one request at a time, until that request's first good event.
"""

from collections import deque
from collections.abc import Callable
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
        self._opened_s: float | None = None  # None: closed
        self._num_good = 0  # since it was half open
        self._num_trials = 0

    def state(self) -> BreakerState:
        if self._opened_s is None:
            return "closed"
        return "open" if now_s() < self._opened_s + OPEN_S else "half_open"

    def admits(self) -> bool:
        """True when a request may be given to the worker now."""
        if self._opened_s is None:
            return True
        return self.state() == "half_open" and self._num_trials == 0

    def request(self) -> "BreakerRequest":
        """A request is with the worker from its `begin` to its `end`, or in a `with` block.

        Call `succeed` at the request's first good event; further calls do nothing.
        """
        return BreakerRequest(self)

    def count_trials(self, change: int) -> None:
        """A request began, or ended, that finds out whether the worker is good again."""
        self._num_trials += change

    def succeed(self) -> None:
        if self.state() == "half_open":
            self._num_good += 1
            if self._num_good >= SUCCESSES_TO_CLOSE:
                self._opened_s = None
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
        if self._opened_s is None and is_full and now - self._failed_s[0] <= WINDOW_S:
            self._open(now)

    def _open(self, now: float) -> None:
        self._opened_s = now
        self._num_good = 0
        self._failed_s.clear()


class BreakerRequest:
    """One request to a worker. Made by `Breaker.request`."""

    __slots__ = ("_breaker", "_is_good", "is_trial")

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._is_good = False
        self.is_trial = False  # the worker gets no other until it is good

    def __enter__(self) -> Callable[[], None]:
        self.begin()
        return self.succeed

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """The worker has the request from now on."""
        if self._breaker.state() == "half_open":
            self.is_trial = True
            self._breaker.count_trials(1)

    def end(self) -> None:
        """The request is over."""
        if self.is_trial and not self._is_good:
            self._breaker.count_trials(-1)

    def succeed(self) -> None:
        """The request's first good event; further calls do nothing."""
        if not self._is_good:
            self._is_good = True
            if self.is_trial:
                self._breaker.count_trials(-1)
            self._breaker.succeed()
