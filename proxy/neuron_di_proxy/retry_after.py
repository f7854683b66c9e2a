"""When to come back: a guess from how fast requests have been ending."""

from math import exp

from neuron_di.clock import now_s

WAIT_S_MIN, WAIT_S_MAX = 1.0, 60.0
WAIT_S_UNKNOWN = 5.0  # nothing has ended yet
MEMORY_S = 10.0  # what ended longer ago hardly counts


class DrainRate:
    """Requests ended per second, lately."""

    __slots__ = ("_at_s", "_per_s")

    def __init__(self) -> None:
        self._per_s = 0.0  # a decaying average, as of `_at_s`
        self._at_s: float | None = None

    def count(self) -> None:
        """One ended."""
        now = now_s()
        self._per_s = self._decayed(now) + 1 / MEMORY_S
        self._at_s = now

    def wait_s(self, num_requests: int) -> float:
        """Seconds until so many will have ended, within bounds."""
        if self._at_s is None:
            return WAIT_S_UNKNOWN
        per_s = max(self._decayed(now_s()), 1 / WAIT_S_MAX)
        return bounded_wait_s(num_requests / per_s)

    def _decayed(self, now: float) -> float:
        return 0.0 if self._at_s is None else self._per_s * exp((self._at_s - now) / MEMORY_S)


def bounded_wait_s(wait_s: float) -> float:
    """Nobody should come back at once, or be sent away for long on a guess."""
    return min(WAIT_S_MAX, max(WAIT_S_MIN, wait_s))
