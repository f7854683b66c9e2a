"""Medians and percentiles of small samples."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


@dataclass(frozen=True, slots=True)
class Spread:
    """Where the middle and the ends of a sample lie."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """ValueError when there are no values."""
        sample = list(values)
        if not sample:
            raise ValueError("an empty sample has no spread")
        return cls(median(sample), min(sample), max(sample))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the sample do not exceed (nearest rank)."""
    if not values:
        raise ValueError("an empty sample has no percentiles")
    if not 0 < percent <= 100:
        raise ValueError(f"{percent} is not in (0, 100]")
    rank = -(-len(values) * percent // 100)  # rounded up
    return sorted(values)[int(rank) - 1]
