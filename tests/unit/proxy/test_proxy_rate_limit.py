"""What a tenant may take per minute, and what it is told when it took it."""

import pytest
from hand_clock import HandClock

from neuron_di.clock import use_clock
from neuron_di.config import LimitOptions
from neuron_di.errors import RateLimited
from neuron_di_proxy import admission as admission_module
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.rate_limit import RateLimit
from neuron_di_proxy.retry_after import WAIT_S_MAX, WAIT_S_MIN, WAIT_S_UNKNOWN, DrainRate
from neuron_di_proxy.tenant import EVERYBODY, Tenant


@pytest.fixture
def clock():
    with use_clock(clock := HandClock(50.0, may_sleep=False)):
        yield clock


def test_a_minutes_worth_at_once_and_then_the_rate(clock):
    limit = RateLimit(60)
    for _ in range(60):
        assert limit.wait_s(1) == 0
        limit.take(1)
    assert limit.wait_s(1) == pytest.approx(1.0)
    clock.now_s += 1
    assert limit.wait_s(1) == 0
    clock.now_s += 3600  # what is not taken does not pile up
    for _ in range(60):
        limit.take(1)
    assert limit.wait_s(1) == pytest.approx(1.0)


def test_what_is_overdrawn_is_made_up_for(clock):
    limit = RateLimit(600)
    limit.take(6000)
    assert limit.wait_s(1) == pytest.approx(5401 / 10)
    clock.now_s += 540
    assert limit.wait_s(1) == pytest.approx(0.1)


def test_over_time_nobody_gets_more_than_the_rate(clock):
    limit, taken = RateLimit(1000), 0
    for _ in range(60 * 60):
        clock.now_s += 1
        if limit.wait_s(1) == 0:
            limit.take(777)
            taken += 777
    assert 1000 * 60 <= taken <= 1000 * 61 + 777


def test_a_new_rate_keeps_what_was_taken(clock):
    limit = RateLimit(10)
    for _ in range(10):
        limit.take(1)
    limit.change(12)
    assert limit.wait_s(2) == 0
    limit.change(5)
    assert limit.wait_s(1) > 0


def test_requests_per_minute_are_refused_with_the_time_to_come_back(clock):
    tenant = Tenant(name="a", requests_per_minute=3)
    admission = Admission(LimitOptions(), lambda: 8)
    for _ in range(3):
        admission.arrive(tenant).close()
    with pytest.raises(RateLimited, match="requests per minute") as refused:
        admission.arrive(tenant)
    assert refused.value.retry_after_s == pytest.approx(20.0)
    admission.arrive(EVERYBODY).close()  # others are served
    clock.now_s += 20
    admission.arrive(tenant).close()
    with pytest.raises(RateLimited):
        admission.arrive(tenant)


def test_tokens_count_when_they_are_known_and_then_keep_out(clock):
    tenant = Tenant(name="a", tokens_per_minute=100)
    admission = Admission(LimitOptions(), lambda: 8)
    admission.arrive(tenant).close()
    admission.spend(tenant, 250)
    with pytest.raises(RateLimited, match="tokens per minute") as refused:
        admission.arrive(tenant)
    assert refused.value.retry_after_s == pytest.approx(151 * 0.6)
    clock.now_s += 151 * 0.6 + 0.001
    admission.arrive(tenant).close()
    admission.spend(Tenant(name="b"), 10**9)
    admission.arrive(Tenant(name="b")).close()  # no limit, nothing to count


@pytest.mark.parametrize(("num_tokens", "used_up"), [(1000, "tokens"), (101, "requests")])
def test_who_comes_back_when_told_is_refused_for_no_other_rate(clock, num_tokens, used_up):
    tenant = Tenant(name="a", requests_per_minute=2, tokens_per_minute=100)
    admission = Admission(LimitOptions(), lambda: 1)
    for _ in range(2):
        admission.arrive(tenant).close()
    admission.spend(tenant, num_tokens)
    with pytest.raises(RateLimited, match=f"{used_up} per minute") as refused:
        admission.arrive(tenant)
    clock.now_s += refused.value.retry_after_s + 0.001
    admission.arrive(tenant)


def test_limits_that_change_while_the_proxy_runs_count_at_once(clock):
    admission = Admission(LimitOptions(), lambda: 8)
    ticket = admission.arrive(Tenant(name="a"))
    with pytest.raises(RateLimited, match="1 requests"):
        admission.arrive(Tenant(name="a", requests_max=1))
    ticket.close()
    admission.arrive(Tenant(name="a", requests_max=1)).close()
    admission.arrive(Tenant(name="a", tokens_per_minute=5)).close()
    admission.spend(Tenant(name="a", tokens_per_minute=5), 50)
    with pytest.raises(RateLimited):
        admission.arrive(Tenant(name="a", tokens_per_minute=5))
    admission.arrive(Tenant(name="a")).close()


def test_answers_that_began_before_a_change_count_by_the_limits_of_now(clock):
    """And do not bring the old ones back, of which the new ones would then be filled up anew."""
    old = Tenant(name="a", tokens_per_minute=1000)
    new = Tenant(name="a", tokens_per_minute=1000, requests_per_minute=3)
    admission = Admission(LimitOptions(), lambda: 8)
    begun = [admission.arrive(old) for _ in range(5)]
    for _ in range(3):
        admission.arrive(new).close()
    for ticket in begun:
        admission.spend(old, 10)
        ticket.close()
        with pytest.raises(RateLimited, match="requests per minute"):
            admission.arrive(new)
    clock.now_s += 60
    begun = admission.arrive(new)
    admission.spend(old, 100_000)
    with pytest.raises(RateLimited, match="tokens per minute"):
        admission.arrive(new)
    begun.close()


def test_the_guess_of_when_to_come_back_follows_what_ends_and_is_bounded(clock):
    rate = DrainRate()
    rate.begin()
    assert rate.wait_s(100) == WAIT_S_UNKNOWN
    for _ in range(1000):
        clock.now_s += 0.1
        rate.count()
    assert rate.wait_s(100) == pytest.approx(10.0, rel=0.02)
    assert rate.wait_s(1) == WAIT_S_MIN
    assert rate.wait_s(10**6) == WAIT_S_MAX
    clock.now_s += 25  # nothing ends any more: later
    assert 30 < rate.wait_s(50) <= WAIT_S_MAX
    clock.now_s += 1e9
    assert rate.wait_s(1) == WAIT_S_MAX


@pytest.mark.parametrize("num_ended", [1, 2, 20])
def test_the_guess_is_right_from_the_first_end_on_and_after_a_rest(clock, num_ended):
    rate = DrainRate()
    for rest_s in (0, 3600):
        clock.now_s += rest_s
        rate.begin()
        for _ in range(num_ended):
            clock.now_s += 1.5
            rate.count()
        assert rate.wait_s(4) == pytest.approx(6.0, rel=0.1)
        rate.rest()
        clock.now_s += 100
        assert rate.wait_s(4) == pytest.approx(6.0, rel=0.1)


def test_of_tenants_that_come_and_go_only_what_counts_is_kept(clock, monkeypatch):
    monkeypatch.setattr(admission_module, "ACCOUNTS_KEPT", 10)
    admission = Admission(LimitOptions(), lambda: 1)
    spent = Tenant(name="spent", requests_per_minute=1)
    admission.arrive(spent).close()
    running = Tenant(name="running", requests_max=1)
    admission.arrive(running)
    for number in range(1000):
        admission.arrive(Tenant(name=f"t{number}", tokens_per_minute=9)).close()
    assert len(admission._accounts) <= 10
    for tenant in (spent, running):
        with pytest.raises(RateLimited):
            admission.arrive(tenant)
    clock.now_s += 60
    admission.arrive(spent)
