"""What clients see, and what workers see, when a request does not end well."""

import asyncio
import contextlib
import json
import socket
from dataclasses import replace

import pytest
from key_files import write_key_file
from running_proxy import AT_ONCE, RunningProxy, read_events, until
from scripted_worker import finished, parked, play_prefill, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.wire import Failed
from neuron_di_proxy.key_file import KeyRecord, make_key

STREAM = {"model": "tiny", "prompt": "hi", "stream": True}


async def start_stream(cluster):
    """A streaming request of which token 0 has arrived, and its two legs at the workers."""
    opening = asyncio.create_task(cluster.proxy.http.post("/v1/completions", json=STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0), parked())
    response = await opening
    events = read_events(response)
    await anext(events)
    return response, events, prefill_leg, decode_leg


async def receipt_of(cluster, leg):
    """The receipt of a leg's request, once there is one."""
    status = 404
    while status == 404:
        status, receipt = await cluster.proxy.get(f"/v1/receipts/{leg.message.request_id}")
    return receipt


async def test_a_failure_after_the_first_byte_is_an_event_and_no_end(cluster):
    response, events, prefill_leg, decode_leg = await start_stream(cluster)
    decode_leg.hang_up()
    rest = [json.loads(event) async for event in events]
    assert [set(event) for event in rest] == [{"error"}]
    assert rest[0]["error"]["code"] == "peer_gone"
    assert rest[0]["error"]["type"] == "server_error"
    assert set(rest[0]["error"]) == {"message", "type", "param", "code"}
    await prefill_leg.closed.wait()
    assert (await receipt_of(cluster, decode_leg))["finish_reason"] == "error"
    response.close()


@pytest.mark.parametrize("line", [b"garbage\n", b'{"type":"token","index":7}\n'])
async def test_what_a_worker_says_wrongly_never_reaches_the_client(cluster, line):
    response, events, _, decode_leg = await start_stream(cluster)
    await decode_leg.send_bytes(line)
    [event] = [json.loads(event) async for event in events]
    assert event["error"]["code"] == "remote_protocol_error"
    await decode_leg.closed.wait()
    response.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_has_its_status(cluster, stream):
    asking = asyncio.create_task(
        cluster.proxy.post("/v1/completions", model="tiny", prompt="hi", stream=stream)
    )
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    prefill_leg.hang_up()
    status, body = await asking
    assert (status, body["error"]["code"]) == (502, "peer_gone")
    await decode_leg.closed.wait()


async def test_an_answer_that_fails_halfway_is_not_half_given(cluster):
    asking = asyncio.create_task(cluster.proxy.post("/v1/completions", model="tiny", prompt="hi"))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0), parked())
    await decode_leg.send(token(1))
    decode_leg.hang_up()
    status, body = await asking
    assert status == 502
    assert set(body) == {"error"}


async def test_a_client_that_leaves_its_stream_closes_both_legs(cluster):
    response, _, prefill_leg, decode_leg = await start_stream(cluster)
    response.close()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()
    receipt = await receipt_of(cluster, decode_leg)
    assert (receipt["finish_reason"], receipt["num_generated"]) == ("cancelled", 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_byte_closes_both_legs(cluster, stream):
    asking = asyncio.create_task(
        cluster.proxy.post("/v1/completions", model="tiny", prompt="hi", stream=stream)
    )
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    asking.cancel()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()
    assert (await receipt_of(cluster, decode_leg))["num_generated"] == 0


async def test_no_workers(cluster):
    cluster.proxy.directory.records.clear()
    async with cluster.proxy.http.post("/v1/completions", json=STREAM) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) > 0
        assert "no prefill and no decode worker" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"\xff", b'{"model": 1}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_bad_body(playing, path, body):
    async with playing.proxy.http.post(path, data=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["type"] == "invalid_request_error"
    assert playing.prefill.legs == []


async def test_a_body_beyond_the_limit(cluster, stack):
    config = ProxyOptions(front=FrontOptions(body_bytes_max=2000), limits=AT_ONCE)
    proxy = await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))

    async def drip():
        for _ in range(100):
            yield b" " * 100

    for body in (b"x" * 2001, drip()):
        async with proxy.http.post("/v1/completions", data=body) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("OPTIONS", "/health", 405),
        ("GET", "/static/../app.py", 404),
    ],
)
async def test_paths_and_methods_that_are_not_there(playing, method, path, status):
    async with playing.proxy.http.request(method, path) as response:
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert response.headers["X-Request-Id"]


async def test_who_asks_for_a_path_that_is_not_there_is_told_where_to_look(playing):
    async with playing.proxy.http.post("/v1/embeddings", json={}) as response:
        assert response.status == 404
        assert "/openapi.json" in (await response.json())["error"]["message"]


async def test_a_bug_of_ours_tells_the_client_nothing_of_itself(playing, caplog):
    def fail():
        raise RuntimeError("secret path /etc/x")

    playing.proxy.directory.workers = fail
    status, body = await playing.proxy.post("/v1/completions", model="tiny", prompt="hi")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in body["error"]["message"]
    assert "secret" in caplog.text


async def test_more_requests_than_the_limit_are_refused_and_places_come_back(cluster, stack):
    config = ProxyOptions(limits=replace(AT_ONCE, requests_max=1))
    proxy = await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))
    opening = asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    async with proxy.http.post("/v1/completions", json=STREAM) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        assert (await response.json())["error"]["code"] == "over_capacity"
    await prefill_leg.finish(token(0), finished(1))
    async with await opening as response:
        await response.read()
    await decode_leg.closed.wait()
    again = asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM))
    assert await cluster.prefill.next_leg()
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_hundred_clients_that_leave_free_every_place(cluster, stack):
    proxy = await stack.enter_async_context(
        RunningProxy(
            ProxyOptions(limits=replace(AT_ONCE, requests_max=100)), cluster.proxy.directory.records
        )
    )
    clients = [
        asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM)) for _ in range(100)
    ]
    legs = [await cluster.prefill.next_leg() for _ in clients]
    legs += [await cluster.decode.next_leg() for _ in clients]
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    for leg in legs:
        await leg.closed.wait()
    while await proxy.num_running():
        pass


async def test_a_client_that_never_reads_loses_its_place(cluster, stack, monkeypatch):
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)  # which ends it as well

    async def flood(leg):
        index = 0
        while True:
            index += 1
            await leg.send(token(index, "x" * 100_000))

    cluster.prefill.script, cluster.decode.script = play_prefill, flood
    config = ProxyOptions(limits=replace(AT_ONCE, send_timeout_s=0.5))
    proxy = await stack.enter_async_context(RunningProxy(config, cluster.proxy.directory.records))
    _, writer = await asyncio.open_connection(*proxy.address, limit=1)
    stack.callback(writer.close)
    body = json.dumps(STREAM).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    leg = await cluster.decode.next_leg()
    await leg.closed.wait()
    while await proxy.num_running():
        pass


async def test_logs_hold_no_prompt_and_no_text(playing, caplog):
    caplog.set_level("DEBUG")
    await playing.proxy.post("/v1/completions", model="tiny", prompt="canary-prompt", seed=1)
    logged = str([vars(record) for record in caplog.records])
    assert "request_end" in logged
    assert "canary-prompt" not in logged
    assert "Once" not in logged


def logged(caplog, event):
    """The fields of each event of that name."""
    found = [getattr(record, "event_fields", {}) for record in caplog.records]
    return [fields for fields in found if fields.get("event") == event]


async def test_a_prompt_counts_although_its_client_leaves(cluster):
    response, _, prefill_leg, decode_leg = await start_stream(cluster)
    response.close()
    await decode_leg.closed.wait()
    receipt = await receipt_of(cluster, prefill_leg)
    assert (receipt["finish_reason"], receipt["num_prompt"]) == ("cancelled", 5)
    assert receipt["num_generated"] == 1


@contextlib.asynccontextmanager
async def proxy_with_rate(cluster, tmp_path, tokens_per_minute):
    """A second proxy of the cluster, whose only key has a rate; `http` uses the key."""
    key_id, text, digest = make_key()
    path = tmp_path / "keys.toml"
    record = KeyRecord(tenant="t", sha256=digest, tokens_per_minute=tokens_per_minute)
    write_key_file(path, {key_id: record})
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    async with RunningProxy(config, cluster.proxy.directory.records) as proxy:
        proxy.http.headers["Authorization"] = f"Bearer {text}"
        yield proxy


async def test_a_prompt_counts_against_its_tenants_rate_although_its_client_leaves(
    cluster, stack, tmp_path
):
    # The prompt has 5 tokens: with token 0 it is more than a minute's, without it is not.
    proxy = await stack.enter_async_context(proxy_with_rate(cluster, tmp_path, 3))
    opening = asyncio.create_task(proxy.http.post("/v1/completions", json=STREAM))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0), parked())
    response = await opening
    await anext(read_events(response))
    response.close()
    await decode_leg.closed.wait()

    async def is_counted():
        return (await proxy.post("/v1/completions", **STREAM | {"model": "x"}))[0] == 429

    await until(is_counted)


async def test_a_prompt_counts_by_its_bytes_for_who_leaves_before_its_tokens_are_known(
    cluster, stack, tmp_path
):
    proxy = await stack.enter_async_context(proxy_with_rate(cluster, tmp_path, 600))
    wanted = STREAM | {"prompt": "four" * 1000}
    opening = asyncio.create_task(proxy.http.post("/v1/completions", json=wanted))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    opening.cancel()
    await prefill_leg.closed.wait()
    await decode_leg.closed.wait()

    async def is_counted():
        return (await proxy.post("/v1/completions", **STREAM | {"model": "x"}))[0] == 429

    await until(is_counted)


async def test_a_failed_request_is_logged_once_with_what_its_client_is_not_told(cluster, caplog):
    response, events, _, decode_leg = await start_stream(cluster)
    failed = Failed(
        code="kv_error", message="no KV at 10.1.2.3:7000", http_status=502, retryable=False
    )
    await decode_leg.finish(failed)
    [event] = [json.loads(event) async for event in events]
    assert event["error"]["message"] == "no KV at (hidden)"
    [fields] = logged(caplog, "request_failed")
    assert fields == {
        "event": "request_failed",
        "request": decode_leg.message.request_id,
        "code": "kv_error",
        "reason": "no KV at 10.1.2.3:7000",
    }
    assert len(logged(caplog, "attempt_failed")) == 1
    response.close()


async def test_a_client_brings_no_lines_about_by_requests_that_a_worker_refuses(cluster, caplog):
    asking = asyncio.create_task(cluster.proxy.post("/v1/completions", model="tiny", prompt="hi"))
    leg = await cluster.prefill.next_leg()
    failed = Failed(
        code="invalid_request", message="no", http_status=400, retryable=False, fault="client"
    )
    await leg.finish(failed)
    assert (await asking)[0] == 400
    assert logged(caplog, "attempt_failed") == []
    assert logged(caplog, "request_failed") == []


async def test_all_choices_of_a_request_fail_as_one(cluster, caplog):
    asking = asyncio.create_task(
        cluster.proxy.post("/v1/completions", model="tiny", prompt="hi", n=2)
    )
    legs = [await cluster.prefill.next_leg() for _ in range(2)]
    for leg in legs:
        leg.hang_up()
    assert (await asking)[0] == 502
    assert len(logged(caplog, "request_failed")) == 1


async def test_what_is_the_clients_fault_is_not_logged_as_a_failure(playing, caplog):
    for fields in ({"n": 0}, {"model": "other"}):
        body = {"model": "tiny", "prompt": "hi"} | fields
        status, _ = await playing.proxy.post("/v1/completions", **body)
        assert status < 500
    assert logged(caplog, "request_failed") == []


async def test_a_model_whose_workers_are_gone_is_named_in_the_log(playing, caplog):
    await playing.proxy.get("/v1/models")
    playing.proxy.directory.records.clear()
    assert (await playing.proxy.post("/v1/completions", model="tiny", prompt="hi"))[0] == 503
    [fields] = logged(caplog, "request_failed")
    assert "'tiny'" in fields["reason"]


async def test_a_name_that_only_the_client_knows_is_not_logged(stack, caplog):
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=AT_ONCE), []))
    status, _ = await proxy.post("/v1/completions", model="secret 'name'", prompt="hi")
    assert status == 503
    [fields] = logged(caplog, "request_failed")
    assert fields["code"] == "over_capacity"
    assert "(hidden)" in fields["reason"]
    assert "secret" not in str([vars(record) for record in caplog.records])
