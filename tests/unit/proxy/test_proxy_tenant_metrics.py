"""What each tenant took, and was refused, is counted by its name."""

import asyncio

import pytest
from metric_samples import parse
from running_proxy import AT_ONCE, ListDirectory
from scripted_worker import finished, make_record

from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di.errors import RateLimited
from neuron_di.types import RequestId
from neuron_di_proxy import tenant_metrics
from neuron_di_proxy.quart_reply import QuartReply
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.service import Service
from neuron_di_proxy.tenant import EVERYBODY, Tenant

A = Tenant(name="a", requests_per_minute=1)


def receipt_of(tenant):
    record = RequestRecord(request_id=RequestId("r"), model="tiny", tenant=tenant)
    record.finished = finished(3)
    return record.seal("length")


@pytest.fixture
def service():
    return Service(ProxyOptions(limits=AT_ONCE), ListDirectory([]))


def of_tenants(service):
    seen = parse(service.metrics.text().decode())
    return {
        key: value
        for key, value in seen.items()
        if key[0].startswith("neuron_di_tenant_") and value
    }


def test_choices_and_tokens_are_counted(service):
    receipt = receipt_of("a")
    for _ in range(2):
        service.metrics.count(receipt, None)
    service.metrics.count(receipt_of(EVERYBODY.name), None)
    assert of_tenants(service) == {
        ("neuron_di_tenant_choices_total", "a", "length"): 2,
        ("neuron_di_tenant_tokens_total", "a", "prompt"): 2 * receipt.num_prompt,
        ("neuron_di_tenant_tokens_total", "a", "generated"): 6,
    }


def test_what_a_known_tenant_has_not_met_yet_is_there_as_zero(service):
    """Or a monitoring system sees no increase when it does for the first time."""
    service.metrics.count(receipt_of("a"), None)
    seen = parse(service.metrics.text().decode())
    assert seen["neuron_di_tenant_limited_total", "a"] == 0
    assert seen["neuron_di_tenant_choices_total", "a", "error"] == 0


def test_what_a_limit_refuses_is_counted(service, monkeypatch):
    monkeypatch.setattr(service.keys, "tenant_of", lambda _: A)
    service.open("chat", {}).close()
    for _ in range(3):
        with pytest.raises(RateLimited):
            service.open("chat", {})
    assert of_tenants(service) == {("neuron_di_tenant_limited_total", "a"): 3}


async def test_who_leaves_before_its_turn_is_counted(monkeypatch):
    limits = LimitOptions(requests_max=1)
    directory = ListDirectory([make_record("p1", "prefill")])  # of the request's model
    service = Service(ProxyOptions(limits=limits), directory)
    monkeypatch.setattr(service.keys, "tenant_of", lambda _: Tenant(name="b"))
    runs = service.admission.arrive(A)
    assert service.admission.start_at_once(runs)
    waits = service.open("completions", {})
    body = b'{"model":"tiny","prompt":"hi","n":2}'
    waiting = asyncio.create_task(waits.answer(body, QuartReply(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert of_tenants(service) == {("neuron_di_tenant_choices_total", "b", "cancelled"): 2}


def test_tenants_beyond_the_bound_are_one(service, monkeypatch):
    monkeypatch.setattr(tenant_metrics, "TENANTS_MAX", 2)
    for name in ("a", "b", "c", "d", "a"):
        service.metrics.tenants.count_limited(name)
    assert of_tenants(service) == {
        ("neuron_di_tenant_limited_total", "a"): 2,
        ("neuron_di_tenant_limited_total", "b"): 1,
        ("neuron_di_tenant_limited_total", "other"): 2,
    }
