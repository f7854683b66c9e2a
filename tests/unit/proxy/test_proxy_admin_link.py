"""Orders to whoever is at a worker's address, whatever it answers."""

import asyncio

import pytest
from aiohttp import web
from scripted_worker import make_record

from neuron_di.errors import PeerTimeout, RemoteProtocolError
from neuron_di.wire.admin import DrainOrder
from neuron_di_proxy import admin_link
from neuron_di_proxy.admin_link import AdminLink

PIECE = b"x" * 65536
PAUSE_S = 0.005


@pytest.fixture
async def answering(stack):
    """A worker's record, and a list of what it answers to a drain."""
    pieces = []

    async def drain(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(PAUSE_S)
        return response

    app = web.Application()
    app.router.add_post("/drain", drain)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return make_record("d1", "decode", runner.addresses[0][1]), pieces


@pytest.mark.parametrize(
    "said", [[PIECE, b"\n"], [PIECE] * 32, [b"\xff\n"], [b"[]\n"]], ids=["long", "no", "bad", "odd"]
)
async def test_a_line_that_cannot_be_is_the_workers_fault(answering, said):
    record, pieces = answering
    pieces += said
    async with AdminLink(record) as link:
        lines = link.drain(DrainOrder(incarnation=record.incarnation))
        with pytest.raises(RemoteProtocolError):
            await anext(lines)


async def test_a_worker_that_sends_a_byte_now_and_then_is_late(answering, monkeypatch):
    """A byte is no line, however soon the next one comes."""
    monkeypatch.setattr(admin_link, "ANSWER_TIMEOUT_S", 100 * PAUSE_S)
    record, pieces = answering
    pieces += [b"x"] * 10_000
    async with AdminLink(record) as link:
        lines = link.drain(DrainOrder(incarnation=record.incarnation))
        with pytest.raises(PeerTimeout):
            await anext(lines)
