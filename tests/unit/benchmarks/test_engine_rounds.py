import pytest

from benchmarks.contender_process import Timed
from benchmarks.engine_report import EngineReport, notes_of, rows_of
from benchmarks.engine_rounds import Case, Outcome, Speed

CASE = Case(512, 8, has_decode=True)


def test_prefill_speed_counts_every_prompt_position():
    speed = Speed.of_prefill(CASE, Timed(wall_s=2.0, cpu_s=4.0, token_ids=[]))
    assert speed == Speed(wall=2048.0, cpu=1024.0)


def test_decode_speed_is_the_difference_of_two_generations():
    first, many = Timed(2.0, 1.0, []), Timed(4.0, 5.0, [])
    assert Speed.of_decode(CASE, first, many, 33) == Speed(wall=128.0, cpu=64.0)


@pytest.mark.parametrize("many", [Timed(2.0, 9.0, []), Timed(9.0, 1.0, [])])
def test_decode_that_took_no_time_cannot_be_measured(many):
    with pytest.raises(ValueError, match="too busy"):
        Speed.of_decode(CASE, Timed(2.0, 1.0, []), many, 33)


@pytest.fixture
def outcome():
    return Outcome(
        versions={"ours": "ours 1", "theirs": "theirs 2"},
        greedy={"ours": [1, 2], "theirs": [1, 2]},
        speeds={
            "decode": {
                "ours": [Speed(100.0, 30.0), Speed(300.0, 30.0), Speed(90.0, 30.0)],
                "theirs": [Speed(50.0, 60.0), Speed(100.0, 60.0), Speed(90.0, 60.0)],
            }
        },
        peak_rss_bytes={"ours": 1 << 20, "theirs": 2 << 20},
        idle_shares={"ours": 0.0, "theirs": 0.5},
    )


@pytest.fixture
def report(outcome):
    return EngineReport(
        command="c",
        machine="m",
        ours="ours",
        num_rounds=3,
        new_tokens=33,
        threads=1,
        outcomes={"25m": outcome},
    )


def test_ratios_compare_engines_within_a_round(outcome):
    assert outcome.ratios("decode", "ours", "theirs", "wall") == [2.0, 3.0, 1.0]
    assert outcome.ratios("decode", "ours", "theirs", "cpu") == [0.5, 0.5, 0.5]


def test_rows_show_ratios_of_the_others_only(report, outcome):
    assert rows_of(report, outcome) == [
        ("decode", "ours", "100", "", ""),
        ("decode", "theirs", "90.0", "2.00 (1.00 to 3.00)", "0.50 (0.50 to 0.50)"),
    ]


def test_a_mismatch_of_tokens_is_named(report, outcome):
    assert any("are equal" in note for note in notes_of(report, outcome))
    outcome.greedy["theirs"] = [1, 3]
    (mismatch,) = (note for note in notes_of(report, outcome) if "MISMATCH" in note)
    assert "theirs" in mismatch
