"""The client and what it finds out about endpoints, against real servers."""

import asyncio
import json

import pytest
from aiohttp import web
from bench_kit import endpoint, whole_answer

from neuron_di.bench.client import HttpClient
from neuron_di.bench.endpoint import find_endpoint
from neuron_di.bench.outcome import read_outcome
from neuron_di.bench.run import View, bench
from neuron_di.bench.settings import make_settings
from neuron_di.bench.summary import summarize
from neuron_di.errors import ConfigError


async def find(url, key=None, **given):
    return await find_endpoint(make_settings({"urls": (url,)} | given), 0, key)


def refusing(*fields):
    """An endpoint that does not know these fields."""

    async def handler(request, body):
        for field in fields:
            if field in body:
                return web.json_response({"error": {"message": f"no {field}"}}, status=400)
        return await whole_answer(request, body)

    return handler


async def test_words_are_counted_where_there_is_no_tokenizer():
    async with endpoint() as url:
        found = await find(url)
        # bench_kit's endpoint counts two tokens for each word and three more.
        assert (found.pieces.tokens_per_piece, found.pieces.tokens_around) == (2.0, 3.0)
        assert (found.by_usage, found.is_exact, found.prompts_are_ids) == (True, True, False)
        prompt = json.loads(found.maker(make_settings({"urls": (url,)})).prompt(0, 103))
        assert len(prompt.split()) == 50
        await found.client.close()


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_fields_that_are_refused_are_left_out_and_that_is_said(api):
    async with endpoint(refusing("ignore_eos")) as url:
        found = await find(url, api=api)
        assert not found.is_exact
        assert found.by_usage
        assert "it refuses ignore_eos: sent without" in found.notes
        await found.client.close()
    async with endpoint(refusing("ignore_eos", "stream_options")) as url:
        found = await find(url, api=api)
        assert not found.by_usage
        assert any("no usage" in note for note in found.notes)
        assert {"ignore_eos", "stream_options"}.isdisjoint(found.options)
        await found.client.close()


async def test_the_context_and_the_model_are_what_the_endpoint_says():
    async with endpoint(max_model_len=77) as url:
        found = await find(url + "/v1")
        assert (found.model, found.context_tokens) == ("made-up", 77)
        await found.client.close()
        found = await find(url, model="another", context_tokens=5)
        assert (found.model, found.context_tokens) == ("another", 5)
        await found.client.close()


async def test_an_endpoint_that_refuses_everything():
    async with endpoint(refusing("model")) as url:
        with pytest.raises(ConfigError, match="does not complete a prompt: status 400: no model"):
            await find(url)


async def test_what_lists_no_models_is_told_with_its_answer():
    async with endpoint() as url:
        with pytest.raises(ConfigError, match=r"lists no models \(status 404\): give the address"):
            await find(url + "/v1/completions")
    async with endpoint(num_models=0) as url:  # as a proxy before its first worker
        with pytest.raises(ConfigError, match=r"lists no models \(status 200\): wait until"):
            await find(url)


async def test_nobody_is_there():
    async with endpoint() as url:
        pass
    with pytest.raises(ConfigError, match="cannot be reached"):
        await find(url)


async def test_a_key_is_sent_and_asked_for():
    async def locked(request, body):
        if request.headers.get("authorization") != "Bearer secret":
            return web.json_response({}, status=401)
        return await whole_answer(request, body)

    async with endpoint(locked) as url:
        with pytest.raises(ConfigError, match="KEY_NEURON_DI"):
            await find(url)
        with pytest.raises(ConfigError, match="does not accept the key"):
            await find(url, key="another")
        found = await find(url, key="secret")
        await found.client.close()


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://u:p@x", "http://x?y", "http://x:99999"]
)
async def test_what_is_no_url(url):
    with pytest.raises(ConfigError, match="--url"):
        HttpClient(url)


async def test_a_key_that_would_be_another_header():
    with pytest.raises(ConfigError, match="key"):
        HttpClient("http://x", "a\r\nx: y")


async def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it():
    peers = []

    async def handler(request, body):
        peers.append(request.transport.get_extra_info("peername"))
        response = await whole_answer(request, body)
        if len(peers) == 2:
            response.force_close()
        return response

    async with endpoint(handler) as url:
        client = HttpClient(url)
        request = client.request("POST", "/v1/completions", b'{"max_tokens":1,"prompt":"a"}')
        for _ in range(4):
            assert (await client.send(request, 30)).end == "whole"
        assert peers[0] == peers[1]
        await client.close()


async def serve_bytes(answers: list[bytes]):
    """A server that writes each of these to one request, and then closes the connection."""
    left = iter(answers)

    async def on_connection(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(left))
        await writer.drain()
        writer.close()

    return await asyncio.start_server(on_connection, "127.0.0.1", 0)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("answer", "end", "status"),
    [
        (HEAD + b"content-length: 2\r\n\r\nok", "whole", 200),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 2\r\n\r\nok", "whole", 200),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "whole", 200),
        (HEAD + b"\r\nok", "whole", 200),  # neither: it ends where the connection does
        (b"HTTP/1.0 200 OK\r\nserver: x\r\n\r\nok", "whole", 200),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", "cut", 200),
        (HEAD + b"content-length: 9\r\n\r\nok", "cut", 200),
        (b"", "connection", 0),
        (b"SSH-2.0-x\r\n", "connection", 0),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nok\r\n", "cut", 200),
    ],
)
async def test_how_an_answer_ends(answer, end, status):
    server = await serve_bytes([answer])
    async with server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        heard = await client.send(client.request("GET", "/"), 30)
        assert (heard.end, heard.status) == (end, status)
        assert end != "whole" or heard.body == b"ok"
        await client.close()


async def test_a_silent_server_is_given_up():
    async def on_connection(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = HttpClient(url)
        heard = await client.send(client.request("GET", "/"), 0.05)
        assert heard.end == "timeout"
        await client.close()
        with pytest.raises(ConfigError, match=r"not over after 0\.05 s"):
            await find(url, timeout_s=0.05)


async def test_a_run_that_is_over_before_its_first_request_took_no_time():
    async with endpoint() as url:
        given = {"urls": (url,), "duration_s": 1e-9, "warmup": 0}
        document = summarize(await bench(make_settings(given), None, None, View()))
    (report,) = document.endpoints
    assert (report.figures.num, report.wall_s, report.requests_per_s) == (0, 0, 0)
    assert "-" not in f"{report.requests_per_s:.2f}"


async def test_the_client_takes_the_time_once_for_each_packet():
    """What it costs: nothing is parsed, and the clock asked once, however many tokens come."""
    async with endpoint() as url:
        client = HttpClient(url)
        body = b'{"max_tokens":200,"prompt":"a","stream_options":{}}'
        heard = await client.send(client.request("POST", "/v1/completions", body), 30)
        assert len(heard.pieces) == len(heard.times_s) <= 210
        outcome = read_outcome(heard, (await find(url)).expected(200))
        assert (outcome.ending, outcome.num_chunks) == ("ok", 200)
        await client.close()
