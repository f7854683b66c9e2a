"""`neuron-di bench` as its users run it: against this server, and against endpoints that fail."""

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from openai_kit import Client
from process_kit import Ended, command, run, running_fleet

from neuron_di.bench.document import Document, EndpointReport, from_json

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SMALL = ("--input-tokens", "24", "--output-tokens", "6", "--warmup", "1")


@pytest.fixture(scope="module")
def pair(tiny_tales_1p1d: Client) -> Client:
    return tiny_tales_1p1d


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def combined(tiny_tales: Path) -> AsyncIterator[Client]:
    async with running_fleet(tiny_tales, combined=True) as client:
        yield client


async def bench(tmp_path: Path, *flags: str, code: int = 0) -> tuple[Document, Ended]:
    """Run it to its end. What it wrote, and what it said."""
    path = tmp_path / "figures.json"
    ended = await run("bench", "--json", str(path), *flags)
    assert ended.code == code, ended.stderr
    assert "Traceback" not in ended.stderr
    return from_json(path.read_bytes()), ended


def one(document: Document) -> EndpointReport:
    (report,) = document.endpoints
    return report


async def test_a_closed_loop(pair: Client, tmp_path: Path) -> None:
    document, ended = await bench(
        tmp_path, "--url", pair.url, "--concurrency", "3", "--requests", "12", *SMALL,
        "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000", "--plot", str(tmp_path / "a.png"),
    )  # fmt: skip
    report = one(document)
    assert (report.figures.num_ok, report.figures.num_failed, report.figures.num_good) == (
        12,
        0,
        12,
    )
    assert (report.tokens_by, report.prompts_of, report.most_open) == ("usage", "token ids", 3)
    # Its own tokens: prompts are as long as asked for, and answers, as it takes ignore_eos.
    assert (report.prompt_tokens, report.output_tokens) == (12 * 24, 12 * 6)
    assert report.figures.itl_ms is not None
    # A last token without text of its own, as half a character has, comes with the end.
    assert 12 * 4 <= report.figures.itl_ms.num <= 12 * 5
    assert report.model == pair.model
    assert "12 ok, 0 failed" in ended.stdout
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    await pair.until_idle()


async def test_an_open_loop_of_a_chat(pair: Client, tmp_path: Path) -> None:
    document, _ = await bench(
        tmp_path, "--url", pair.url, "--rate", "40", "--arrivals", "burst", "--burstiness", "0.5",
        "--requests", "10", "--api", "chat", *SMALL,
    )  # fmt: skip
    report = one(document)
    assert report.figures.num_ok == 10
    assert report.prompts_of == "words"
    assert report.ttft_from_sent_ms is not None
    intended = report.requests.intended_s
    assert all(
        sent >= due - 1e-5 for sent, due in zip(report.requests.sent_s, intended, strict=True)
    )


async def test_a_trace_whose_prefixes_are_shared(pair: Client, tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 10 * at,
            "input_length": 40,
            "output_length": 3,
            "hash_ids": [0, at + 1, at + 1],
        }
        for at in range(6)
    ]
    lines.append({"timestamp": 99, "input_length": 90_000, "output_length": 3})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document, _ = await bench(
        tmp_path, "--url", pair.url, "--trace", str(trace), "--trace-block-tokens", "16",
        "--warmup", "0",
    )  # fmt: skip
    report = one(document)
    assert document.loop == "trace"
    assert document.num_left_out == 1  # longer than the model's context
    assert (report.figures.num_ok, report.prompt_tokens, report.output_tokens) == (6, 240, 18)


async def test_two_endpoints_get_the_same_requests_in_turns(
    pair: Client, combined: Client, tmp_path: Path
) -> None:
    document, ended = await bench(
        tmp_path, "--url", pair.url, "--url", combined.url, "--name", "1P1D", "--name", "combined",
        "--requests", "8", "--input-tokens", "uniform:8,60", "--output-tokens", "4",
    )  # fmt: skip
    first, second = document.endpoints
    assert [each.figures.num_ok for each in (first, second)] == [8, 8]
    order = sorted(
        (each.begin_s, report.name[0]) for report in (first, second) for each in report.slices
    )
    assert "".join(name for _, name in order) == "1cc11cc1"
    assert prompts_of(first) == prompts_of(second)
    assert {each.figure for each in document.ratios} >= {"TTFT p50", "ITL p99", "output tokens/s"}
    assert "combined / 1P1D" in ended.stdout


def prompts_of(report: EndpointReport) -> list[int]:
    rows = sorted(zip(report.requests.index, report.requests.prompt_tokens, strict=True))
    return [num for _, num in rows]


@asynccontextmanager
async def failing_endpoint(*, after: int = 0) -> AsyncIterator[str]:
    """An endpoint that fails in each way in turn, once it has answered so many as it should."""
    turns = iter(range(10_000))
    kinds: dict[str, str] = {}

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "failing"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, is_probe = body["prompt"], body["max_tokens"] == 2
        if prompt not in kinds:
            turn = -1 if is_probe else next(turns) - after
            kinds[prompt] = "ok" if turn < 0 else KINDS[turn % len(KINDS)]
        kind = kinds[prompt]  # what is asked again, on a new connection, fails again
        if kind in ("429", "503", "500"):
            document = {"error": {"message": f"made up {kind}"}}
            return web.json_response(document, status=int(kind))
        if kind == "drop":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await _stream(request, kind, body["max_tokens"])

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


KINDS = ("ok", "429", "503", "500", "drop", "cut", "no done", "error", "short", "garbage", "silent")


async def _stream(request: web.Request, kind: str, num_tokens: int) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)

    async def say(document: Any) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        await response.write(f"data: {text}\n\n".encode())

    num = num_tokens - 1 if kind == "short" else num_tokens
    for at in range(num):
        await say({"choices": [{"index": 0, "text": " a", "finish_reason": None}]})
        if at == 1 and kind in ("cut", "error", "garbage", "silent"):
            break
    if kind == "cut":
        assert request.transport is not None
        request.transport.abort()
        return response
    if kind == "silent":
        await asyncio.sleep(60)
    if kind == "error":
        await say({"error": {"message": "made up", "code": 500}})
    elif kind == "garbage":
        await say("{")
    await say({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": num}})
    if kind != "no done":
        await say("[DONE]")
    return response


async def test_each_way_to_fail_is_counted(tmp_path: Path) -> None:
    async with failing_endpoint(after=1) as url:
        document, ended = await bench(
            tmp_path, "--url", url, "--concurrency", "1", "--requests", "22", *SMALL,
            "--timeout-s", "1", code=1,
        )  # fmt: skip
    report = one(document)
    assert report.figures.num_ok == 2
    failures = Counter({name: each.num for name, each in report.failures.items()})
    assert failures == {
        "refused_429": 2, "refused_503": 2, "refused": 2, "connection": 2, "cut": 4,
        "error_event": 2, "wrong_tokens": 2, "bad_answer": 2, "timeout": 2,
    }  # fmt: skip
    assert report.failures["refused_429"].example == "status 429: made up 429"
    assert report.figures.num_failed == 20
    for name in failures:
        assert name in ended.stdout


async def test_an_endpoint_that_answers_none_is_not_measured() -> None:
    async with failing_endpoint() as url:
        flags = ("bench", "--url", url, "--warmup", "1", "--requests", "1")
        ended = await run(*flags)  # the warm-up is answered, and then nothing is
        assert ended.code == 1
        ended = await run(*flags, "--seed", "1")
    assert ended.code == 2
    assert "answers none of 1 requests to warm up" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interruption_prints_what_was_measured(
    pair: Client, tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "figures.json"
    flags = ("--url", pair.url, "--duration-s", "600", "--json", str(path), *SMALL)
    async with command("bench", *flags) as process:
        assert process.stderr is not None
        while b" over" not in await process.stderr.readline():
            pass
        process.send_signal(number)
        stdout, stderr = await process.communicate()
    assert process.returncode == 128 + number
    assert b"interrupted: what was measured until then" in stdout
    assert b"Traceback" not in stderr
    document = from_json(path.read_bytes())
    assert document.is_interrupted
    assert one(document).figures.num_ok > 0
    assert one(document).figures.num_failed == 0
    await pair.until_idle()


async def test_the_figures_are_written_where_the_report_cannot_be(
    pair: Client, tmp_path: Path
) -> None:
    path = tmp_path / "figures.json"
    flags = ("--url", pair.url, "--requests", "2", "--json", str(path), *SMALL)
    full = os.open("/dev/full", os.O_WRONLY)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "neuron_di", "bench", *flags, stdout=full
    )
    os.close(full)
    assert await process.wait() == 1
    assert from_json(path.read_bytes()).endpoints[0].figures.num_failed == 0


async def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    nowhere = ("bench", "--url", "http://127.0.0.1:9")
    for flags, words in (
        (nowhere, "cannot be reached"),
        (("bench",), "--url http://127.0.0.1:8000"),
        ((*nowhere, "--trace", str(tmp_path / "none")), "cannot be read"),
        ((*nowhere, "--json", str(tmp_path / "no/folder.json")), "no folder"),
        ((*nowhere, "--rate", "fast"), "--rate"),
        ((*nowhere, "--concurency", "3"), "--concurrency"),
    ):
        ended = await run(*flags)
        assert (ended.code, ended.stdout) == (2, "")
        assert words in ended.stderr
        assert "Traceback" not in ended.stderr


async def test_a_key_comes_from_the_environment_and_is_shown_nowhere(tmp_path: Path) -> None:
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("authorization"))
        return web.json_response({}, status=401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ended = await run("bench", "--url", url, environ={"KEY_NEURON_DI": "sk-secret"})
    finally:
        await runner.cleanup()
    assert ended.code == 2
    assert "KEY_NEURON_DI" in ended.stderr
    assert seen == ["Bearer sk-secret"]
    assert "sk-secret" not in ended.stdout + ended.stderr
