"""The Quart application: OpenAI's endpoints, and what an operator asks for.

A request goes: `openai_request` reads it, `admission` takes it, `recovery` brings it to its end,
for each attempt `route` picks workers and `launch` runs both legs, `openai_response` writes.
A request for several choices is several inside: `choices` runs them all at once.

Next: proxy/neuron_di_proxy/openai_request.py
"""

import asyncio
import random
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import msgspec
from hypercorn.typing import ASGISendCallable, ASGISendEvent
from quart import Quart, Request, Response
from quart import request as current_request
from quart.asgi import ASGIHTTPConnection
from werkzeug.exceptions import HTTPException

from neuron_di.clock import unix_s
from neuron_di.errors import BadRequest, ClientError, NeuronDiError
from neuron_di.obs import get_logger
from neuron_di.types import RequestId
from neuron_di.wire import Failed
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.answer import Answering, continued_of
from neuron_di_proxy.choices import Choice, choice_id, events_of
from neuron_di_proxy.config import ProxyConfig
from neuron_di_proxy.failure import RETRY_AFTER_S, error_body, failure_of
from neuron_di_proxy.health import Health, HealthReport
from neuron_di_proxy.metrics import CONTENT_TYPE, Metrics
from neuron_di_proxy.openai_request import ClientRequest, read_chat, read_completion
from neuron_di_proxy.openai_response import answer_to
from neuron_di_proxy.receipts import ReceiptStore, RequestRecord
from neuron_di_proxy.recovery import RequestRunner
from neuron_di_proxy.route import Directory, Router
from neuron_di_proxy.self_test import PairBook, PairResult, SelfTest
from neuron_di_proxy.status import HealthAnswer, report_health, report_status
from neuron_di_proxy.worker_client import WorkerClient

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")  # printable, and safe in a header and a log

_log = get_logger(__name__)


class ReceiptNotFound(ClientError):
    """Raised when no receipt is kept under an id."""

    http_status = 404
    code = "receipt_not_found"


class ProxyRequest(Request):
    """An HTTP request with what must be undone when it ends, however it ends.

    `request_id` is ours and unique. The client's own id is only ever echoed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cleanup = AsyncExitStack()
        self.request_id = RequestId(uuid4().hex)
        self.records: list[RequestRecord] = []  # of its choices, once it asks for tokens
        self.echoed_id = self.headers.get("X-Request-Id", self.request_id)


class ProxyConnection(ASGIHTTPConnection):
    """Runs a request's clean-up in the task that runs the request.

    A client that leaves cancels that task at any await, also between the handler and the
    first byte of a stream, where a generator's own `finally` would not run.
    """

    async def handle_request(self, request: Request, send: ASGISendCallable) -> None:
        assert isinstance(request, ProxyRequest), "the app makes its requests of this class"
        assert isinstance(self.app, Proxy), "this class is the proxy's"
        send_timeout_s = self.app.limits.send_timeout_s

        async def send_in_time(event: ASGISendEvent) -> None:
            # Raises TimeoutError, which ends the response, where the client does not read.
            async with asyncio.timeout(send_timeout_s):
                await send(event)

        async with request.cleanup:
            await super().handle_request(request, send_in_time)


class Proxy(Quart):
    """The application. Before it is stopped: `drain`, wait for `admission`, `abandon_running`."""

    asgi_http_class = ProxyConnection
    request_class = ProxyRequest

    def __init__(self, config: ProxyConfig, directory: Directory) -> None:
        super().__init__(__name__, static_folder=None)
        self.config["MAX_CONTENT_LENGTH"] = config.body_bytes_max
        self.config["BODY_TIMEOUT"] = config.body_timeout_s
        self.config["RESPONSE_TIMEOUT"] = None  # it would cut a stream in silence; ours say why
        self.limits = limits = config.limits
        self.admission = Admission(limits.requests_max)
        rng = random.Random()  # noqa: S311 - spreads retries, keeps no secret
        self._client = WorkerClient(limits)
        self._health = Health(self._client, directory, limits)
        self._pairs = PairBook()
        self._router = Router(directory, self._health, self._pairs)
        self._runner = RequestRunner(self._client, self._router, self._health, limits, rng)
        self._self_test = SelfTest(self._client, directory, self._health, limits, self._pairs, rng)
        self._receipts = ReceiptStore()
        self._metrics = Metrics(self)
        self._started_unix_s = int(unix_s())

        self.while_serving(self._hold_connections)
        self.before_request(self._check_client_id)
        self.after_request(self._add_headers)
        self.register_error_handler(Exception, self._answer_error)
        self._route("POST", "/v1/completions", self.completions)
        self._route("POST", "/v1/chat/completions", self.chat_completions)
        self._route("GET", "/v1/models", self.models)
        self._route("GET", "/v1/receipts/<answer_id>", self.receipt)
        self._route("GET", "/health", self.health)
        self._route("GET", "/status", self.status)
        self._route("GET", "/metrics", self.metrics)

    def drain(self) -> None:
        """Refuse new requests from now on. Running ones go on; `admission` tells of their end."""
        self.admission.drain()

    def abandon_running(self) -> None:
        """End what still runs as a failure that says so."""
        self._runner.abandon()

    def num_running(self) -> int:
        return self.admission.num_running

    def retry_budget(self) -> float:
        return self._runner.budget.left

    def health_reports(self) -> list[HealthReport]:
        return self._health.reports()

    def pair_results(self) -> list[PairResult]:
        return self._pairs.results()

    async def completions(self) -> Response:
        return await self._generate(read_completion)

    async def chat_completions(self) -> Response:
        return await self._generate(read_chat)

    async def models(self) -> Response:
        models = [
            {
                "id": model,
                "object": "model",
                "created": self._started_unix_s,
                "owned_by": "neuron-di",
            }
            for model in self._router.models()
        ]
        return _json_response({"object": "list", "data": models})

    async def receipt(self, answer_id: str) -> Response:
        receipt = self._receipts.get(answer_id)
        if receipt is None:
            raise ReceiptNotFound(f"no receipt is kept for {answer_id!r}", param="id")
        return _json_response(receipt)

    async def health(self) -> Response:
        answer = report_health(self._router, self._health, self._pairs)
        if self.admission.is_draining:
            answer = HealthAnswer(status="unavailable", reason="the server is shutting down")
        return _json_response(answer, 503 if answer.status == "unavailable" else 200)

    async def status(self) -> Response:
        return _json_response(
            await report_status(self.admission, self._client, self._health, self._pairs)
        )

    async def metrics(self) -> Response:
        return Response(self._metrics.text(), content_type=CONTENT_TYPE)

    async def _generate(self, read: Callable[[bytes], ClientRequest]) -> Response:
        request = _this_request()
        try:
            request.cleanup.enter_context(self.admission.admit())  # bodies take memory, too
            body = await request.get_data(cache=False, as_text=False, parse_form_data=False)
            wanted = read(body)
        except Exception as error:
            self._metrics.count_refused(_failure(error).code)
            raise
        request.records = records = [
            RequestRecord(request_id=choice_id(request.request_id, index), model=wanted.model)
            for index in range(wanted.n)
        ]
        choices = [
            Choice(
                index,
                self._runner.run(wanted.choice(index), record),
                record,
                self._receipts,
                self._metrics,
            )
            for index, record in enumerate(records)
        ]
        answer = answer_to(wanted, request.request_id)
        answering = Answering(events_of(choices), answer, records)
        request.cleanup.push_async_callback(answering.close)
        if not wanted.stream:
            return Response(await answering.whole(), content_type="application/json")
        return Response(
            await answering.begin_stream(),
            content_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    def _route(self, method: str, path: str, handler: Callable[..., Any]) -> None:
        self.add_url_rule(
            path, view_func=handler, methods=[method], provide_automatic_options=False
        )

    async def _hold_connections(self) -> AsyncGenerator[None, None]:
        async with self._client, self._health, self._self_test:
            yield

    async def _check_client_id(self) -> None:
        request = _this_request()
        if _CLIENT_ID.fullmatch(request.echoed_id) is None:
            request.echoed_id = request.request_id
            raise BadRequest(
                "X-Request-Id may have 1 to 128 letters, digits and ._:/+=@-", param="X-Request-Id"
            )

    async def _add_headers(self, response: Response) -> Response:
        request = _this_request()
        response.headers["X-Request-Id"] = request.echoed_id
        if request.records:
            response.headers.update(_route_headers(request.records))
        return response

    async def _answer_error(self, error: Exception) -> Response:
        failed = _failure(error)
        if not isinstance(error, HTTPException | NeuronDiError):
            _log.exception("internal_error", request=_this_request().request_id)
        response = Response(
            error_body(failed), status=failed.http_status, content_type="application/json"
        )
        if failed.http_status in (429, 503):
            response.headers["Retry-After"] = str(RETRY_AFTER_S)
        return response


def create_app(config: ProxyConfig, directory: Directory) -> Proxy:
    """Make the application. It connects to workers only while it is served."""
    return Proxy(config, directory)


def _this_request() -> ProxyRequest:
    """The request that the running task serves."""
    assert isinstance(current_request, ProxyRequest), "the app makes its requests of this class"
    return current_request


def _json_response(document: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status=status, content_type="application/json")


def _failure(error: Exception) -> Failed:
    """What to tell the client, also of what the web framework refuses: unknown paths, wrong
    methods, bodies too large or slow."""
    if not isinstance(error, HTTPException):
        return failure_of(error)
    return Failed(
        code=error.name.lower().replace(" ", "_"),
        message=error.description or error.name,
        http_status=error.code or 500,
        retryable=False,
    )


def _route_headers(records: Sequence[RequestRecord]) -> dict[str, str]:
    """Where choice 0 comes from, and what all choices went through.

    Of a stream, as known at its first byte.
    """
    if not records[0].attempts:
        return {}
    last = records[0].attempts[-1]
    prefill, decode = last.workers()
    route = f"prefill={prefill.worker_id}; decode={decode.worker_id}"
    headers = {"X-Neuron-Di-Route": f"{route}; attempt={last.number}"}
    continued = continued_of(records)
    if continued is not None:
        headers["X-Neuron-Di-Continued"] = str(continued.continued)
    return headers
