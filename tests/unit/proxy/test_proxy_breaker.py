import pytest
from hand_clock import HandClock
from scripted_worker import make_record

from neuron_di.clock import use_clock
from neuron_di_proxy.breaker import FAILURES_MAX, OPEN_S, WINDOW_S, Breaker
from neuron_di_proxy.watch import Watch, Watching, ignore


@pytest.fixture
def clock():
    with use_clock(clock := HandClock()):
        yield clock


def fail(breaker, clock, times, every_s=1.0):
    for _ in range(times):
        clock.now_s += every_s
        breaker.fail()


def request(breaker):
    """A request to its worker, in a `with` block."""
    return Watching(Watch(make_record("p1", "prefill"), breaker=breaker), ignore)


@pytest.fixture
def opened(clock):
    breaker = Breaker()
    fail(breaker, clock, FAILURES_MAX)
    return breaker


def test_it_opens_with_the_fifth_failure(clock):
    breaker = Breaker()
    fail(breaker, clock, FAILURES_MAX - 1)
    assert (breaker.state(), breaker.admits()) == ("closed", True)
    fail(breaker, clock, 1)
    assert (breaker.state(), breaker.admits()) == ("open", False)


def test_failures_long_ago_do_not_count(clock):
    breaker = Breaker()
    fail(breaker, clock, 20, every_s=WINDOW_S / (FAILURES_MAX - 1) + 0.1)
    assert breaker.state() == "closed"
    fail(breaker, clock, FAILURES_MAX - 1, every_s=1.0)
    assert breaker.state() == "open"


def test_failures_at_the_same_moment_are_one(clock):
    breaker = Breaker()
    fail(breaker, clock, 1000, every_s=0.0)
    assert breaker.state() == "closed"


def test_one_at_a_time_is_tried_when_it_was_open_for_long_enough(clock, opened):
    clock.now_s += OPEN_S - 0.1
    assert not opened.admits()
    clock.now_s += 0.1
    assert (opened.state(), opened.admits()) == ("half_open", True)
    with request(opened):
        assert not opened.admits()
    assert (opened.state(), opened.admits()) == ("half_open", True)


def test_a_trial_ends_with_its_first_good_event(clock, opened):
    clock.now_s += OPEN_S
    with request(opened) as first_succeeds:
        assert not opened.admits()
        first_succeeds()
        first_succeeds()  # further tokens of the same request: once is enough
        assert (opened.state(), opened.admits()) == ("half_open", True)
        with request(opened) as second_succeeds:
            assert not opened.admits()
            second_succeeds()
            assert opened.state() == "closed"
    fail(opened, clock, FAILURES_MAX)
    clock.now_s += OPEN_S
    assert opened.admits()  # nothing counts as a trial any more


def test_two_successes_close_it(clock, opened):
    clock.now_s += OPEN_S
    opened.succeed()
    assert opened.state() == "half_open"
    opened.succeed()
    assert opened.state() == "closed"
    fail(opened, clock, FAILURES_MAX - 1)
    assert opened.state() == "closed"  # what was before is forgotten


def test_a_failed_trial_opens_it_again(clock, opened):
    clock.now_s += OPEN_S
    opened.succeed()
    opened.fail()
    assert opened.state() == "open"
    clock.now_s += OPEN_S
    opened.succeed()
    assert opened.state() == "half_open"  # the success before the failure does not count


def test_requests_from_before_it_opened_are_no_trials(clock):
    breaker = Breaker()
    with request(breaker) as succeed:
        fail(breaker, clock, FAILURES_MAX)
        succeed()
        assert breaker.state() == "open"
        clock.now_s += OPEN_S
        assert breaker.admits()
    assert breaker.admits()
