"""When requests of an open loop arrive: seconds since the first one could have come."""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["poisson", "constant", "burst"]
Seconds = NDArray[np.float64]


def arrival_times_s(
    arrivals: Arrivals,
    rate: float,
    num: int,
    rng: np.random.Generator,
    *,
    burstiness: float = 1.0,
) -> Seconds:
    """`num` ascending times at `rate` requests per second on average. An infinite rate: all at 0.

    burst: gaps of a gamma distribution of shape `burstiness`. 1 is Poisson, smaller is burstier,
    larger is more even: the gaps' coefficient of variation is 1 / sqrt(burstiness).
    """
    if math.isinf(rate):
        return np.zeros(num)
    if arrivals == "constant":
        return np.arange(num) / rate
    shape = burstiness if arrivals == "burst" else 1.0
    gaps: Seconds = rng.gamma(shape, 1.0 / (rate * shape), num)
    return np.cumsum(gaps)
