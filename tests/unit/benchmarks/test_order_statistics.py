import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.order_statistics import Spread, percentile

samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_spread_of_an_even_sample_has_the_mean_of_the_middle_two():
    assert Spread.of([4.0, 1.0, 2.0, 9.0]) == Spread(median=3.0, least=1.0, most=9.0)


def test_spread_reads_an_iterator_once():
    assert Spread.of(iter([5.0])) == Spread(5.0, 5.0, 5.0)


@pytest.mark.parametrize(
    ("percent", "expected"), [(1, 1), (20, 1), (21, 2), (50, 3), (99, 5), (100, 5)]
)
def test_percentile_is_the_nearest_rank(percent, expected):
    assert percentile([3, 1, 5, 2, 4], percent) == expected


@given(samples, st.integers(1, 100))
def test_percentile_covers_that_share_of_the_sample(sample, percent):
    value = percentile(sample, percent)
    assert value in sample
    assert sum(x <= value for x in sample) * 100 >= percent * len(sample)
    assert sum(x < value for x in sample) * 100 < percent * len(sample)


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_percentiles_outside_of_the_sample_are_refused(percent):
    with pytest.raises(ValueError, match="is not in"):
        percentile([1.0], percent)


def test_nothing_has_no_statistics():
    with pytest.raises(ValueError, match="empty"):
        Spread.of([])
    with pytest.raises(ValueError, match="empty"):
        percentile([], 50)
