"""Time. The one module that imports `time`, so that a test can run on a clock of its own."""

import time
from dataclasses import dataclass


def now_s() -> float:
    """Seconds on a clock that never goes back. The same for every process of one host."""
    return time.monotonic()


def unix_s() -> float:
    """Seconds since 1970, for people and for OpenAI's `created`."""
    return time.time()


def sleep_s(duration_s: float) -> None:
    """Block this thread. Never call it on an event loop."""
    time.sleep(duration_s)


@dataclass(frozen=True, slots=True)
class Deadline:
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
