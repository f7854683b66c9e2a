import pytest

from benchmarks.overload import Load, Outcome, row_of, verdict
from benchmarks.overload_plot import plot_overload


def load_of(times, num_good, *, late=0, refused=0, lost=0):
    outcomes = [Outcome(200, 0.1, 1.0)] * num_good + [Outcome(200, 9.0, 9.5)] * late
    outcomes += [Outcome(503, float("nan"), 0.002)] * refused + [Outcome(0, 0.1, 1.0)] * lost
    return Load.of(times, outcomes, 10.0, 12.5)


def test_goodput_is_what_came_in_time():
    load = load_of(2.0, 100, late=25, refused=75)
    assert (load.offered, load.goodput, load.answered) == (20.0, 8.0, 10.0)
    assert (load.refused, load.late, load.lost) == (75, 25, 0)
    assert load.refusal_p99_s == pytest.approx(0.002)
    assert row_of(load)[0] == "2 x"


@pytest.mark.parametrize(
    ("at_most_load", "is_kept"),
    [
        (load_of(3.0, 80, refused=220), True),
        (load_of(3.0, 79, refused=221), False),
        (load_of(3.0, 100, lost=1), False),
        (load_of(3.0, 0, late=100), False),
    ],
)
def test_the_promise_is_kept_or_not(at_most_load, is_kept):
    loads = [load_of(1.0, 100), at_most_load, load_of(1.0, 95)]
    assert verdict(loads)[0] is is_kept


def test_a_machine_that_was_not_quiet_shows():
    loads = [load_of(1.0, 100), load_of(3.0, 90), load_of(1.0, 75)]
    assert "repeated at the end, had 75% of its goodput" in verdict(loads)[1]


def test_the_picture_has_room_for_what_is_missing(tmp_path):
    nothing_answered = load_of(3.0, 0, refused=10, lost=1)
    loads = [load_of(1.0, 100), nothing_answered, load_of(1.0, 95, late=2)]
    plot_overload(loads, 0.8, 2.0, "a machine", tmp_path / "overload.png")
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")
