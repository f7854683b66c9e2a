"""Whichever request came before, whichever way it came: one set of rules reads every head."""

import asyncio
import json

import h2.config
import h2.connection
import h2.events
import pytest
from key_files import write_key_file
from raw_http import RawClient, get, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, play_prefill, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy.app import create_app
from neuron_di_proxy.key_file import KeyRecord, make_key
from neuron_di_proxy.service import Service

PATH = "/v1/completions"
WHOLE = {"model": "tiny", "prompt": "hi"}
BODY = json.dumps(WHOLE).encode()
LENGTH = f"Content-Length: {len(BODY)}\r\n".encode()


def head(*lines: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + b"".join(lines) + b"\r\n" + BODY


TWO_WAYS = {
    "length and coding": head(LENGTH, b"Transfer-Encoding: chunked\r\n"),
    "list of lengths": head(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY))),
    "bare line end": head(b"X: y\n", LENGTH),
    "folded": head(LENGTH, b"X: y\r\n z\r\n"),
    "two ids": head(LENGTH, b"X-Request-Id: a\r\nX-Request-Id: b\r\n"),
    "two keys": head(LENGTH, b"Authorization: a\r\nAuthorization: b\r\n"),
    "thousand headers": head(LENGTH, b"X: y\r\n" * 1000),
}


def has_all_keys(body: bytes) -> bool:
    return set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("case", TWO_WAYS)
async def test_a_connection_that_had_another_request_is_read_as_strictly(playing, case):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(get("/version"))
        assert (await raw.response()).status == 200
        raw.send(TWO_WAYS[case])
        response = await raw.response()
        assert response.status == (431 if case == "thousand headers" else 400)
        assert has_all_keys(response.body)
        assert await raw.end() == b""


@pytest.mark.parametrize("line", ["X: " + "y" * 70_000, "Transfer-Encoding: gzip"])
async def test_what_is_refused_after_another_request_says_why(playing, line):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(get("/version"))
        assert (await raw.response()).status == 200
        raw.send(get("/health", line))
        assert has_all_keys((await raw.response()).body)


async def test_head_has_the_headers_of_get_and_no_body(playing):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(b"HEAD /version HTTP/1.1\r\nHost: a\r\n\r\n" + get("/version"))
        _, headers = await raw.read_head()
        whole = await raw.response()
    assert dict(headers)["content-length"] == str(len(whole.body))
    assert "version" in json.loads(whole.body)


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
async def test_nothing_is_upgraded(playing, upgrade, caplog):
    lines = ["Connection: Upgrade", f"Upgrade: {upgrade}", "Sec-WebSocket-Version: 13"]
    lines.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    async with RawClient(playing.proxy.address) as raw:
        raw.send(get("/nothing", *lines))
        response = await raw.response()
        assert (response.status, has_all_keys(response.body)) == (404, True)
        raw.send(get("/version", *lines))
        assert (await raw.response()).status == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_of_another_route_is_bounded_and_a_key_is_asked_for_first(
    playing, stack, tmp_path
):
    key_id, _, digest = make_key()
    path = tmp_path / "keys.toml"
    write_key_file(path, {key_id: KeyRecord(tenant="t", sha256=digest)})
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(api_keys=str(path)))
    proxy = await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))
    async with RawClient(proxy.address) as raw:
        raw.send(post("/tokenize", b"x" * 1000)[:-1000])  # its body never comes
        assert (await raw.response()).status == 401


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_long_text_is_not_tokenised(playing, path):
    body = json.dumps(WHOLE | {"prompt": "x" * (1 << 20)}).encode()
    async with RawClient(playing.proxy.address) as raw:
        raw.send(post(path, body))
        response = await raw.response()
    assert (response.status, response.error["code"]) == (413, "request_too_large")


async def test_a_drain_refuses_to_tokenise(cluster):
    cluster.prefill.script = play_prefill
    async with RawClient(cluster.proxy.address) as busy, RawClient(cluster.proxy.address) as raw:
        busy.send(post(PATH, WHOLE))
        decode_leg = await cluster.decode.next_leg()  # the drain waits for it
        raw.send(post(PATH, b"{}"))
        assert (await raw.response()).status == 400
        cluster.proxy.shutdown.set()
        while (await cluster.proxy.get("/health"))[0] == 200:
            pass
        raw.send(post("/tokenize", WHOLE))
        response = await raw.response()
        assert (response.status, response.header("retry-after")) == (503, "1")
        await decode_leg.finish(token(1), finished(2))
        assert (await busy.response()).status == 200
    await cluster.proxy.task


# HTTP/2, and every server that speaks ASGI: the head comes taken apart.


class Http2:
    """One HTTP/2 connection without TLS."""

    def __init__(self, raw: RawClient) -> None:
        self._raw = raw
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.state = h2.connection.H2Connection(config)
        self.state.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self._raw.send(self.state.data_to_send())

    async def ask(self, method: str, path: str, *headers: tuple[str, str], body: bytes = b""):
        """The status and the body of a response."""
        stream = self.state.get_next_available_stream_id()
        pseudo = {":method": method, ":path": path, ":scheme": "http", ":authority": "a"}
        if body:
            headers = (("content-type", "application/json"), *headers)
        self.state.send_headers(stream, [*pseudo.items(), *headers], end_stream=not body)
        if body:
            self.state.send_data(stream, body, end_stream=True)
        self.flush()
        return await self.response(stream)

    async def response(self, stream: int) -> tuple[int, bytes]:
        status, content = 0, b""
        async with asyncio.timeout(20):
            while data := await self._raw.reader.read(65536):
                for event in self.state.receive_data(data):
                    if isinstance(event, h2.events.ResponseReceived):
                        status = int(dict(event.headers)[":status"])
                    elif isinstance(event, h2.events.DataReceived):
                        content += event.data
                    elif isinstance(event, h2.events.StreamEnded) and event.stream_id == stream:
                        return status, content
                self.flush()
        raise AssertionError("the connection ended before the response")


async def test_http_2_has_the_same_rules(playing):
    cases = {
        "good": ([("x", "y")], 200),
        "two ids": ([("x-request-id", "a"), ("x-request-id", "b")], 400),
        "two keys": ([("authorization", "a"), ("authorization", "b")], 400),
        "many": ([("x", "y")] * 120, 431),
    }
    async with RawClient(playing.proxy.address) as raw:
        client = Http2(raw)
        for name, (headers, expected) in cases.items():
            status, body = await client.ask("POST", PATH, *headers, body=BODY)
            assert (name, status) == (name, expected)
            assert expected == 200 or has_all_keys(body)


async def test_a_websocket_over_http_2_is_refused_in_our_words(playing, caplog):
    async with RawClient(playing.proxy.address) as raw:
        client = Http2(raw)
        stream = client.state.get_next_available_stream_id()
        client.state.send_headers(
            stream,
            [
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":path", "/nothing"),
                (":scheme", "http"),
                (":authority", "a"),
                ("sec-websocket-version", "13"),
            ],
        )
        client.flush()
        status, body = await client.response(stream)
    assert (status, has_all_keys(body)) == (400, True)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_server_that_knows_no_reasons_is_told_to_close_a_websocket(stack):
    service = await stack.enter_async_context(Service(ProxyOptions(), NoWorkers()))
    sent = []

    async def receive():
        return {"type": "websocket.connect"}

    async def send(event):
        sent.append(event)

    scope = {"type": "websocket", "path": "/", "headers": [], "query_string": b""}
    await create_app(service)(scope, receive, send)
    assert [event["type"] for event in sent] == ["websocket.close"]


class NoWorkers:
    def workers(self):
        return ()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big")
        + bytes([kind, flags])
        + stream.to_bytes(4, "big")
        + (payload)
    )


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
PING = frame(6, 0, 0, b"12345678")


@pytest.mark.parametrize(
    "first", [b"", frame(1, 0, 1, b"\x83"), PING], ids=["settings", "half a head", "ping"]
)
async def test_http_2_without_a_request_is_ended(playing, stack, first):
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(header_timeout_s=0.3))
    proxy = await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))
    async with RawClient(proxy.address) as raw:
        raw.send(PREFACE + first)
        if first is PING:
            stack.push_async_callback(stop, asyncio.create_task(keep_sending(raw, PING)))
        await raw.end()


async def test_http_2_that_idles_is_ended_whatever_it_pings(playing, stack):
    config = ProxyOptions(limits=AT_ONCE, front=FrontOptions(keep_alive_s=1.0))
    proxy = await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))
    async with RawClient(proxy.address) as raw:
        status, _ = await Http2(raw).ask("GET", "/version")
        assert status == 200
        stack.push_async_callback(stop, asyncio.create_task(keep_sending(raw, PING)))
        await raw.end()


async def keep_sending(raw: RawClient, data: bytes) -> None:
    while True:
        raw.send(data)
        await asyncio.sleep(0.05)


async def stop(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.wait((task,))
