"""When to come back: a guess from how fast requests have been ending."""

from math import exp

from neuron_di.clock import now_s

WAIT_S_MIN, WAIT_S_MAX = 1.0, 60.0
WAIT_S_UNKNOWN = 5.0  # nothing has ended yet
MEMORY_S = 10.0  # what ended longer ago hardly counts
_BUSY_S_MIN = 1e-3


class DrainRate:
    """Requests ended per second while some ran, lately.

    Its clock stands still while none runs: a rest says nothing of how fast they end.
    """

    __slots__ = ("_at_s", "_busy_s", "_per_s", "_since_s")

    def __init__(self) -> None:
        self._per_s = 0.0  # a decaying average, as of `_at_s`
        self._at_s: float | None = None  # of its own clock
        self._busy_s = 0.0  # before `_since_s`
        self._since_s: float | None = None  # some have been running; None: none runs

    def begin(self) -> None:
        """One runs, and none did."""
        self._since_s = now_s()

    def rest(self) -> None:
        """None runs any more."""
        self._busy_s, self._since_s = self._clock_s(), None

    def count(self) -> None:
        """One ended."""
        at_s = self._clock_s()
        self._per_s = self._decayed(at_s) + 1 / MEMORY_S
        self._at_s = at_s

    def wait_s(self, num_requests: int) -> float:
        """Seconds until so many will have ended, within bounds."""
        if self._at_s is None:
            return WAIT_S_UNKNOWN
        at_s = self._clock_s()
        known = 1 - exp(-max(at_s, _BUSY_S_MIN) / MEMORY_S)  # the part of the memory that is filled
        per_s = max(self._decayed(at_s) / known, 1 / WAIT_S_MAX)
        # Nobody should come back at once, or be sent away for long on a guess.
        return min(WAIT_S_MAX, max(WAIT_S_MIN, num_requests / per_s))

    def _clock_s(self) -> float:
        return self._busy_s + (0.0 if self._since_s is None else now_s() - self._since_s)

    def _decayed(self, at_s: float) -> float:
        return 0.0 if self._at_s is None else self._per_s * exp((self._at_s - at_s) / MEMORY_S)
