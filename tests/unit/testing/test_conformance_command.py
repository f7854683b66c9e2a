"""What `neuron-di conformance` refuses before it sends anything, and what it says meanwhile."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from answering_endpoint import AnsweringEndpoint, whole

from neuron_di.cli import main
from neuron_di.errors import PeerError
from neuron_di.testing.conformance import (
    Endpoint,
    Heard,
    Probe,
    Rules,
    choose,
    learn,
    run_cases,
)
from neuron_di.testing.conformance.command import show_progress
from neuron_di.testing.conformance.exchange import Ask

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((URL, URL, "--at-once=0"), "--at-once must be a whole number, at least 1, not 0"),
        ((URL, URL, "--at-once=-1"), "--at-once must be a whole number, at least 1, not -1"),
        ((URL, URL, "--long-prompt-chars=0"), "--long-prompt-chars must be a whole number"),
        ((URL, URL, "--logprob-tolerance=-1"), "--logprob-tolerance must be a number, at least 0"),
        ((URL, URL, "--logprob-tolerance=inf"), "at least 0, not inf"),
        ((URL, URL, "--logprob-tolerance=nan"), "at least 0, not nan"),
        (("http://me:secret@a", URL), "URL_A takes no user"),
        ((URL, "http://me:secret@a"), "URL_B takes no user"),
        ((URL, "ftp://a"), "URL_B 'ftp://a' is no address"),
        ((URL, URL, "--key-env-a=ODD_KEY"), "the API key has characters that no header can carry"),
    ],
)
def test_what_cannot_be_is_refused(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("ODD_KEY", "secret\n")
    assert main(["conformance", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert "secret" not in said.err + said.out
    assert said.out == ""


MODELS = whole({"data": [{"id": "m"}]})
DENIED = {"error": {"message": "the API key is not valid\x1b[2J" + "x" * 1000, "code": "y"}}


@pytest.mark.parametrize(
    ("models", "completion", "words"),
    [
        (whole(DENIED, status=401), None, "lists no model at /v1/models (status 401: 'the API key"),
        (whole(b"7", status=500), None, "lists no model at /v1/models (status 500, 'application/"),
        (Heard(status=200, headers={"content-type": "text/html"}, body=b"<p>"), None,
         "lists no model at /v1/models (status 200, 'text/html')"),
        (MODELS, whole(DENIED, status=502), "complete a text (status 502: 'the API key is not"),
        (MODELS, whole({"choices": []}), "complete a text (status 200, 'application/json')"),
        (MODELS, whole({"choices": [{"text": " "}]}), "with no text"),
    ],
)  # fmt: skip
async def test_why_nothing_can_be_tried_is_said(models, completion, words):
    endpoint = AnsweringEndpoint(
        "A", lambda ask: models if ask.path == "/v1/models" else completion
    )
    with pytest.raises(PeerError) as raised:
        await learn(endpoint, long_prompt_chars=9)
    assert words in raised.value.message
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 300


@asynccontextmanager
async def server(models, completion=None):
    """The URL of a server that lists models, and perhaps completes texts; and a session."""
    app = web.Application()
    app.router.add_get("/v1/models", models)
    if completion is not None:
        app.router.add_post("/v1/completions", completion)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            yield url, session
    finally:
        await runner.cleanup()


async def test_an_answer_without_end_is_not_read_without_end():
    async def handle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * (1 << 20))

    async with server(handle) as (url, session):
        with pytest.raises(PeerError, match="/v1/models answers with more than 16 MiB"):
            await Endpoint("A", url, session).send(Ask(path="/v1/models", method="GET"))


async def test_where_nobody_listens_is_told_as_other_commands_tell_it():
    async with aiohttp.ClientSession() as session:
        with pytest.raises(PeerError, match=r"no endpoint answers at \S+: Connection refused$"):
            await Endpoint("A", "http://127.0.0.1:9", session).find_model()


async def test_nobody_else_is_compared_because_of_a_redirect():
    async def here(_):
        return web.json_response({"data": [{"id": "m"}]})

    async def elsewhere(_):
        raise web.HTTPTemporaryRedirect(f"{other}/v1/models")

    async with server(here) as (other, _), server(elsewhere) as (url, session):
        with pytest.raises(PeerError, match=r"lists no model at /v1/models \(status 307"):
            await Endpoint("A", url, session).find_model()


@pytest.mark.parametrize(("param", "code"), [("max_tokens", 130), ("n", 1)])
async def test_what_was_found_is_said_when_it_is_interrupted(param, code):
    is_stuck = asyncio.Event()

    async def completion(request):
        asked = await request.json()
        if asked.get("n") == 0:
            is_stuck.set()
            await asyncio.sleep(60)
        if asked["max_tokens"] < 0:
            error = {"message": "no", "type": "x", "param": param, "code": None}
            return web.json_response({"error": error}, status=400)
        return web.json_response({"choices": [{"text": " a b"}]})

    async def models(_):
        return web.json_response({"data": [{"id": "m"}]})

    async with server(models, completion) as (url, _):
        command = (
            "conformance",
            url,
            url,
            "--at-once=1",
            "--case=refuse-max-tokens-negative",
            "--case=refuse-n-0",
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "neuron_di", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await is_stuck.wait()
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert b"interrupted after 1 of 2 cases" in err
    assert b"refuse-max-tokens-negative" in out
    assert b"1 cases: " in out
    assert process.returncode == code


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_only_a_terminal_is_told_of_each_case(is_terminal, capsys, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    error = {"message": "no n", "type": "x", "param": "n", "code": None}
    endpoints = [AnsweringEndpoint(side, lambda _: whole({"error": error}, status=400))
                 for side in ("A", "B")]  # fmt: skip
    probe = Probe(token_0="a", text="a b", token_ids=(), context_tokens=None, long_prompt_chars=9)
    cases = choose(["refuse-n-0", "n-3"])
    with show_progress(len(cases)) as tell:
        await run_cases(cases, endpoints, [probe, probe], Rules(), at_once=1, tell=tell)
    said = capsys.readouterr()
    assert ("2 of 2 cases; refuse-n-0: same" in said.err) is is_terminal
    assert is_terminal or said.err == ""
    assert said.out == ""
