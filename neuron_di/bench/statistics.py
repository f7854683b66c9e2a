"""Percentiles, with linear interpolation between the two nearest values, as numpy counts them."""

import msgspec
import numpy as np
from numpy.typing import ArrayLike

PERCENTS = (50, 90, 95, 99)
CURVE_PERCENTS = (*range(100), 99.2, 99.4, 99.6, 99.8, 99.9, 99.95, 99.98, 99.99)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a sample. Values that are NaN were no values."""

    num: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def summary(values: ArrayLike, *, times: float = 1.0) -> Summary | None:
    """Of the values, each multiplied by `times`. None where there are none."""
    sample = _numbers(values) * times
    if not len(sample):
        return None
    p50, p90, p95, p99 = map(float, np.percentile(sample, PERCENTS))
    return Summary(
        num=len(sample),
        mean=float(sample.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(sample.max()),
    )


def curve(values: ArrayLike, *, times: float = 1.0) -> list[list[float]]:
    """Pairs of percent and value, as far into the tail as so many values tell of it."""
    sample = _numbers(values) * times
    if not len(sample):
        return []
    most = 100 * (1 - 1 / len(sample))
    percents = [each for each in CURVE_PERCENTS if each <= most] or [0]
    return [
        [float(p), float(v)] for p, v in zip(percents, np.percentile(sample, percents), strict=True)
    ]


def _numbers(values: ArrayLike) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    sample = np.asarray(values, np.float64)
    return sample[~np.isnan(sample)]
