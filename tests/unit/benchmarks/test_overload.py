import argparse
import json
import sys

import pytest

from benchmarks import overload
from benchmarks.overload import COLUMNS, Load, Outcome, measure, row_of, verdict
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
    assert row_of(load, 8.0)[:4] == ["2 x", "20.0", "2.50 x", "8.0"]
    assert row_of(load, 0.0)[2] == "-"
    assert len(row_of(load, 8.0)) == len(COLUMNS)


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


def test_the_load_is_what_was_offered_not_what_was_meant():
    meant_only = [load_of(1.0, 100), load_of(3.0, 100), load_of(1.0, 100)]
    is_kept, words = verdict(meant_only)
    assert not is_kept
    assert "At 1.25 times the peak of goodput, goodput is 100%" in words
    assert "was to be 3 times" in words
    offered, words = verdict([load_of(1.0, 100), load_of(3.0, 90, refused=150)])
    assert offered
    assert "At 3.00 times the peak of goodput, goodput is 90%" in words


def test_no_good_answer_at_all_is_a_result(tmp_path, monkeypatch, capsys):
    async def measured(model, options):
        return [
            load_of(1.0, 0, late=5),
            load_of(3.0, 0, refused=9, lost=2),
            load_of(1.0, 0, late=5),
        ]

    monkeypatch.setattr(overload, "measure", measured)
    arguments = ["overload", "--model=tiny", f"--results={tmp_path}"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert overload.main() == 1
    words = "At no load was any answer good; 2 answers were lost."
    assert words in capsys.readouterr().out
    assert words in (tmp_path / "overload.md").read_text()
    assert json.loads((tmp_path / "overload.json").read_text())["peak_goodput"] == 0
    assert (tmp_path / "overload.png").exists()


@pytest.mark.parametrize(
    ("capacity", "rates"), [(10.0, [10.0, 30.0, 10.0]), (0.0, [1.0, 3.0, 1.0])]
)
async def test_capacity_is_that_of_full_slots(capacity, rates, monkeypatch):
    """With a client for each place in the queue, too: else slots wait for the next request."""
    streams, offered = [], []

    class Fleet:
        url, model_name = "http://127.0.0.1:9", "m"

        def __init__(self, serve):
            assert serve.limits.queue_max == 4

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    async def saturate(client, number, duration_s):
        streams.append(number)
        return capacity

    async def offer(client, times, rate, duration_s):
        offered.append(rate)

    for each in (Fleet, saturate, offer):
        monkeypatch.setattr(overload, each.__name__, each)
    options = argparse.Namespace(slots=8, queue=4, max_tokens=8, seconds=1.0, times=[1.0, 3.0])
    await measure("model", options)
    assert streams == [12, 12]
    assert offered == rates


def test_a_machine_that_was_not_quiet_shows():
    loads = [load_of(1.0, 100), load_of(3.0, 90), load_of(1.0, 75)]
    assert "repeated at the end, had 75% of its goodput" in verdict(loads)[1]


def test_the_picture_has_room_for_what_is_missing(tmp_path):
    nothing_answered = load_of(3.0, 0, refused=10, lost=1)
    loads = [load_of(1.0, 100), nothing_answered, load_of(1.0, 95, late=2)]
    plot_overload(loads, 0.8, 2.0, "a machine", tmp_path / "overload.png")
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")
