"""How many tokens prompts and answers have: one number, or a distribution with bounds."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import ConfigError

Kind = Literal["fixed", "normal", "uniform", "lognormal"]
Tokens = NDArray[np.int64]

TOKENS_MAX = 10_000_000
FORMS = "N, normal:MEAN,DEVIATION[,LEAST,MOST], uniform:LEAST,MOST, lognormal:MEDIAN,SIGMA[,…]"
_DRAWS_MAX = 100  # until what lies outside the bounds is put on them
_NUM_NUMBERS: dict[str, tuple[int, ...]] = {"normal": (2, 4), "uniform": (2,), "lognormal": (2, 4)}


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. `first` and `second` are its two numbers, where it has two.

    What is drawn outside `least` to `most` is drawn again, so that no length piles up on a bound.
    """

    kind: Kind
    first: float
    second: float = 0.0
    least: int = 1
    most: int = TOKENS_MAX

    @classmethod
    def read(cls, text: str, flag: str) -> "Lengths":
        """From one of the FORMS. ConfigError names `flag`."""
        kind, colon, rest = text.strip().partition(":")
        if not colon:
            kind, rest = "fixed", kind
        try:
            numbers = [float(part) for part in rest.split(",")]
        except ValueError:
            numbers = []
        if kind not in get_args(Kind) or len(numbers) not in _NUM_NUMBERS.get(kind, (1,)):
            raise ConfigError(f"{flag} {text!r} is none of: {FORMS}")
        if kind in ("uniform", "fixed"):
            numbers += [numbers[0], numbers[-1]] if kind == "uniform" else [0, 1, TOKENS_MAX]
        first, second, least, most = [*numbers, 1, TOKENS_MAX][:4]
        is_fine = 1 <= least <= most <= TOKENS_MAX and 1 <= first <= TOKENS_MAX
        is_fine = is_fine and 0 <= second <= TOKENS_MAX  # not so for what is no number
        if not is_fine or any(number % 1 for number in (least, most)):
            raise ConfigError(f"{flag} {text!r}: lengths go from 1 to {TOKENS_MAX:,}, least first")
        if kind == "fixed" and first % 1:
            raise ConfigError(f"{flag} {text!r} is no whole number of tokens")
        return cls(kind, first, second, int(least), int(most))  # type: ignore[arg-type]

    def words(self) -> str:
        """As it was given, with the bounds where there are any."""
        if self.kind == "fixed":
            return f"{self.first:,.0f}"
        if self.kind == "uniform":
            return f"uniform:{self.least},{self.most}"
        bounds = f",{self.least},{self.most}" if (self.least, self.most) != (1, TOKENS_MAX) else ""
        return f"{self.kind}:{self.first:g},{self.second:g}{bounds}"

    def draw(self, num: int, rng: np.random.Generator) -> Tokens:
        """`num` lengths within the bounds."""
        if self.kind == "fixed":
            return np.full(num, int(self.first), dtype=np.int64)
        if self.kind == "uniform":
            return rng.integers(self.least, self.most, num, endpoint=True)
        lengths = self._draw_freely(num, rng)
        for _ in range(_DRAWS_MAX):
            outside = np.flatnonzero((lengths < self.least) | (lengths > self.most))
            if not len(outside):
                break
            lengths[outside] = self._draw_freely(len(outside), rng)
        return np.clip(lengths, self.least, self.most)

    def _draw_freely(self, num: int, rng: np.random.Generator) -> Tokens:
        if self.kind == "normal":
            values = rng.normal(self.first, self.second, num)
        else:
            values = self.first * np.exp(rng.normal(0.0, self.second, num))
        return np.rint(np.minimum(values, 2.0 * TOKENS_MAX)).astype(np.int64)
