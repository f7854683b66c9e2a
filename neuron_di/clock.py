"""Time. The one module that imports `time`, so that a test can run on a clock of its own."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec


class Clock(Protocol):
    """Where all time of this process comes from."""

    def monotonic_s(self) -> float: ...

    def unix_s(self) -> float: ...

    def sleep_s(self, duration_s: float) -> None: ...


class _SystemClock:
    monotonic_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)
    sleep_s = staticmethod(time.sleep)


_clock: Clock = _SystemClock()
_monotonic_s = _clock.monotonic_s  # of `_clock`: asked several times for each token


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Run the block on another clock: for tests and simulations, which own their thread."""
    before = _clock
    _set(clock)
    try:
        yield
    finally:
        _set(before)


def _set(clock: Clock) -> None:
    global _clock, _monotonic_s
    _clock, _monotonic_s = clock, clock.monotonic_s


def now_s() -> float:
    """Seconds on a clock that never goes back. The same for every process of one host."""
    return _monotonic_s()


def until_tick_s(interval_s: float) -> float:
    """Until the clock's next multiple of `interval_s`: where what waits for it wakes together.

    The processes of one host have the same ones. Not until one that is very near: a timer may
    ring a little early, and must not ring twice.
    """
    wait_s = interval_s - now_s() % interval_s
    return wait_s if wait_s > interval_s / 8 else wait_s + interval_s


def own_clock() -> Callable[[], float]:
    """What `now_s` asks now, for compiled code that is to run no Python for each token."""
    return _monotonic_s


def unix_s() -> float:
    """Seconds since 1970, for people and for OpenAI's `created`."""
    return _clock.unix_s()


def process_cpu_s() -> float:
    """User and system time of this process so far, all threads, by no other clock."""
    return time.process_time()


def sleep_s(duration_s: float) -> None:
    """Block this thread. Never call it on an event loop."""
    _clock.sleep_s(duration_s)


class Deadline(msgspec.Struct, frozen=True):
    """The moment after which a wait ends. Absolute, so that it can be passed on unchanged."""

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        return cls(now_s() + timeout_s)

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - now_s())

    def has_passed(self) -> bool:
        return now_s() >= self.at_s

    def earlier_of(self, other: "Deadline") -> "Deadline":
        return self if self.at_s <= other.at_s else other
