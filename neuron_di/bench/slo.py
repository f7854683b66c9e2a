"""What a good answer is: one that came whole, and whose times keep to what was promised.

Times of an open loop are counted from the moment at which the request was to be sent.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_di.bench.measured import Columns
from neuron_di.errors import ConfigError

_EVERY_GAP = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Bounds in ms, None where there is none.

    An answer keeps `itl_ms` when `itl_percent` of its own gaps are no longer: 100 is every gap.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None
    itl_percent: float = 99.0
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def checked(cls, *, itl_percent: float, **bounds_ms: float | None) -> "Slo":
        """ConfigError when a bound is none."""
        for name, bound_ms in bounds_ms.items():
            if bound_ms is not None and not bound_ms > 0:
                raise ConfigError(f"--slo-{name.replace('_', '-')} is to be above 0")
        if not 0 < itl_percent <= 100:
            raise ConfigError("--slo-itl-percent goes from above 0 to 100")
        return cls(itl_percent=itl_percent, **bounds_ms)

    @property
    def is_given(self) -> bool:
        return any(
            each is not None for each in (self.ttft_ms, self.itl_ms, self.tpot_ms, self.e2e_ms)
        )

    def words(self) -> str:
        """As in `TTFT <= 500 ms, ITL <= 50 ms in 99 % of gaps`."""
        bounds = (
            ("TTFT", self.ttft_ms),
            ("ITL", self.itl_ms),
            ("TPOT", self.tpot_ms),
            ("E2E", self.e2e_ms),
        )
        few = "" if self.itl_percent == _EVERY_GAP else f" in {self.itl_percent:g} % of gaps"
        return ", ".join(
            f"{name} <= {bound:g} ms{few if name == 'ITL' else ''}"
            for name, bound in bounds
            if bound is not None
        )


def good(columns: Columns, slo: Slo) -> NDArray[np.bool_]:
    """For each request: was its answer a good one? Without bounds, each that came whole is."""
    is_good = columns.is_ok.copy()
    for bound_ms, values_s in (
        (slo.ttft_ms, columns.ttft_s),
        (slo.tpot_ms, columns.tpot_s),
        (slo.e2e_ms, columns.e2e_s),
    ):
        if bound_ms is not None:
            # Written so that no value, as the TPOT of one token, breaks no bound.
            is_good &= ~(values_s * 1e3 > bound_ms)
    if slo.itl_ms is not None:
        is_good &= _share_within(columns, slo.itl_ms / 1e3) >= slo.itl_percent / 100
    return is_good


def _share_within(columns: Columns, bound_s: float) -> NDArray[np.float64]:
    """For each request: the share of its gaps that are no longer than the bound; 1 without gaps."""
    # The gaps are 32 bits wide: the bound is, too, so that a gap just as long is not longer.
    is_within = columns.gaps_s <= np.float32(bound_s)
    sums = np.concatenate([[0], np.cumsum(is_within)])
    starts = columns.gap_starts
    num = np.diff(starts)
    within = sums[starts[1:]] - sums[starts[:-1]]
    return np.where(num > 0, within / np.maximum(num, 1), 1.0)
