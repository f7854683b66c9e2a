"""Made-up measurements, and an endpoint that does what a test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from neuron_di.bench.measured import Ending, Measured, Outcome

Handler = Callable[[web.Request, dict], Awaitable[web.StreamResponse]]


def measured(*requests: dict) -> Measured:
    """Of requests as `ask` makes them."""
    found = Measured()
    for index, request in enumerate(requests):
        found.add(index, request["slice_index"], request["planned"], request["intended_s"],
                  request["sent_s"], request["outcome"], lag_s=request["lag_s"])  # fmt: skip
    return found


def ask(
    *,
    ttft: float = 0.1,
    gaps: Iterable[float] = (0.01, 0.01),
    at: float = 0.0,
    late: float = 0.0,
    ending: Ending = "ok",
    planned: int = 100,
    slice_index: int = 0,
    why: str = "",
) -> dict:
    """A request due `at`, sent `late`, whose first token came `ttft` after it was due."""
    gaps = list(gaps)
    has_tokens = ending in ("ok", "cut", "error_event", "wrong_tokens")
    first_s = at + ttft if has_tokens else float("nan")
    outcome = Outcome(
        ending=ending,
        first_s=first_s,
        last_s=first_s + sum(gaps),
        end_s=at + ttft + sum(gaps),
        prompt_tokens=planned,
        output_tokens=len(gaps) + 1,
        num_chunks=len(gaps) + 1,
        gaps_s=gaps if has_tokens else (),
        why=why,
    )
    return {
        "slice_index": slice_index,
        "planned": planned,
        "intended_s": at,
        "sent_s": at + late,
        "lag_s": late,
        "outcome": outcome,
    }


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def usage(num_in: int, num_out: int) -> bytes:
    counts = {"prompt_tokens": num_in, "completion_tokens": num_out}
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


DONE = b"data: [DONE]\n\n"


async def whole_answer(request: web.Request, body: dict) -> web.StreamResponse:
    """As many tokens as were asked for."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(body["max_tokens"]):
        await response.write(event(" a"))
    prompt = body.get("prompt") or body["messages"][0]["content"]
    num_in = len(prompt) if isinstance(prompt, list) else 3 + 2 * len(prompt.split())
    await response.write(event("", "length"))
    if "stream_options" in body:
        await response.write(usage(num_in, body["max_tokens"]))
    await response.write(DONE)
    return response


@asynccontextmanager
async def endpoint(
    handler: Handler = whole_answer, *, num_models: int = 1, **info: object
) -> AsyncIterator[str]:
    """The URL of an endpoint, `info` beside its model's name. It does not tokenise."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "made-up", **info}] * num_models})

    async def complete(request: web.Request) -> web.StreamResponse:
        return await handler(request, await request.json())

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        await asyncio.sleep(0)
