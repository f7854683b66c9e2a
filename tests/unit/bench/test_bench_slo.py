import pytest
from bench_kit import ask, measured

from neuron_di.bench.slo import Slo, good
from neuron_di.errors import ConfigError


def verdicts(slo, *requests):
    return good(measured(*requests).columns(), slo).tolist()


def test_without_bounds_each_whole_answer_is_good():
    assert verdicts(Slo(), ask(ttft=99), ask(ending="cut"), ask(ending="refused_429")) == [
        True,
        False,
        False,
    ]


def test_ttft_counts_from_when_it_was_due_not_from_when_it_was_sent():
    slo = Slo(ttft_ms=100)
    assert verdicts(slo, ask(ttft=0.0999), ask(ttft=0.1001), ask(ttft=0.11, late=0.05)) == [
        True,
        False,
        False,
    ]


def test_a_bound_that_is_just_met_is_kept():
    assert verdicts(Slo(itl_ms=10, itl_percent=100), ask(gaps=[0.01] * 5)) == [True]


def test_a_share_of_an_answers_gaps_may_be_longer():
    one_in_10, two_in_10 = [0.01] * 9 + [0.5], [0.01] * 8 + [0.5] * 2
    assert verdicts(Slo(itl_ms=20, itl_percent=90), ask(gaps=one_in_10), ask(gaps=two_in_10)) == [
        True,
        False,
    ]
    assert verdicts(Slo(itl_ms=20), ask(gaps=one_in_10), ask(gaps=[0.01] * 99 + [0.5])) == [
        False,
        True,
    ]


def test_an_answer_of_one_token_has_no_gap_and_no_tpot_to_break_a_bound():
    assert verdicts(Slo(itl_ms=1, tpot_ms=1), ask(gaps=[])) == [True]


def test_gaps_of_others_do_not_count():
    slow, fast = ask(gaps=[0.5, 0.5]), ask(gaps=[0.001])
    assert verdicts(Slo(itl_ms=10), fast, slow, ask(gaps=[]), fast) == [True, False, True, True]


def test_tpot_and_e2e():
    requests = [ask(ttft=0.1, gaps=[0.02, 0.04]), ask(ttft=0.1, gaps=[0.01, 0.06])]
    assert verdicts(Slo(tpot_ms=31), *requests) == [True, False]
    assert verdicts(Slo(e2e_ms=161), *requests) == [True, False]


def test_a_failed_request_is_never_good_however_fast():
    slo = Slo(ttft_ms=1e9, itl_ms=1e9)
    assert verdicts(slo, ask(ending="wrong_tokens"), ask(ending="interrupted")) == [False, False]


def test_words():
    slo = Slo(ttft_ms=500, itl_ms=50)
    assert slo.words() == "TTFT <= 500 ms, ITL <= 50 ms in 99 % of gaps"
    assert Slo().words() == ""
    assert not Slo().is_given


@pytest.mark.parametrize("bounds", [{"ttft_ms": 0.0}, {"itl_ms": -1.0}, {"e2e_ms": float("nan")}])
def test_a_bound_is_above_0(bounds):
    with pytest.raises(ConfigError, match="--slo-"):
        Slo.checked(itl_percent=99, **bounds)


@pytest.mark.parametrize("percent", [0, 101, float("nan")])
def test_percent_is_a_percent(percent):
    with pytest.raises(ConfigError, match="percent"):
        Slo.checked(itl_percent=percent)
