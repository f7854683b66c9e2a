"""How long the tutorials' tests wait for a step: as long as it shows signs of life."""

from tutorial_kit import Patience


def test_it_lasts_as_long_as_there_are_signs_of_life() -> None:
    patience = Patience(100.0, silence_s=10, total_s=1000)
    for now_s in range(100, 1000, 9):
        assert patience.lasts(now_s, {"serve.log": now_s})


def test_silence_ends_it() -> None:
    patience = Patience(100.0, silence_s=10, total_s=1000)
    assert patience.lasts(105.0, {"serve.log": 7})
    assert patience.lasts(114.9, {"serve.log": 7})
    assert not patience.lasts(115.0, {"serve.log": 7})
    patience = Patience(100.0, silence_s=10, total_s=1000)
    assert patience.lasts(105.0, {"serve.log": 7})
    assert patience.lasts(114.0, {"serve.log": 7, "decode-1.log": 0})  # somebody was started
    assert patience.lasts(123.0, {"serve.log": 7, "decode-1.log": 0})


def test_nobody_is_waited_for_for_ever() -> None:
    patience = Patience(100.0, silence_s=10, total_s=30)
    assert all(patience.lasts(now_s, now_s) for now_s in (105.0, 112.0, 120.0, 129.0))
    assert not patience.lasts(130.0, "still alive")
