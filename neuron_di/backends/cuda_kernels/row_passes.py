"""The passes over one row of numbers that a draw is made of. See draw_kernel.py for the terms.

A row is `num` numbers from `source` on. X counts the numbers of one tile, or its lanes: lane x has
the numbers x, x + X, ... of the row. Sums of weights are in float64, by lane and then over lanes:
in one order whatever the batch.
"""

from neuron_di.backends.cuda_kernels.triton_language import jit, tl

_INF_BITS = tl.constexpr(0x7F800000)  # of float32
_ONE_BITS = tl.constexpr(0x3F800000)


@jit
def largest(
    source: tl.tensor, num: tl.tensor, TILE_X: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each lane's largest number, its first index, and 1 where a lane has NaN."""
    lane_X = tl.arange(0, TILE_X)
    peak_X = tl.full([TILE_X], -float("inf"), tl.float32)
    index_X = lane_X
    is_nan_X = tl.zeros([TILE_X], tl.int32)
    for start in range(0, num, TILE_X):
        x_X = tl.load(source + start + lane_X, mask=start + lane_X < num, other=-float("inf"))
        index_X = tl.where(x_X > peak_X, start + lane_X, index_X)
        peak_X = tl.where(x_X > peak_X, x_X, peak_X)
        is_nan_X |= (x_X != x_X).to(tl.int32)
    return peak_X, index_X, is_nan_X


@jit
def _scaled(x_X: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.div_rn(x_X - peak, temperature)  # rounded as the host rounds


@jit
def _key(scaled_X: tl.tensor) -> tl.tensor:
    return tl.abs(scaled_X).to(tl.int32, bitcast=True)


@jit
def _weighed(
    source: tl.tensor,
    start: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """Weights of a tile, 1 for the largest logit's. -1 behind the row and for keys over `limit`."""
    index_X = start + tl.arange(0, TILE_X)
    x_X = tl.load(source + index_X, mask=index_X < num, other=-float("inf"))
    scaled_X = _scaled(x_X, peak, temperature)
    return tl.where((index_X < num) & (_key(scaled_X) <= limit), tl.exp(scaled_X), -1.0)


@jit
def mass_above(
    source: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The sum of weights over `floor`, of keys up to `limit`. A `floor` of -1 takes all."""
    sum_X = tl.zeros([TILE_X], tl.float64)
    for start in range(0, num, TILE_X):
        weight_X = _weighed(source, start, num, peak, temperature, limit, TILE_X)
        sum_X += tl.where(weight_X > floor, weight_X, 0.0).to(tl.float64)
    return tl.sum(sum_X, 0)


@jit
def kth_key_of_lanes(
    peak_X: tl.tensor, peak: tl.tensor, temperature: tl.tensor, k: tl.tensor
) -> tl.tensor:
    """The k-th smallest key of the lanes' largest logits; infinity's where there are fewer."""
    key_X = _key(_scaled(peak_X, peak, temperature))
    low, high = -1, _INF_BITS
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = tl.sum((key_X <= middle).to(tl.int32), 0) >= k
        low, high = tl.where(is_enough, low, middle), tl.where(is_enough, middle, high)
    return high


@jit
def kth_key(
    source: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The k-th smallest key of a row."""
    low, high = -1, _INF_BITS
    while high - low > 1:
        middle = low + (high - low) // 2
        count_X = tl.zeros([TILE_X], tl.int32)
        for start in range(0, num, TILE_X):
            index_X = start + tl.arange(0, TILE_X)
            x_X = tl.load(source + index_X, mask=index_X < num, other=-float("inf"))
            count_X += (_key(_scaled(x_X, peak, temperature)) <= middle).to(tl.int32)
        is_enough = tl.sum(count_X, 0) >= k
        low, high = tl.where(is_enough, low, middle), tl.where(is_enough, middle, high)
    return high


@jit
def least_kept(
    source: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    needed: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The largest weight that, with all that are as large or larger, makes up `needed`."""
    low, high = num * 0, _ONE_BITS + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        sum_X = tl.zeros([TILE_X], tl.float64)
        for start in range(0, num, TILE_X):
            weight_X = _weighed(source, start, num, peak, temperature, limit, TILE_X)
            # Of what is left out the weight is -1, whose bits are those of a negative integer.
            is_kept_X = weight_X.to(tl.int32, bitcast=True) >= middle
            sum_X += tl.where(is_kept_X, weight_X, 0.0).to(tl.float64)
        is_enough = tl.sum(sum_X, 0) >= needed
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    return low.to(tl.float32, bitcast=True)


@jit
def compact(
    source: tl.tensor,
    kept: tl.tensor,
    kept_ids: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    floor: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """Copy what weighs more than `floor`, of keys up to `limit`, with its indices; how many."""
    num_kept = num * 0
    for start in range(0, num, TILE_X):
        index_X = start + tl.arange(0, TILE_X)
        weight_X = _weighed(source, start, num, peak, temperature, limit, TILE_X)
        is_kept_X = weight_X > floor
        place_X = num_kept + tl.cumsum(is_kept_X.to(tl.int32), 0) - 1
        x_X = tl.load(source + index_X, mask=is_kept_X, other=0.0)
        tl.store(kept + place_X, x_X, mask=is_kept_X)
        tl.store(kept_ids + place_X, index_X, mask=is_kept_X)
        num_kept += tl.sum(is_kept_X.to(tl.int32), 0)
    return num_kept


@jit
def find(
    source: tl.tensor,
    num: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    least: tl.tensor,
    is_equal: tl.tensor,
    target: tl.tensor,
    TILE_X: tl.constexpr,
) -> tl.tensor:
    """The index whose share of the mass holds `target`, among weights over, or equal to, `least`.

    Never one without weight: where rounding has carried the target to the end, the last with it.
    """
    lane_X = tl.arange(0, TILE_X)
    passed = target * 0.0
    found, before = num * 0, passed
    is_found = num < 0
    for start in range(0, num, TILE_X):
        weight_X = _weighed(source, start, num, peak, temperature, limit, TILE_X)
        is_in_X = tl.where(is_equal, weight_X == least, weight_X > least) & (weight_X > 0.0)
        mass = tl.sum(tl.where(is_in_X, weight_X, 0.0).to(tl.float64), 0)
        is_next = (mass > 0.0) & (is_found == 0)
        found, before = tl.where(is_next, start, found), tl.where(is_next, passed, before)
        passed += mass
        is_found |= passed > target
    weight_X = _weighed(source, found, num, peak, temperature, limit, TILE_X)
    is_in_X = tl.where(is_equal, weight_X == least, weight_X > least) & (weight_X > 0.0)
    cdf_X = before + tl.cumsum(tl.where(is_in_X, weight_X, 0.0).to(tl.float64), 0)
    first = tl.min(tl.where(is_in_X & (cdf_X > target), lane_X, TILE_X), 0)
    last = tl.max(tl.where(is_in_X, lane_X, 0), 0)
    return found + tl.where(first < TILE_X, first, last)
