import numpy as np
import pytest

from neuron_di.bench.plan import make_plan
from neuron_di.bench.settings import make_settings
from neuron_di.bench.traces import Trace
from neuron_di.errors import ConfigError


def settings(**given):
    return make_settings({"urls": ("http://a",)} | given)


TRACE = Trace(
    at_s=np.array([0.0, 1.0, 2.0, 4.0]),
    input_tokens=np.array([1000, 2000, 9000, 10]),
    output_tokens=np.array([100, 10, 50, 1]),
    hash_ids=np.array([0, 1, 0, 2, 3, 4]),
    hash_starts=np.array([0, 2, 5, 6, 6]),
)


def test_a_closed_loop_has_no_arrivals_and_the_same_lengths_every_time():
    plans = [
        make_plan(settings(requests=50, input_tokens="normal:100,20"), None, None) for _ in "ab"
    ]
    assert plans[0].at_s is None
    assert len(plans[0]) == 50
    assert (plans[0].input_tokens == plans[1].input_tokens).all()
    other = make_plan(settings(requests=50, input_tokens="normal:100,20", seed=1), None, None)
    assert (plans[0].input_tokens != other.input_tokens).any()


def test_arrivals_end_with_the_requests_or_with_the_duration():
    plan = make_plan(settings(rate=10.0, arrivals="constant", requests=30), None, None)
    assert len(plan) == 30
    plan = make_plan(settings(rate=10.0, arrivals="constant", duration_s=2.0), None, None)
    assert (len(plan), plan.at_s.max()) == (20, 1.9)
    plan = make_plan(
        settings(rate=10.0, arrivals="constant", duration_s=2.0, requests=5), None, None
    )
    assert len(plan) == 5


def test_no_arrival_within_the_duration():
    with pytest.raises(ConfigError, match="--duration-s"):
        make_plan(settings(rate=1e-9, duration_s=0.001), None, None)


def test_what_does_not_fit_is_drawn_again():
    plan = make_plan(
        settings(requests=200, input_tokens="uniform:1,200", output_tokens="50"), None, 150
    )
    assert (plan.input_tokens + plan.output_tokens).max() <= 150


def test_what_can_never_fit():
    with pytest.raises(ConfigError, match="context of 100 tokens"):
        make_plan(settings(input_tokens="100", output_tokens="50"), None, 100)


def test_a_replay():
    plan = make_plan(settings(trace="x", time_scale=0.5, token_scale=0.1), TRACE, None)
    assert plan.at_s.tolist() == [0, 0.5, 1, 2]
    assert plan.input_tokens.tolist() == [100, 200, 900, 1]
    assert plan.output_tokens.tolist() == [10, 1, 5, 1]
    assert [plan.hashes(i).tolist() for i in range(4)] == [[0, 1], [0, 2, 3], [4], []]


def test_what_of_a_trace_does_not_fit_is_left_out_and_counted():
    plan = make_plan(settings(trace="x", token_scale=0.1), TRACE, 300)
    assert plan.num_left_out == 1
    assert plan.input_tokens.tolist() == [100, 200, 1]
    assert plan.at_s.tolist() == [0, 1, 4]
    assert [plan.hashes(i).tolist() for i in range(3)] == [[0, 1], [0, 2, 3], []]


def test_only_what_was_reached_is_counted_as_left_out():
    plan = make_plan(settings(trace="x", token_scale=0.1, requests=2), TRACE, 300)
    assert (len(plan), plan.num_left_out) == (2, 0)


def test_a_duration_cuts_a_replay():
    assert len(make_plan(settings(trace="x", duration_s=1.5, time_scale=0.5), TRACE, None)) == 3


def test_a_traces_lengths_with_other_arrivals():
    plan = make_plan(settings(trace="x", rate=2.0, arrivals="constant"), TRACE, None)
    assert plan.at_s.tolist() == [0, 0.5, 1, 1.5]
    assert make_plan(settings(trace="x", concurrency=2), TRACE, None).at_s is None


def test_nothing_of_a_trace_fits():
    with pytest.raises(ConfigError, match="--token-scale"):
        make_plan(settings(trace="x"), TRACE, 10)


@pytest.mark.parametrize(("num", "sizes"), [(1, [10]), (3, [3, 3, 4]), (10, [1] * 10)])
def test_slices_are_the_requests_in_order(num, sizes):
    plan = make_plan(settings(requests=10), None, None)
    slices = plan.slices(num)
    assert [len(each) for each in slices] == sizes
    assert [index for each in slices for index in each] == list(range(10))
