"""How long parts may take, so that a run ends within the minutes it was given."""

import time
from collections.abc import Callable
from dataclasses import dataclass

RESERVE_S = 10.0  # for writing the report


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that a part gets at most, and those without which it is not worth beginning."""

    deadline_s: float
    least_s: float


class Budget:
    """The minutes of a run, None without end. Counts from its making."""

    def __init__(
        self, minutes: float | None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock_s = clock_s
        self._end_s = None if minutes is None else clock_s() + minutes * 60

    def left_s(self) -> float | None:
        if self._end_s is None:
            return None
        return max(0.0, self._end_s - RESERVE_S - self._clock_s())

    def deadline_s(self, times: Times) -> float | None:
        """What a part may take from now on. None: it no longer fits."""
        left_s = self.left_s()
        if left_s is None:
            return times.deadline_s
        return None if left_s < times.least_s else min(left_s, times.deadline_s)

    def words(self, times: Times) -> str:
        """Why a part does not fit."""
        return (
            f"no time: it takes {times.least_s:.0f} s or more, and {self.left_s():.0f} s are left"
        )
