"""Which faults a simulation injects, how often, and how often each struck."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping

MESSAGE_FAULTS = ("drop", "duplicate", "delay", "reorder")
TRANSFER_FAULTS = (
    "transfer fails",
    "transfer stalls",
    "transfer flips a bit",
    "transfer hits a wrong block",
    "transfer is late",
    "transfer is slow",
)
DAMAGE_FAULTS = ("transfer flips a bit", "transfer hits a wrong block")  # only digests show them
LEG_FAULTS = ("leg reset", "leg stalls", "connection refused")


class Faults:
    """Draws from one generator, so that one seed gives one run. `heal` ends every fault."""

    def __init__(self, rng: random.Random, rates: Mapping[str, float] | None = None) -> None:
        self.rng = rng
        self.rates: dict[str, float] = dict(rates or {})
        self.once: dict[str, int] = {}  # strikes one time, when it could have so many times before
        self.num_struck: Counter[str] = Counter()

    def strikes(self, kind: str) -> bool:
        """Draw whether this fault happens now, and count it if so."""
        if kind in self.once:
            self.once[kind] -= 1
            if self.once[kind] >= 0:
                return False
            del self.once[kind]
            self.num_struck[kind] += 1
            return True
        rate = self.rates.get(kind)
        if rate is None or self.rng.random() >= rate:
            return False
        self.num_struck[kind] += 1
        return True

    def count(self, kind: str) -> None:
        """A fault that somebody else decided on."""
        self.num_struck[kind] += 1

    def heal(self) -> None:
        self.rates.clear()
        self.once.clear()

    def message_delays(self, tag: str) -> tuple[tuple[float, bool], ...]:
        """What becomes of a message of this type: (extra delay, in order?) for each copy of it."""
        if not self.rates and not self.once:
            return _AS_SENT
        if self.strikes(f"drop {tag}"):
            return ()
        if self.strikes(f"duplicate {tag}"):
            return ((0.0, True), (self.rng.expovariate(2.0), False))
        if self.strikes(f"delay {tag}"):
            return ((self.rng.expovariate(1.0), True),)
        if self.strikes(f"reorder {tag}"):
            return ((self.rng.expovariate(5.0), False),)
        return _AS_SENT


_AS_SENT = ((0.0, True),)


def draw_rates(
    rng: random.Random, kinds: Iterable[str], *, share: float, rate_max: float
) -> dict[str, float]:
    """Of these kinds, about `share` with a rate of up to `rate_max` each (swarm testing)."""
    return {kind: rate_max * rng.random() ** 2 for kind in kinds if rng.random() < share}
