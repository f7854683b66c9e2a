"""Orders to whoever is at a worker's address, whatever it answers."""

import pytest
from aiohttp import web
from scripted_worker import make_record

from neuron_di.errors import RemoteProtocolError
from neuron_di.wire.admin import DrainOrder
from neuron_di_proxy.admin_link import AdminLink

PIECE = b"x" * 65536


@pytest.fixture
async def answering(stack):
    """A worker's record, and a list of what it answers to a drain."""
    pieces = []

    async def drain(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
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
