import numpy as np
import pytest

from neuron_di.bench.lengths import Lengths
from neuron_di.errors import ConfigError


def draw(text, num=20_000):
    return Lengths.read(text, "--input-tokens").draw(num, np.random.default_rng(5))


def test_a_number_is_that_number():
    assert set(draw("128", 9)) == {128}


def test_a_normal_distribution():
    lengths = draw("normal:100,10")
    assert lengths.mean() == pytest.approx(100, abs=0.5)
    assert lengths.std() == pytest.approx(10, rel=0.03)


def test_bounds_are_kept_and_nothing_piles_up_on_them():
    lengths = draw("normal:100,50,60,140")
    assert lengths.min() >= 60
    assert lengths.max() <= 140
    assert np.mean(lengths == 60) < 0.02


def test_without_bounds_no_length_is_below_1():
    assert draw("normal:2,5").min() == 1


def test_a_uniform_distribution_has_both_ends():
    lengths = draw("uniform:3,6")
    assert np.unique(lengths).tolist() == [3, 4, 5, 6]
    assert np.bincount(lengths)[3:].min() > 4700


def test_a_lognormal_distribution_has_its_median():
    lengths = draw("lognormal:500,0.8")
    assert np.median(lengths) == pytest.approx(500, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.02)


def test_bounds_that_hardly_anything_meets_are_kept_all_the_same():
    assert set(draw("normal:1000,1,1,10", 50)) == {10}


@pytest.mark.parametrize("text", ["128", "normal:100,10", "normal:9,2,1,20", "uniform:3,6"])
def test_words_can_be_read_again(text):
    lengths = Lengths.read(text, "--x")
    assert Lengths.read(lengths.words(), "--x") == lengths


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "1.5", "abc", "normal:5", "normal:5,-1", "uniform:9,3", "uniform:1", "zipf:1,2",
     "nan", "inf", "normal:nan,1", "normal:1,inf", "normal:1,2,3", "lognormal:0,1",
     "normal:5,1,9,3", "uniform:1.5,3", "99999999999"],
)  # fmt: skip
def test_what_is_no_length_is_refused_by_its_flag(text):
    with pytest.raises(ConfigError, match="--output-tokens"):
        Lengths.read(text, "--output-tokens")
