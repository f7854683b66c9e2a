import numpy as np
import pytest

from neuron_di.bench.statistics import curve, summary


@pytest.mark.parametrize("num", [1, 2, 3, 10, 101, 5000])
def test_percentiles_are_numpys(num):
    values = np.random.default_rng(num).exponential(size=num)
    found = summary(values, times=1e3)
    assert found is not None
    assert found.num == num
    assert found.mean == pytest.approx(1e3 * values.mean())
    assert found.max == pytest.approx(1e3 * values.max())
    for percent in (50, 90, 95, 99):
        assert getattr(found, f"p{percent}") == pytest.approx(1e3 * np.percentile(values, percent))


def test_what_is_no_number_counts_for_nothing():
    assert summary([1.0, float("nan"), 3.0]) == summary([1.0, 3.0])
    assert summary([float("nan")]) is None
    assert summary([]) is None


def test_a_curve_goes_as_far_as_the_sample_tells():
    values = np.arange(1000.0)
    found = curve(values)
    assert found[0] == [0, 0]
    assert found[-1][0] == 99.9
    assert curve(values[:10])[-1][0] == 90
    assert curve([5.0]) == [[0, 5]]
    assert curve([]) == []
