"""The Quart application: OpenAI's endpoints, and what an operator asks for.

A request for tokens goes: `service` takes it, `request_reader` reads it, `choices` runs it,
`recovery` brings each choice to its end, for each attempt `route` picks workers and `launch` runs
both legs, `openai_response` writes. `front` does the same without Quart, on sockets of its own.

Next: proxy/neuron_di_proxy/service.py
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

import msgspec
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, WebsocketScope
from quart import Quart, Request, Response
from quart import request as current_request
from quart.asgi import ASGIHTTPConnection
from quart.typing import ResponseTypes
from werkzeug.exceptions import (
    HTTPException,
    MethodNotAllowed,
    RequestEntityTooLarge,
    RequestTimeout,
)

from neuron_di.clock import Deadline, unix_s
from neuron_di.errors import BadRequest, ClientError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.version import __version__
from neuron_di.wire import Failed
from neuron_di_proxy.admin import Lines
from neuron_di_proxy.admin_order import DrainRequest, RoleRequest, check_sender, read_order
from neuron_di_proxy.body_refusal import body_bytes_max, body_late, body_too_large, check_body
from neuron_di_proxy.choice_request import BYTES_PER_TOKEN, HOT_PATHS, Endpoint
from neuron_di_proxy.failure import Refusal, failure_of, refusal_of
from neuron_di_proxy.keys import authorize
from neuron_di_proxy.known_models import ModelNotFound
from neuron_di_proxy.metrics import CONTENT_TYPE
from neuron_di_proxy.openapi import openapi_document
from neuron_di_proxy.quart_reply import QuartReply
from neuron_di_proxy.request_head import check_headers
from neuron_di_proxy.request_id import client_id_of, fresh_id
from neuron_di_proxy.response_pieces import pieces_of
from neuron_di_proxy.service import Exchange, Service
from neuron_di_proxy.siblings import Siblings
from neuron_di_proxy.status import HealthAnswer, report_health, report_proxy, report_status
from neuron_di_proxy.tenant import NOBODY
from neuron_di_proxy.tokenize import TokenizeKind, forward_tokenize

_NO_SUCH_PATH = "there is no such path; GET /openapi.json lists all"

_log = get_logger(__name__)


class ReceiptNotFound(ClientError):
    """Raised when no receipt is kept under an id."""

    http_status = 404
    code = "receipt_not_found"


class ProxyRequest(Request):
    """An HTTP request with what must be undone when it ends, however it ends."""

    def __init__(self, method: str, scheme: str, path: str, *args: Any, **more: Any) -> None:
        path = "/" + path.lstrip("/")  # as the router reads it
        self.bytes_max = body_bytes_max(method, path, more.pop("max_content_length"))
        super().__init__(method, scheme, path, *args, max_content_length=self.bytes_max, **more)
        self.cleanup = AsyncExitStack()
        self.exchange: Exchange | None = None
        self.echoed_id = fresh_id()  # or the client's own, once it was found good
        self.fields: Mapping[str, str] = {}  # its headers, by lower-case name
        self.tenant = NOBODY


class NoWebsocket:
    """Refuses a WebSocket: there are none here, with a key or without."""

    def __init__(self, _: Quart, scope: WebsocketScope) -> None:
        self._can_say_why = "websocket.http.response" in (scope.get("extensions") or {})

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        await receive()  # websocket.connect
        if not self._can_say_why:
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        refusal = refusal_of(BadRequest("there are no WebSockets here"), fresh_id())
        headers = [*refusal.headers, ("content-length", str(len(refusal.body)))]
        raw = [(name.encode(), value.encode()) for name, value in headers]
        await send(
            {"type": "websocket.http.response.start", "status": refusal.status, "headers": raw}
        )
        await send(
            {"type": "websocket.http.response.body", "body": refusal.body, "more_body": False}
        )


class ProxyConnection(ASGIHTTPConnection):
    """Runs a request's clean-up in the task that runs the request.

    A client that leaves cancels that task at any await, also between the handler and the
    first byte of a stream, where a generator's own `finally` would not run.
    """

    async def handle_request(self, request: Request, send: ASGISendCallable) -> None:
        assert isinstance(request, ProxyRequest), "the app makes its requests of this class"
        assert isinstance(self.app, Proxy), "this class is the proxy's"
        send_timeout_s = self.app.service.limits.send_timeout_s

        async def send_in_time(event: ASGISendEvent) -> None:
            # Raises TimeoutError, which ends the response, where the client does not read.
            for piece in pieces_of(event):  # a slow one has that time for each
                async with asyncio.timeout(send_timeout_s):
                    await send(piece)

        async with request.cleanup:
            await super().handle_request(request, send_in_time)


class Proxy(Quart):
    """The application. `service` does the work, and outlives every request."""

    asgi_http_class = ProxyConnection
    asgi_websocket_class = NoWebsocket
    request_class = ProxyRequest

    def __init__(self, service: Service, siblings: Siblings) -> None:
        super().__init__(__name__, static_folder=None)
        front = service.config.front
        self.config["MAX_CONTENT_LENGTH"] = front.body_bytes_max
        self.config["BODY_TIMEOUT"] = front.body_timeout_s
        self.config["RESPONSE_TIMEOUT"] = None  # it would cut a stream in silence; ours say why
        self.url_map.merge_slashes = False  # a redirection would name whatever host was asked for
        self.service = service
        self.siblings = siblings
        self._started_unix_s = int(unix_s())

        self.before_request(self._check_head)
        self.after_request(_echo_id)
        self.register_error_handler(Exception, self._answer_error)
        for path, endpoint in HOT_PATHS.items():
            self._route("POST", path, partial(self.generate, endpoint))
        self._route("POST", "/tokenize", self.tokenize)
        self._route("POST", "/detokenize", self.detokenize)
        self._route("GET", "/v1/models", self.models)
        self._route("GET", "/v1/models/<path:model>", self.model)
        self._route("GET", "/v1/receipts/<answer_id>", self.receipt)
        self._route("GET", "/health", self.health)
        self._route("GET", "/ping", self.health)
        self._route("GET", "/ready", self.ready)
        self._route("GET", "/live", self.live)
        self._route("GET", "/load", self.load)
        self._route("GET", "/version", self.version)
        self._route("GET", "/status", self.status)
        self._route("GET", "/metrics", self.metrics)
        self._route("GET", "/openapi.json", self.openapi)
        self._route("POST", "/admin/drain", self.drain_worker)
        self._route("POST", "/admin/role", self.change_role)

    async def tokenize(self) -> Response:
        return await self._forward_tokenize("tokenize")

    async def detokenize(self) -> Response:
        return await self._forward_tokenize("detokenize")

    async def models(self) -> Response:
        data = [self._describe(model) for model in self.service.model_names()]
        return _json_response({"object": "list", "data": data})

    async def model(self, model: str) -> Response:
        if model not in self.service.model_names():
            raise ModelNotFound(f"the model {model!r} does not exist", param="model")
        return _json_response(self._describe(model))

    async def receipt(self, answer_id: str) -> Response:
        receipt = await self.siblings.receipt(answer_id)
        tenant = _this_request().tenant
        # Whose it is is nobody else's business: another tenant's is not there.
        if receipt is None or not (tenant.is_operator or receipt.tenant == tenant.name):
            raise ReceiptNotFound(f"no receipt is kept for {answer_id!r}", param="id")
        return _json_response(receipt)

    async def health(self) -> Response:
        answer = self._health()
        return _json_response(answer, 503 if answer.status == "unavailable" else 200)

    async def ready(self) -> Response:
        """Whether to send requests here. Degraded is ready."""
        is_ready = self._health().status != "unavailable"
        return _json_response({"ready": is_ready}, 200 if is_ready else 503)

    async def live(self) -> Response:
        return _json_response({"live": True})  # with or without workers

    async def load(self) -> Response:
        """How many requests are being answered: for load balancers."""
        processes = [report_proxy(self.service.admission), *await self.siblings.statuses()]
        return _json_response({"server_load": sum(each.num_running for each in processes)})

    async def version(self) -> Response:
        return _json_response({"version": __version__})

    async def status(self) -> Response:
        service = self.service
        reporting = report_status(service.admission, service.client, service.health, service.pairs)
        return _json_response(await self.siblings.completed(reporting))

    async def metrics(self) -> Response:
        return Response(await self.siblings.metrics(), content_type=CONTENT_TYPE)

    async def openapi(self) -> Response:
        return _json_response(openapi_document())

    async def drain_worker(self) -> Response:
        order = read_order(DrainRequest, _this_request().fields, await self._order())
        return await _follow(self.service.admin.drain(order))

    async def change_role(self) -> Response:
        order = read_order(RoleRequest, _this_request().fields, await self._order())
        return await _follow(self.service.admin.change_role(order))

    async def _order(self) -> bytes:
        request = _this_request()
        if not self.service.keys.are_asked_for:
            assert request.scope is not None, "it came over ASGI"
            check_sender(request.fields, (request.scope.get("client") or ("",))[0])
        return await _json_body(request)

    def _health(self) -> HealthAnswer:
        service = self.service
        if service.admission.is_draining:
            return HealthAnswer(status="unavailable", reason="the server is shutting down")
        return report_health(service.router, service.health, service.pairs)

    def _describe(self, model: str) -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "neuron-di",
            "root": model,  # load generators take the name of the tokenizer from it
            "max_model_len": self.service.traits.of(model).context_tokens,
        }

    async def generate(self, endpoint: Endpoint) -> Response:
        request, service = _this_request(), self.service
        exchange = request.exchange = service.open(endpoint, request.fields)
        request.cleanup.callback(exchange.close)
        body = await _json_body(request)
        reply = QuartReply(service.config.front.ping_interval_s)
        answering = asyncio.create_task(exchange.answer(body, reply))
        answering.add_done_callback(lambda _: reply.abort())  # one without an end is broken off
        request.cleanup.push_async_callback(_end, answering)
        await reply.head(answering)
        data = reply.whole() if reply.length is not None else _ending(reply, answering)
        return _response(Refusal(reply.status, reply.headers, b""), data)

    async def _forward_tokenize(self, kind: TokenizeKind) -> Response:
        request, service = _this_request(), self.service
        ticket = service.arrive(request.tenant)
        request.cleanup.callback(ticket.close)
        body = await _json_body(request)
        ticket.take(1, len(body) / BYTES_PER_TOKEN)
        await ticket.turn(Deadline.after(service.limits.queue_timeout_s))
        return Response(
            await forward_tokenize(kind, body, service.router, service.client, service.health),
            content_type="application/json",
        )

    def _route(self, method: str, path: str, handler: Callable[..., Any]) -> None:
        self.add_url_rule(
            path, path, view_func=handler, methods=[method], provide_automatic_options=False
        )

    async def _check_head(self) -> None:
        request = _this_request()
        assert request.scope is not None, "it came over ASGI"
        bytes_max = self.service.config.front.header_bytes_max
        request.fields = check_headers(list(request.scope["headers"]), bytes_max)
        request.echoed_id = client_id_of(request.fields) or request.echoed_id
        # A request for tokens is asked for its key by `service.open`.
        if request.method != "POST" or request.path not in HOT_PATHS:
            request.tenant = authorize(self.service.keys, request.path, request.fields)

    async def _answer_error(self, error: Exception) -> Response:
        request = _this_request()
        if not isinstance(error, HTTPException | NeuronDiError):
            _log.exception("internal_error", request=request.echoed_id)
        failed: Exception | Failed = error
        is_read = True  # to the request's end, so that another may follow
        if isinstance(error, RequestEntityTooLarge):
            failed, is_read = body_too_large(request.bytes_max), False
        elif isinstance(error, RequestTimeout):
            failed, is_read = body_late(self.service.config.front.body_timeout_s), False
        elif isinstance(error, HTTPException):
            failed = _failure(error)
        if request.exchange is not None and isinstance(error, HTTPException | NeuronDiError):
            refusal = request.exchange.refuse(failed)
        else:
            refusal = refusal_of(failed, request.echoed_id)
            if request.method == "POST" and request.path in HOT_PATHS:
                known = failed if isinstance(failed, Failed) else failure_of(failed)
                self.service.metrics.count_refused(known.code)
        if isinstance(error, MethodNotAllowed) and error.valid_methods:
            allowed = ("allow", ", ".join(sorted(error.valid_methods)))
            refusal = refusal._replace(headers=[*refusal.headers, allowed])
        if not is_read and request.http_version in ("1.0", "1.1"):
            refusal = refusal._replace(headers=[*refusal.headers, ("connection", "close")])
        return _response(refusal, refusal.body)


def create_app(service: Service, siblings: Siblings | None = None) -> Proxy:
    """Make the application of a service that whoever serves it has entered."""
    return Proxy(service, siblings or Siblings(service, None))


def _this_request() -> ProxyRequest:
    """The request that the running task serves."""
    assert isinstance(current_request, ProxyRequest), "the app makes its requests of this class"
    return current_request


async def _json_body(request: ProxyRequest) -> bytes:
    check_body(request.fields, is_json=True)
    try:
        # Quart's own deadline, before Python 3.12, loses the cancelling of who leaves just then.
        async with asyncio.timeout(request.body_timeout):
            body: bytes = await request.body
    except TimeoutError:
        raise RequestTimeout from None
    request.body.clear()
    return body


async def _echo_id(response: ResponseTypes) -> ResponseTypes:
    response.headers.setdefault("x-request-id", _this_request().echoed_id)
    return response


async def _end(answering: "asyncio.Task[None]") -> None:
    answering.cancel()
    await asyncio.wait((answering,))


async def _ending(
    reply: QuartReply, answering: "asyncio.Task[None]"
) -> AsyncGenerator[bytes, None]:
    """The stream; when it is left, nobody computes for it any more."""
    try:
        async for piece in reply.stream():
            yield piece
    finally:
        answering.cancel()


async def _follow(lines: Lines) -> Response:
    """The lines of an order as they come. What refuses it is raised before the first."""
    _this_request().cleanup.push_async_callback(lines.aclose)  # also if nobody reads the first
    first = await anext(lines)

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        async with aclosing(lines):
            yield msgspec.json.encode(first) + b"\n"
            async for line in lines:
                yield msgspec.json.encode(line) + b"\n"

    response = Response(all_of_them(), content_type="application/x-ndjson")
    response.timeout = None
    return response


def _response(head: Refusal, data: Any) -> Response:
    response = Response(data, status=head.status)
    response.headers.clear()
    response.headers.extend(head.headers)
    if isinstance(data, bytes):
        response.headers["content-length"] = str(len(data))
    return response


def _json_response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status=status, content_type="application/json")


def _failure(error: HTTPException) -> Failed:
    """What the web framework refuses: unknown paths, wrong methods, bodies too large or slow."""
    return Failed(
        code=error.name.lower().replace(" ", "_"),
        message=_NO_SUCH_PATH if error.code == 404 else error.description or error.name,
        http_status=error.code or 500,
        retryable=False,
    )
