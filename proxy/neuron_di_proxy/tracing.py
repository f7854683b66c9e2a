"""Traces of answers, sent to an OpenTelemetry collector (OTLP over HTTP, JSON).

A request that ends leaves its receipt in a queue; everything else happens behind it, a batch at
a time. A collector that is slow or gone costs traces, never requests: a full queue drops.

Next: proxy/neuron_di_proxy/spans.py
"""

import asyncio
import contextlib
import os
import re
from collections import deque
from collections.abc import Callable
from typing import Self
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from neuron_di.clock import unix_s
from neuron_di.errors import ConfigError
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.version import __version__
from neuron_di_proxy.metrics import TraceOutcome
from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.spans import EndedChoice, otlp_document, spans_of
from neuron_di_proxy.trace_context import TraceContext, new_trace, read_traceparent

QUEUE_MAX = 4096  # choices, some kilobytes each
BATCH_MAX = 256  # choices in one request to the collector
BATCH_INTERVAL_S = 1.0
SEND_TIMEOUT_S = 10.0
LAST_SEND_TIMEOUT_S = 2.0  # of all that is left when the proxy ends
RETRIES_MAX = 3
RETRY_DELAY_S = 1.0  # doubled each time
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_MAY_RETRY = frozenset({429, 502, 503, 504})  # as OTLP has it

_log = get_logger(__name__)
_troubles = LimitedLogger(__name__)  # the collector's


class Tracing:
    """Gives requests their place in a trace, and sends their spans while it is entered.

    Without an endpoint a client's `traceparent` goes on to the workers as it is, and nothing is
    recorded. With one, each request is traced, but for those whose client decided against it.
    """

    def __init__(
        self, endpoint: str | None, count_traces: Callable[[TraceOutcome, int], None]
    ) -> None:
        """Headers, as a collector's key, are in OpenTelemetry's own variable.

        Raises ConfigError for an endpoint that is no HTTP address, or headers that are none.
        """
        self._headers: dict[str, str] = {}
        if endpoint is not None:
            _check_endpoint(endpoint)
            self._headers = _headers_in(os.environ.get(HEADERS_VARIABLE, ""))
        self._endpoint = endpoint
        self._count = count_traces
        self._queue: deque[EndedChoice] = deque()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._resource: dict[str, object] = {
            "service.name": "neuron-di-proxy",
            "service.version": __version__,
            "service.instance.id": str(os.getpid()),
        }

    async def __aenter__(self) -> Self:
        if self._endpoint is not None:
            timeout = aiohttp.ClientTimeout(total=SEND_TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=timeout)
            self._task = asyncio.create_task(self._send_batches(self._endpoint))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is None or self._endpoint is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SEND_TIMEOUT_S):
                    while self._queue:
                        batch = self._take_batch()
                        await self._send(self._endpoint, batch, retries_max=0)
        finally:
            await self._http.close()
            if self._queue:
                self._count("dropped", len(self._queue))

    def open(self, traceparent: str | None) -> TraceContext | None:
        """The place of a request whose header is this. None: it is in no trace."""
        context = None if traceparent is None else read_traceparent(traceparent)
        if context is None and self._endpoint is not None:
            return new_trace()
        return context

    def below(self, context: TraceContext) -> TraceContext:
        """The place of a choice of that request, which its legs are told."""
        if self._endpoint is None or not context.is_sampled:
            # Who is not recorded is not in the trace: its workers are below the client.
            return context
        return context.below()

    def end(self, trace: TraceContext, receipt: Receipt, code: str | None, tenant: str) -> None:
        """A choice is over. Its spans are sent later, or dropped."""
        if self._endpoint is None or not trace.is_sampled:
            return
        if len(self._queue) >= QUEUE_MAX:
            self._count("dropped", 1)
            _troubles.warning("traces_dropped", reason="the collector is too slow")
            return
        self._queue.append(
            EndedChoice(
                trace=trace, receipt=receipt, code=code, tenant=tenant, ended_unix_s=unix_s()
            )
        )
        self._arrived.set()

    async def _send_batches(self, endpoint: str) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await asyncio.sleep(BATCH_INTERVAL_S)
            while self._queue:
                await self._send(endpoint, self._take_batch(), retries_max=RETRIES_MAX)

    def _take_batch(self) -> list[EndedChoice]:
        return [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]

    async def _send(self, endpoint: str, batch: list[EndedChoice], *, retries_max: int) -> None:
        """Send it, or drop it: traces are not worth more than a few tries."""
        is_sent = False
        try:
            spans = [span for ended in batch for span in spans_of(ended)]
            body = msgspec.json.encode(otlp_document(spans, self._resource))
            is_sent = await self._post(endpoint, body, retries_max)
        except Exception:  # ours; the next batch may still be sent
            _log.exception("traces_failed")
        finally:
            self._count("sent" if is_sent else "dropped", len(batch))

    async def _post(self, endpoint: str, body: bytes, retries_max: int) -> bool:
        for number in range(retries_max + 1):
            if number:
                await asyncio.sleep(RETRY_DELAY_S * 2 ** (number - 1))
            try:
                async with self._http.post(
                    endpoint,
                    data=body,
                    headers={**self._headers, "content-type": "application/json"},
                    allow_redirects=False,
                ) as response:
                    status = response.status
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                _troubles.warning("traces_not_sent", reason=type(error).__name__, tries=number + 1)
                continue
            if status < 300:
                return True
            _troubles.warning("traces_not_sent", status=status, tries=number + 1)
            if status not in _MAY_RETRY:
                return False
        return False


def _check_endpoint(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            "the OTLP endpoint must be an address such as http://127.0.0.1:4318/v1/traces",
            param="otlp_endpoint",
        )
    if "@" in parts.netloc:
        raise ConfigError(
            "the OTLP endpoint takes no user, whom everybody reads who lists processes: give "
            f"{HEADERS_VARIABLE}, such as authorization=Basic%20...",
            param="otlp_endpoint",
        )


def _headers_in(text: str) -> dict[str, str]:
    """NAME=VALUE,... with values as in a URL, as OpenTelemetry has it."""
    headers = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, has_value, value = pair.partition("=")
        name, value = name.strip(), unquote(value.strip())
        if not has_value or not _HEADER_NAME.fullmatch(name) or not value.isprintable():
            raise ConfigError(f"{HEADERS_VARIABLE} is no list of NAME=VALUE")
        headers[name] = value
    return headers
