"""What others can bring about does not fill the log."""

import logging

import pytest
from hand_clock import HandClock

from neuron_di.clock import use_clock
from neuron_di.obs import LimitedLogger


@pytest.fixture
def clock():
    clock = HandClock(0.0)
    with use_clock(clock):
        yield clock


@pytest.fixture
def written(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.event_fields for record in caplog.records]


def test_the_first_lines_of_an_interval_are_written(clock, written):
    log = LimitedLogger("neuron_di.test", lines_max=2, interval_s=10)
    for number in range(1000):
        log.warning("signal_refused", number=number)
    assert written() == [
        {"event": "signal_refused", "number": 0},
        {"event": "signal_refused", "number": 1},
    ]
    clock.now_s = 10
    log.warning("signal_refused", number=1000)
    log.info("signal_refused", number=1001)
    assert written()[2:] == [
        {"event": "signal_refused", "number": 1000, "unwritten": 998},
        {"event": "signal_refused", "number": 1001},
    ]


def test_one_event_takes_nothing_from_another(clock, written):
    log = LimitedLogger("neuron_di.test", lines_max=1, interval_s=10)
    for event in ("a", "b", "a", "b"):
        log.info(event)
    assert [each["event"] for each in written()] == ["a", "b"]


def test_a_quiet_log_never_counts(clock, written):
    log = LimitedLogger("neuron_di.test", lines_max=1, interval_s=10)
    for _ in range(5):
        log.warning("a")
        clock.now_s += 10
    assert written() == [{"event": "a"}] * 5
