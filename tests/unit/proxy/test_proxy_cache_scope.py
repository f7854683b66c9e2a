"""Which requests may share KV: those of one tenant, by whichever key, process and attempt."""

import msgspec
import pytest
from key_files import write_key_file
from raw_http import RawClient, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, play_prefill, token
from virtual_cluster import REQUEST, VirtualCluster, VirtualWorker, fail_with, two_by_two
from virtual_time import virtual

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.errors import PeerGone
from neuron_di.wire import PrefillLeg
from neuron_di_proxy.key_file import KeyRecord, make_key
from neuron_di_proxy.keys import Keys
from neuron_di_proxy.tenant import EVERYBODY, Tenant

PLAIN = {"model": "tiny", "prompt": "hi"}
ROUTES = {
    "/v1/completions": PLAIN,
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
}
LONGEST_NAME = "n" * 64


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.toml"


def write_keys(path, *tenants):
    """The texts of keys, one per name."""
    made = [(make_key(), tenant) for tenant in tenants]
    write_key_file(
        path,
        {key_id: KeyRecord(tenant=name, sha256=digest) for (key_id, _, digest), name in made},
    )
    return [text for (_, text, _), _ in made]


async def start_proxy(stack, cluster, path, *, takes_hot=True):
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    records = [cluster.prefill.record, cluster.decode.record]
    return await stack.enter_async_context(RunningProxy(config, records, takes_hot=takes_hot))


async def ask(proxy, key, route="/v1/completions", **changes):
    async with RawClient(proxy.address) as raw:
        raw.send(post(route, ROUTES[route] | changes, f"Authorization: Bearer {key}"))
        response = await raw.response()
    assert response.status == 200, response.body


def scopes_of(cluster):
    """Of the legs since it was last asked."""
    scopes = [leg.message.cache_scope for leg in cluster.prefill.legs]
    cluster.prefill.legs.clear()
    return scopes


@pytest.mark.parametrize("route", ROUTES)
async def test_a_leg_has_its_tenants_scope_though_the_bodies_are_equal(playing, stack, path, route):
    alice, again, bob, long = write_keys(path, "alice", "alice", "bob", LONGEST_NAME)
    proxies = [await start_proxy(stack, playing, path) for _ in range(2)]
    proxies.append(await start_proxy(stack, playing, path, takes_hot=False))
    for proxy in proxies:
        for key in (alice, again, bob, alice, long):
            await ask(proxy, key, route)
        assert scopes_of(playing) == ["alice", "alice", "bob", "alice", LONGEST_NAME]


async def test_all_choices_of_a_request_have_the_scope(playing, stack, path):
    [alice] = write_keys(path, "alice")
    proxy = await start_proxy(stack, playing, path)
    await ask(proxy, alice, prompt=["hi", "ho"], n=2)
    assert scopes_of(playing) == ["alice"] * 4


async def test_where_no_keys_are_set_the_scope_is_empty(playing):
    for headers in ({}, {"Authorization": "Bearer ndi-0123456789ab-" + "x" * 43}):
        async with playing.proxy.http.post(
            "/v1/completions", json=PLAIN, headers=headers
        ) as response:
            assert response.status == 200
    assert scopes_of(playing) == ["", ""]


async def test_nobody_chooses_a_scope(playing, stack, path):
    [alice] = write_keys(path, "alice")
    proxy = await start_proxy(stack, playing, path)
    for field in ("cache_salt", "cache_scope"):
        async with RawClient(proxy.address) as raw:
            body = PLAIN | {field: "bob"}
            raw.send(post("/v1/completions", body, f"Authorization: Bearer {alice}"))
            response = await raw.response()
        assert (response.status, response.error["param"]) == (400, field)
    assert scopes_of(playing) == []


def test_no_tenant_has_the_scope_of_those_without_keys(path):
    [key] = write_keys(path, EVERYBODY.name)
    header = f"Bearer {key}"
    assert Keys(None).tenant_of(header).cache_scope == ""
    assert [Keys(str(path), n).tenant_of(header).cache_scope for n in (1, 3)] == ["everybody"] * 2


def test_limits_change_no_scope():
    tenant = Tenant(name="alice", weight=2.0, requests_max=7, is_operator=True)
    assert tenant.cache_scope == tenant.part(3).cache_scope == "alice"


ALICES = msgspec.structs.replace(REQUEST, cache_scope="alice")


def prompt_legs(cluster):
    return [leg.message for leg in cluster.legs if isinstance(leg.message, PrefillLeg)]


@pytest.mark.parametrize("num_given", [0, 3])
@virtual
async def test_every_attempt_has_the_scope(num_given):
    """Also one that goes on where another stood, on other workers."""
    async with two_by_two() as cluster:
        cluster.workers["d1"].script = fail_with(PeerGone("gone"), after=num_given)
        asked = await cluster.ask(request=ALICES)
        assert asked.is_complete
        legs = [(leg.attempt, leg.cache_scope) for leg in prompt_legs(cluster)]
        assert legs == [(0, "alice"), (1, "alice")]


@virtual
async def test_a_worker_that_does_both_gets_the_scope():
    async with VirtualCluster(VirtualWorker("b1", "both")) as cluster:
        assert (await cluster.ask(request=ALICES)).is_complete
        assert [leg.cache_scope for leg in prompt_legs(cluster)] == ["alice"]


async def test_no_log_has_it_but_as_the_tenants_name(cluster, stack, path, caplog):
    """Also where an attempt fails."""
    caplog.set_level("DEBUG")
    [key] = write_keys(path, "canary-tenant")
    proxy = await start_proxy(stack, cluster, path)
    async with RawClient(proxy.address) as raw:
        for fails in (False, True):
            raw.send(post("/v1/completions", PLAIN, f"Authorization: Bearer {key}"))
            prefill_leg, decode_leg = (
                await cluster.prefill.next_leg(),
                await cluster.decode.next_leg(),
            )
            assert prefill_leg.message.cache_scope == "canary-tenant"
            if fails:
                await prefill_leg.break_off()
            else:
                await play_prefill(prefill_leg)
                await decode_leg.finish(token(1), finished(2))
            assert (await raw.response()).status == (500 if fails else 200)
    fields = [dict(getattr(record, "event_fields", {})) for record in caplog.records]
    ends = [each.pop("tenant") for each in fields if each.get("event") == "request_end"]
    assert ends == ["canary-tenant"] * 2
    assert "attempt_failed" in {each.get("event") for each in fields}
    logged = [vars(record) | {"event_fields": None} for record in caplog.records]
    assert "canary-tenant" not in str(fields) + str(logged)
