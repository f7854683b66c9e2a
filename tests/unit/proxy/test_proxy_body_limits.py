"""A route takes no more of a body than it has use for: what it reads waits in memory."""

import asyncio
import json

import pytest
import quart
from raw_http import RawClient, post

from neuron_di.config import ProxyOptions
from neuron_di_proxy.app import create_app
from neuron_di_proxy.body_refusal import body_bytes_max
from neuron_di_proxy.service import Service

WHOLE = {"model": "tiny", "prompt": "hi"}
KIB, MIB = 1 << 10, 1 << 20
LIMITS = {
    ("GET", "/health"): 64 * KIB,
    ("GET", "/version"): 64 * KIB,
    ("POST", "/admin/drain"): 64 * KIB,
    ("POST", "/nothing"): 64 * KIB,
    ("GET", "/v1/completions"): 64 * KIB,
    ("POST", "/tokenize"): MIB,
    ("POST", "/detokenize"): MIB,
}


def head_of(route, *lines):
    method, path = route
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", *lines, "", ""]).encode()


@pytest.mark.parametrize("route", LIMITS, ids=" ".join)
async def test_a_head_that_tells_of_too_much_is_refused_before_any_of_it_came(playing, route):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(head_of(route, f"Content-Length: {LIMITS[route] + 1}"))
        response = await raw.response()
        assert (response.status, response.error["code"]) == (413, "request_too_large")
        assert str(LIMITS[route]) in response.error["message"]
        assert await raw.end() == b""


@pytest.mark.parametrize("route", LIMITS, ids=" ".join)
async def test_chunks_are_taken_up_to_the_limit(playing, route):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(head_of(route, "Transfer-Encoding: chunked"))
        raw.send(b"%x\r\n%b\r\n" % (LIMITS[route] + 1, b" " * (LIMITS[route] + 1)))
        response = await raw.response()
        assert (response.status, response.error["code"]) == (413, "request_too_large")


async def test_what_is_asked_for_tokens_may_be_large(playing):
    document = json.dumps(WHOLE | {"prompt": "x" * 2 * MIB}).encode()
    async with RawClient(playing.proxy.address) as raw:
        raw.send(post("/v1/completions", document))
        assert (await raw.response()).status == 200


async def test_the_body_of_a_route_that_is_not_there_keeps_nobody_from_hearing_so(playing):
    async with RawClient(playing.proxy.address) as raw:
        raw.send(post("/v1/nothing", WHOLE))
        assert (await raw.response()).status == 404


class NoWorkers:
    def workers(self):
        return ()


@pytest.mark.parametrize("route", LIMITS, ids=" ".join)
async def test_behind_any_server_the_same(stack, route):
    """Where a handler reads it, it is refused; where none does, no more than that is kept."""
    service = await stack.enter_async_context(Service(ProxyOptions(), NoWorkers()))
    app = create_app(service)
    kept = []

    @app.after_request
    async def look(response):
        kept.append(len(quart.request.body._data))
        return response

    pieces = [b" " * 64 * KIB] * (LIMITS[route] // (64 * KIB) + 9)
    sent = []

    async def receive():
        if not pieces:
            await asyncio.Event().wait()  # the client waits, too
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def send(event):
        sent.append(event)

    scope = {"type": "http", "http_version": "2", "method": route[0], "path": route[1]}
    scope |= {"scheme": "http", "query_string": b"", "client": ("127.0.0.1", 1), "root_path": ""}
    json_type = (b"content-type", b"application/json")
    await app(scope | {"headers": [(b"host", b"localhost"), json_type]}, receive, send)
    is_read = route[1] in ("/tokenize", "/detokenize", "/admin/drain")
    assert (sent[0]["status"] == 413) == is_read
    assert max(kept) <= LIMITS[route] + 64 * KIB


@pytest.mark.parametrize("route", LIMITS, ids=" ".join)
def test_a_lower_limit_for_all_holds_for_each(route):
    assert body_bytes_max(*route, 1000) == 1000
    assert body_bytes_max("POST", "/v1/completions", 16 * MIB) == 16 * MIB
