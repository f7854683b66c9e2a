import pytest

from benchmarks.interference import observation_of
from benchmarks.interference_client import Arrival, Stream
from benchmarks.interference_placement import Placement
from benchmarks.interference_report import InterferenceReport, Observation, RoundSummary

ARRIVAL = Arrival(sent_s=1.0, first_token_s=3.0, done_s=3.2, prefill_s=1.9)


def test_gaps_lie_between_the_tokens_of_one_stream():
    assert Stream([1.0, 1.5, 3.5], [1, 2, 3]).gaps() == [(1.5, 0.5), (3.5, 2.0)]


def test_times_count_from_the_start_and_earlier_gaps_are_left_out():
    streams = [Stream([9.0, 10.0, 10.5], [1, 2, 3]), Stream([9.5, 10.25, 11.0], [1, 2, 3])]
    observed = observation_of(streams, [Arrival(12.0, 13.0, 14.0, 0.5)], 10.0)
    assert observed.gaps == [(0.5, 0.5), (1.0, 0.75)]
    assert observed.arrivals == [Arrival(2.0, 3.0, 4.0, 0.5)]


@pytest.mark.parametrize(
    ("gap", "counts"),
    [
        ((0.9, 0.5), False),  # over before the prompt came
        ((1.1, 0.5), True),  # the prompt came during it
        ((2.0, 0.5), True),
        ((4.0, 3.9), True),  # it lasted longer than the prompt
        ((3.5, 0.4), True),  # began before the prompt's last token
        ((4.0, 0.5), False),
    ],
)
def test_a_gap_counts_at_an_arrival_when_they_overlap(gap, counts):
    small = (2.0, 0.001)
    largest_s = Observation([small, gap], [ARRIVAL]).largest_at(ARRIVAL)
    assert largest_s == (gap[1] if counts else small[1])


def summary(*, median_s=0.02, largest_s, prefill_s=1.0):
    return RoundSummary(median_s, median_s, [0.021, largest_s], [prefill_s, prefill_s])


def report(apart, combined):
    return InterferenceReport("c", "m", "s", {}, {"1P1D": apart, "combined": combined})


STALLED = RoundSummary(0.02, 1.1, [1.1, 1.2], [1.0, 1.0])


def test_the_promise_is_kept_when_no_round_breaks_it():
    is_kept, words = report([summary(largest_s=0.039)], [STALLED]).verdict()
    assert is_kept
    assert "below 2" in words


def test_one_large_gap_in_one_round_breaks_the_promise():
    rounds = [summary(largest_s=0.03), summary(largest_s=0.04)]
    is_kept, words = report(rounds, [STALLED]).verdict()
    assert not is_kept
    assert "NOT below 2" in words


def test_a_combined_worker_that_does_not_stall_shows_nothing():
    smooth = RoundSummary(0.02, 0.03, [0.03], [1.0])
    assert not report([summary(largest_s=0.03)], [smooth]).verdict()[0]


def test_client_and_proxy_get_a_core_without_a_worker():
    placement = Placement.of(["prefill-0", "decode-0"], [0, 1, 2, 3])
    assert placement == Placement({"prefill-0": 0, "decode-0": 1}, 3)
    assert placement.yielding == []


def test_on_two_cores_prefill_gives_way_and_decode_stays_alone():
    placement = Placement.of(["prefill-0", "decode-0"], [0, 1])
    assert placement.client_core == 0
    assert placement.yielding == ["prefill-0"]
    assert "gives way" in str(placement)


def test_one_core_is_not_enough():
    with pytest.raises(ValueError, match="two cores"):
        Placement.of(["combined-0"], [0])
