"""The one random number of a token."""

import numpy as np


def uniform(seed: int, token_index: int) -> float:
    """A number of [0, 1) that depends on (seed, token index): a counter-based generator."""
    bits = np.random.Philox(key=seed % (1 << 64), counter=token_index).random_raw()
    return float((int(bits) >> 11) * 2.0**-53)
