"""A leg that has nothing to say yet still shows that its worker lives."""

import asyncio

import aiohttp
import pytest
from aiohttp import web

from neuron_di.worker import server


async def test_a_silent_leg_sends_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ALIVE_INTERVAL_S", 0.01)
    goes_on = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        async with server._kept_alive(answer):
            await goes_on.wait()
        await answer.write(b"last\n")
        await answer.write_eof()
        return answer

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with (
            asyncio.timeout(10),
            aiohttp.ClientSession() as session,
            session.get(url) as response,
        ):
            assert [await response.content.readline() for _ in range(3)] == [b"\n"] * 3
            goes_on.set()
            assert (await response.content.read()).replace(b"\n", b"") == b"last"
    finally:
        await runner.cleanup()
