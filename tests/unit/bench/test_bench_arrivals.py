import numpy as np
import pytest

from neuron_di.bench.arrivals import arrival_times_s

NUM = 20_000


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_have_the_rate_and_are_exponential(rng, rate):
    gaps = np.diff(arrival_times_s("poisson", rate, NUM, rng), prepend=0)
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.03)
    # Half of them are below ln 2 of the mean, and memory there is none.
    assert np.mean(gaps < np.log(2) / rate) == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_bursts_have_the_rate_and_the_variation_that_was_asked_for(rng, burstiness):
    gaps = np.diff(arrival_times_s("burst", 10, NUM, rng, burstiness=burstiness), prepend=0)
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_burst_of_1_is_poisson():
    one, other = (np.random.default_rng(3) for _ in range(2))
    burst = arrival_times_s("burst", 5, 100, one, burstiness=1.0)
    assert (burst == arrival_times_s("poisson", 5, 100, other)).all()


def test_constant_arrivals_are_a_ruler(rng):
    assert arrival_times_s("constant", 4, 5, rng).tolist() == [0, 0.25, 0.5, 0.75, 1.0]


def test_an_infinite_rate_is_all_at_once(rng):
    assert not arrival_times_s("poisson", float("inf"), 9, rng).any()
