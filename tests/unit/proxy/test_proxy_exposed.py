"""The proxy with keys, over HTTP, on both ways in: what strangers and tenants are told."""

import asyncio
import json
import logging

import aiohttp
import pytest
from h2_client import H2Client
from key_files import write_key_file
from raw_http import RawClient, get
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import ScriptedWorker, finished, play_decode, play_prefill, token

from neuron_di.config import FrontOptions, LimitOptions, ProxyOptions
from neuron_di_proxy.key_file import KeyRecord, make_key, read_key_file

BODY = {"model": "tiny", "prompt": "Once", "max_tokens": 5}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "max_tokens": 5}
CLOSED = [
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/tokenize", BODY),
    ("POST", "/detokenize", BODY),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/receipts/x", None),
    ("GET", "/version", None),
    ("GET", "/load", None),
    ("GET", "/openapi.json", None),
    ("GET", "/status", None),
    ("GET", "/metrics", None),
    ("GET", "/v1/completions", None),
    ("PUT", "/v1/completions", BODY),
    ("GET", "/debug", None),
    ("GET", "/", None),
    ("GET", "/health/../metrics", None),
    ("GET", "/health%2f..%2fmetrics", None),
]


def record_key(path, tenant, **fields):
    keys = read_key_file(path) if path.exists() else {}
    key_id, text, digest = make_key()
    write_key_file(path, keys | {key_id: KeyRecord(tenant=tenant, sha256=digest, **fields)})
    return {"Authorization": f"Bearer {text}"}


class Exposed:
    """A proxy with keys before one prefill and one decode worker."""

    def __init__(self, prefill, decode, proxy, keys):
        self.prefill, self.decode, self.proxy, self.keys = prefill, decode, proxy, keys

    async def ask(self, method="POST", path="/v1/completions", body=BODY, headers=None):
        """(status, headers, document or None)."""
        async with self.proxy.http.request(
            method, aiohttp.client.URL(path, encoded=True), json=body, headers=headers
        ) as response:
            text = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, response.headers, json.loads(text) if is_json else None


@pytest.fixture
async def exposed(stack, tmp_path):
    path = tmp_path / "keys.toml"
    keys = {
        "alice": record_key(path, "alice", max_tokens=20),
        "one": record_key(path, "one", requests_max=1),
        "few": record_key(path, "few", requests_per_minute=2),
        "op": record_key(path, "op", operator=True),
    }
    prefill = await stack.enter_async_context(ScriptedWorker("p1", "prefill"))
    decode = await stack.enter_async_context(ScriptedWorker("d1", "decode"))
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    proxy = await stack.enter_async_context(RunningProxy(config, [prefill.record, decode.record]))
    prefill.script, decode.script = play_prefill, play_decode(5)
    return Exposed(prefill, decode, proxy, keys)


@pytest.mark.parametrize(("method", "path", "body"), CLOSED)
async def test_b23_every_route_needs_a_key(exposed, method, path, body):
    bad = dict(exposed.keys["alice"])
    bad["Authorization"] = bad["Authorization"][:-1] + "!"
    for headers in (None, bad, {"Authorization": "Basic YTpi"}, {"X-Api-Key": "ndi-x"}):
        status, answered, document = await exposed.ask(method, path, body, headers)
        assert status == 401, path
        assert answered["WWW-Authenticate"] == "Bearer"
        assert set(document["error"]) == {"message", "type", "param", "code"}
        assert document["error"]["code"] == "invalid_api_key"
    assert exposed.prefill.legs == []


@pytest.mark.parametrize("path", ["/health", "/live", "/ping", "/ready"])
async def test_what_a_load_balancer_asks_is_open(exposed, path):
    assert (await exposed.ask("GET", path, None))[0] == 200


async def test_a_key_lets_in_and_only_an_operators_sees_all(exposed):
    assert (await exposed.ask(headers=exposed.keys["alice"]))[0] == 200
    for path in ("/status", "/metrics"):
        status, _, document = await exposed.ask("GET", path, None, exposed.keys["alice"])
        assert (status, document["error"]["code"]) == (403, "permission_denied")
        assert (await exposed.ask("GET", path, None, exposed.keys["op"]))[0] == 200


async def test_a_tenants_longest_answer(exposed):
    headers = exposed.keys["alice"]
    status, _, document = await exposed.ask(body=BODY | {"max_tokens": 21}, headers=headers)
    assert (status, document["error"]["param"]) == (400, "max_tokens")
    chat = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    long = chat | {"max_completion_tokens": 21}
    status, _, document = await exposed.ask("POST", "/v1/chat/completions", long, headers)
    assert (status, document["error"]["param"]) == (400, "max_completion_tokens")
    assert (await exposed.ask("POST", "/v1/chat/completions", chat, headers))[0] == 200
    assert [leg.message.sampling.max_tokens for leg in exposed.prefill.legs] == [20]


@pytest.mark.parametrize("most", [3, 4000])
async def test_a_tenants_limit_cuts_what_nobody_asked_for(stack, tmp_path, most):
    path = tmp_path / "keys.toml"
    headers = record_key(path, "carl", max_tokens=most)
    worker = await stack.enter_async_context(ScriptedWorker("b1", "both"))
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    proxy = await stack.enter_async_context(RunningProxy(config, [worker.record]))
    exposed = Exposed(worker, worker, proxy, {})
    worker.script = play_both
    for each in ("/v1/completions", BODY), ("/v1/chat/completions", CHAT):
        body = {name: value for name, value in each[1].items() if name != "max_tokens"}
        assert (await exposed.ask("POST", each[0], body, headers))[0] == 200
    completion, chat = [leg.message.sampling for leg in worker.legs]
    assert (completion.max_tokens, completion.fits_context) == (min(16, most), True)
    assert (chat.max_tokens, chat.fits_context) == (most, True)


async def play_both(leg):
    await leg.send(token(0))
    await leg.send(finished(1))


async def test_a_receipt_is_its_tenants_and_operators(exposed):
    status, _, document = await exposed.ask(headers=exposed.keys["alice"])
    assert status == 200
    path = f"/v1/receipts/{document['id']}"
    seen = {}
    for name in ("alice", "one", "op"):
        status, _, answered = await exposed.ask("GET", path, None, exposed.keys[name])
        seen[name] = status
        assert status == 404 or answered["tenant"] == "alice"
    assert seen == {"alice": 200, "one": 404, "op": 200}


async def test_tokenising_takes_a_tenants_turn_too_and_is_counted_where_it_may_not(exposed):
    body = {"model": "tiny", "prompt": "hi"}
    statuses = [
        (await exposed.ask("POST", "/tokenize", body, exposed.keys["few"]))[0] for _ in range(3)
    ]
    assert statuses[2] == 429
    assert 429 not in statuses[:2]
    async with exposed.proxy.http.get("/metrics", headers=exposed.keys["op"]) as response:
        assert 'neuron_di_tenant_limited_total{tenant="few"} 1.0' in await response.text()


async def test_what_all_routes_say(exposed):
    headers = exposed.keys["alice"] | {"X-Request-Id": "mine"}
    for path in ("/version", "/v1/models", "/v1/nothing"):
        _, answered, _ = await exposed.ask("GET", path, None, headers)
        assert answered.getall("X-Request-Id") == ["mine"]
    status, answered, _ = await exposed.ask("GET", "/v1/completions", None, headers)
    assert (status, answered["Allow"]) == (405, "POST")
    status, _, document = await exposed.ask("GET", "/load", None, headers)
    assert (status, document) == (200, {"server_load": 0})


async def test_a_tenants_share_is_429_and_says_when_to_come_back(exposed):
    headers = exposed.keys["few"]
    for _ in range(2):
        assert (await exposed.ask(headers=headers))[0] == 200
    status, answered, document = await exposed.ask(headers=headers)
    assert (status, document["error"]["type"]) == (429, "rate_limit_error")
    assert document["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answered["Retry-After"]) <= 60
    assert (await exposed.ask(headers=exposed.keys["alice"]))[0] == 200


async def test_a_tenant_with_all_its_requests_open_does_not_keep_others_out(exposed):
    exposed.decode.script = None
    first = asyncio.create_task(exposed.ask(headers=exposed.keys["one"]))
    leg = await exposed.decode.next_leg()
    status, answered, _ = await exposed.ask(headers=exposed.keys["one"])
    assert (status, "Retry-After" in answered) == (429, True)
    other = asyncio.create_task(exposed.ask(headers=exposed.keys["alice"]))
    for each in (leg, await exposed.decode.next_leg()):
        await play_decode(5)(each)
    assert [(await task)[0] for task in (first, other)] == [200, 200]
    exposed.decode.script = play_decode(5)
    assert (await exposed.ask(headers=exposed.keys["one"]))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Prefiller-Host-Port": "169.254.169.254:80"},
        {"X-Decoder-Host-Port": "127.0.0.1:1"},
        {"X-Data-Parallel-Host-Port": "127.0.0.1:1"},
        {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Host": "evil", "X-Forwarded-Proto": "https"},
        {"Forwarded": "for=127.0.0.1;host=evil;proto=https"},
        {"X-Real-Ip": "127.0.0.1", "X-Original-Url": "/health", "X-Rewrite-Url": "/health"},
        {"X-Http-Method-Override": "GET"},
        {"X-Forwarded-User": "op", "X-Tenant": "op", "X-Forwarded-Access-Token": "x"},
        {"Host": "169.254.169.254"},
    ],
    ids=lambda headers: next(iter(headers)),
)
async def test_b17_headers_that_name_places_or_people_mean_nothing(exposed, headers):
    status, _, plain = await exposed.ask(headers=exposed.keys["alice"])
    assert status == 200
    status, answered, document = await exposed.ask(headers=exposed.keys["alice"] | headers)
    assert status == 200
    assert document["choices"] == plain["choices"]
    assert "169.254" not in str(answered)
    assert (await exposed.ask(headers=headers))[0] == 401
    assert (await exposed.ask("GET", "/metrics", None, exposed.keys["alice"] | headers))[0] == 403


async def test_b17_an_absolute_address_is_a_path_and_leads_nowhere(exposed):
    reader, writer = await asyncio.open_connection(*exposed.proxy.address)
    writer.write(b"GET http://169.254.169.254/health HTTP/1.1\r\nHost: evil\r\n\r\n")
    line = await asyncio.wait_for(reader.readline(), 30)
    assert line.split()[1] in (b"200", b"400", b"401", b"404")
    writer.close()
    await writer.wait_closed()
    assert exposed.prefill.legs == []


async def test_b18_a_clients_id_is_echoed_and_used_for_nothing(exposed):
    """The same id, from two tenants at once: two requests that know nothing of each other."""
    exposed.decode.script = None
    asked = [
        asyncio.create_task(exposed.ask(headers=exposed.keys[name] | {"X-Request-Id": "mine"}))
        for name in ("alice", "op", "alice")
    ]
    legs = [await exposed.decode.next_leg() for _ in asked]
    ids = {leg.message.request_id for leg in legs}
    assert len(ids) == 3
    assert not any("mine" in each for each in ids)
    for leg in legs:
        await play_decode(5)(leg)
    for status, answered, document in await asyncio.gather(*asked):
        assert (status, answered["X-Request-Id"]) == (200, "mine")
        assert "mine" not in document["id"]
    status, _, _ = await exposed.ask("GET", "/v1/receipts/mine", None, exposed.keys["op"])
    assert status == 404


async def test_keys_are_never_logged_or_answered(exposed, caplog):
    """B53, the proxy's part: right and wrong keys, good and bad requests, at debug."""
    with caplog.at_level(logging.DEBUG):
        texts = []
        for name in ("alice", "few", "one"):
            good = exposed.keys[name]
            wrong = {"Authorization": good["Authorization"].swapcase()}
            for headers in (good, wrong, {"Authorization": f"Basic {good['Authorization']}"}):
                for body in (BODY, {"model": "tiny"}, BODY | {"n": 999}):
                    _, answered, document = await exposed.ask(body=body, headers=headers)
                    texts.append(f"{answered} {document}")
        async with exposed.proxy.http.get("/metrics", headers=exposed.keys["op"]) as response:
            texts.append(await response.text())
    logged = "\n".join(str(vars(record)) for record in caplog.records)
    assert "request_end" in logged
    for headers in exposed.keys.values():
        secret = headers["Authorization"].split("-", 2)[2]
        for secret_text in (secret, secret.swapcase()):
            assert secret_text not in logged
            assert not any(secret_text in text for text in texts)


async def test_overload_is_answered_and_nothing_is_left(stack):
    """Three times what can run: each is answered with 200 or 503, at once or in its turn."""
    prefill = await stack.enter_async_context(ScriptedWorker("p1", "prefill"))
    decode = await stack.enter_async_context(ScriptedWorker("d1", "decode"))
    limits = LimitOptions(requests_max=4, queue_max=8, drain_timeout_s=2)
    proxy = await stack.enter_async_context(
        RunningProxy(ProxyOptions(limits=limits), [prefill.record, decode.record])
    )
    prefill.script = play_prefill
    running = []

    async def count(leg):
        running.append(leg)
        most.append(len(running))
        await asyncio.sleep(0.01)
        await play_decode(5)(leg)
        running.remove(leg)

    most = []
    decode.script = count
    asked = [proxy.post("/v1/completions", **BODY) for _ in range(36)]
    answers = await asyncio.gather(*asked)
    statuses = [status for status, _ in answers]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) >= 12
    assert max(most) <= 4
    for status, document in answers:
        if status == 503:
            assert document["error"]["code"] == "over_capacity"
    assert await proxy.num_running() == 0
    assert (await proxy.post("/v1/completions", **BODY))[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [("/live", 200), ("//live", 200), ("/%6cive", 200), ("//metrics", 401), ("/%6detrics", 401)],
)
async def test_however_a_route_is_written_it_asks_for_as_much_of_a_key(exposed, path, status):
    """Over HTTP/1.1 as over HTTP/2."""
    async with RawClient(exposed.proxy.address) as raw, RawClient(exposed.proxy.address) as other:
        raw.send(get(path))
        assert (await raw.response()).status == status
        client = H2Client(other)
        client.ask(1, path)
        await client.until_over(1)
        assert client.statuses == {1: status}


async def test_what_is_refused_to_head_has_no_body(exposed):
    """It would be taken for the beginning of the next response."""
    async with RawClient(exposed.proxy.address) as raw:
        raw.send(get("/metrics").replace(b"GET", b"HEAD") + get("/live"))
        status_line, headers = await raw.read_head()
        assert status_line.split()[1] == "401"
        assert int(dict(headers)["content-length"]) > 0
        assert (await raw.response()).status == 200
