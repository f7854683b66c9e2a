"""What the clients of the interference measurement take for a gap between two tokens."""

import aiohttp
import pytest
from aiohttp import web

from benchmarks.interference_client import Client, Stream

NUM_TOKENS = (1, 2, 4, 5, 5, 5)  # the third event has two tokens, the last two none


@pytest.fixture
async def url():
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in NUM_TOKENS:
            event = f'data: {{"id": "x", "usage": {{"completion_tokens": {number}}}}}\n\n'
            await response.write(event.encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_a_gap_is_of_one_step(url):
    stream = Stream()
    async with aiohttp.ClientSession() as session:
        assert await Client(session, url, "m").run_stream([1], 5, stream) == "x"
    a, b, several, c = stream.token_s
    assert stream.gaps() == [(b, b - a), (c, c - several)]
