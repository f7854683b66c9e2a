"""Orders of an operator over HTTP. Who may give them is the proxy's to know.

    POST /drain/prepare  a ticket: from now on the status says that the worker is about to leave
    POST /drain          drain, then end; lines of progress until nothing is left
    POST /role/prepare   a ticket, or why not
    POST /role/commit    drain, then serve in the other role; lines until the old one has ended
    POST /abort          forget a ticket
    GET  /role           what became of the last change

Whoever stops reading changes nothing: what was ordered is done.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from neuron_di.errors import ClientError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.wire import encode_json
from neuron_di.wire.admin import (
    abort_order_decoder,
    commit_role_decoder,
    drain_order_decoder,
    prepare_drain_decoder,
    prepare_role_decoder,
)
from neuron_di.worker.drain import Drain
from neuron_di.worker.leg_report import failed
from neuron_di.worker.orders import Orders

_log = get_logger(__name__)


class OrderNotJson(ClientError):
    """Raised when an order may be a web page's: it is not said to be JSON, or names a page."""

    http_status = 415
    code = "unsupported_media_type"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_admin_routes(app: web.Application, orders: Orders) -> None:
    """Let `app` take orders."""

    async def prepare_drain(request: web.Request) -> web.StreamResponse:
        ticket = orders.prepare_drain(prepare_drain_decoder.decode(await request.read()))
        return _json(encode_json(ticket))

    async def drain(request: web.Request) -> web.StreamResponse:
        order = drain_order_decoder.decode(await request.read())
        running, has_joined = orders.order_drain(order)
        _log.info("drain_ordered", has_joined=has_joined)
        return await _follow(request, running, has_joined=has_joined)

    async def prepare(request: web.Request) -> web.StreamResponse:
        ticket = orders.prepare(prepare_role_decoder.decode(await request.read()))
        return _json(encode_json(ticket))

    async def commit(request: web.Request) -> web.StreamResponse:
        order = commit_role_decoder.decode(await request.read())
        return await _follow(request, orders.commit(order.ticket, order.timeout_s))

    async def abort(request: web.Request) -> web.StreamResponse:
        orders.abort(abort_order_decoder.decode(await request.read()).ticket)
        return _json(b"{}")

    async def role(_: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode(orders.outcome))

    app.router.add_post("/drain/prepare", _refusing(prepare_drain))
    app.router.add_post("/drain", _refusing(drain))
    app.router.add_post("/role/prepare", _refusing(prepare))
    app.router.add_post("/role/commit", _refusing(commit))
    app.router.add_post("/abort", _refusing(abort))
    app.router.add_get("/role", role)


async def _follow(
    request: web.Request, drain: Drain, *, has_joined: bool = False
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    with drain.followed() as lines:  # before the first await: the drain may be over soon
        await response.prepare(request)
        async for progress in lines:
            line = msgspec.structs.replace(progress, has_joined=has_joined)
            await response.write(encode_json(line) + b"\n")
        await response.write_eof()
    return response


def _refusing(handle: Handler) -> Handler:
    """With refusals said as a leg's failures are."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            if request.content_type != "application/json" or "Origin" in request.headers:
                raise OrderNotJson("an order is JSON, says so, and is sent by no web page")
            return await handle(request)
        except NeuronDiError as error:
            return _json(encode_json(failed(error)), error.http_status)

    return answer


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")
