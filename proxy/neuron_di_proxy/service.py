"""A request for tokens from its head to its end, whichever server has the connection.

    open      what the head tells: the request's id, the key, whether there is room for a body
    answer    the body: read, wait for a place, run all choices, write the reply
    close     the place is free again

Next: proxy/neuron_di_proxy/request_reader.py, proxy/neuron_di_proxy/choices.py
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Self

import msgspec

from neuron_di.clock import Deadline, now_s
from neuron_di.config import ProxyOptions
from neuron_di.errors import BadRequest, NeuronDiError, RateLimited
from neuron_di.obs import get_logger
from neuron_di.types import RequestId
from neuron_di.wire import Failed
from neuron_di_proxy.admin import Admin
from neuron_di_proxy.admission import Admission, Ticket
from neuron_di_proxy.answer import StreamedAnswer, WholeAnswer, route_headers
from neuron_di_proxy.choice_request import ChoiceRequest, Endpoint
from neuron_di_proxy.choices import Choice, ChoiceSink, choice_id, run_choices
from neuron_di_proxy.client_request import ClientRequest
from neuron_di_proxy.directory import CandidDirectory
from neuron_di_proxy.failure import Refusal, failure_of, refusal_of, stream_error
from neuron_di_proxy.health import Health
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.keys import Keys
from neuron_di_proxy.known_models import KnownModels
from neuron_di_proxy.metrics import Metrics
from neuron_di_proxy.model_traits import TraitsBook, TraitsUnknown
from neuron_di_proxy.openai_response import answer_to
from neuron_di_proxy.policy import POLICIES
from neuron_di_proxy.receipts import Receipt, ReceiptStore, RequestRecord, durations_of, num_taken
from neuron_di_proxy.recovery import ROUTE_POLL_S, RequestRunner
from neuron_di_proxy.reply import Headers, Reply
from neuron_di_proxy.request_id import client_id_of, fresh_id
from neuron_di_proxy.request_reader import RequestReader
from neuron_di_proxy.route import Directory, Router
from neuron_di_proxy.self_test import PairBook, PairResult, SelfTest
from neuron_di_proxy.shared_reports import SharedReports
from neuron_di_proxy.tenant import Tenant
from neuron_di_proxy.trace_context import TraceContext
from neuron_di_proxy.tracing import Tracing
from neuron_di_proxy.worker_client import WorkerClient

_log = get_logger(__name__)


class Service:
    """All that answers requests for tokens in one proxy process. Runs while entered.

    To stop: `admission.drain()`, wait for `admission`, `abandon_running`, leave.
    """

    def __init__(self, config: ProxyOptions, directory: Directory) -> None:
        self.config = config
        self.directory = directory
        self.limits = limits = config.limits
        rng = random.Random()  # noqa: S311 - spreads retries, keeps no secret
        self.client = WorkerClient(limits)
        self.health = Health(self.client, directory, limits)
        self.pairs = PairBook()
        self.admin = Admin(
            directory, self.client, self.health, self.pairs, lease_s=config.etcd.etcd_ttl_s
        )
        self._models = models = KnownModels()
        self.router = Router(
            directory,
            self.health,
            self.pairs,
            models=models,
            policy=POLICIES[config.routing.routing],
            load_of=self.health.load_of,
            rng=rng,
        )
        self.metrics = Metrics(self)
        self.runner = RequestRunner(self.client, self.router, self.health, limits, rng)
        self.keys = Keys(config.front.api_keys, config.front.processes)
        self.admission = Admission(limits, self._num_slots)
        self.receipts = ReceiptStore()
        self.tracing = Tracing(config.front.otlp_endpoint, self.metrics.count_traces)
        self._self_test = SelfTest(self.client, directory, self.health, limits, self.pairs, rng)
        self.traits = TraitsBook(directory, models)
        self.reader = RequestReader(limits.choices_max, self.traits.said_of)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for part in (self.tracing, self.client, self.health, self._self_test):
                await stack.enter_async_context(part)
            self._parts = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._parts.aclose()

    def open(self, endpoint: Endpoint, headers: Mapping[str, str]) -> "Exchange":
        """Take a request whose head has come. The caller owns the Exchange and closes it.

        `headers` by lower-case name. Raises what the head alone is refused for: BadRequest,
        Unauthorized, RateLimited, CapacityError.
        """
        client_id = client_id_of(headers)
        tenant = self.keys.tenant_of(headers.get("authorization"))
        ticket = self.arrive(tenant)
        trace = self.tracing.open(headers.get("traceparent"))
        return Exchange(self, endpoint, tenant, ticket, client_id, trace)

    def arrive(self, tenant: Tenant) -> Ticket:
        """As `Admission.arrive`. What a tenant's limits refuse is counted."""
        try:
            return self.admission.arrive(tenant)
        except RateLimited:
            self.metrics.tenants.count_limited(tenant.name)
            raise

    def refuse(
        self, error: Exception, headers: Mapping[str, str] | None = None, *, is_counted: bool = True
    ) -> Refusal:
        """The response for a request that never became an Exchange."""
        if is_counted:
            self.metrics.count_refused(failure_of(error).code)
        try:
            client_id = client_id_of(headers or {})
        except BadRequest:
            client_id = None
        return refusal_of(error, client_id or fresh_id())

    def abandon_running(self) -> None:
        """End what still runs as a failure that says so."""
        self.admission.abandon_waiting()
        self.runner.abandon()

    def model_names(self) -> list[str]:
        return self._models.names(self.directory.workers())

    def end_choice(
        self,
        tenant: Tenant,
        trace: TraceContext | None,
        request: ChoiceRequest,
        receipt: Receipt,
        code: str | None,
    ) -> None:
        """A choice is over: count it, keep its receipt, say so."""
        self.receipts.add(receipt)
        if tenant.tokens_per_minute is not None:
            self.admission.spend(tenant, num_taken(request, receipt))
        self.metrics.count(receipt, code)
        if trace is not None:
            self.tracing.end(trace, receipt, code, tenant.name)
        if not _log.shows_info():
            return
        _log.info(
            "request_end",
            request=receipt.request_id,
            tenant=tenant.name,
            prefill=receipt.prefill_worker,
            decode=receipt.decode_worker,
            attempts=len(receipt.attempts),
            continued=receipt.continued,
            tokens=receipt.num_generated,
            reason=receipt.finish_reason,
            code=code,
            **durations_of(receipt),
            trace=trace.trace_id if trace is not None else None,
        )

    def _num_slots(self) -> int:
        """This process' part of the workers' slots."""
        return -(-self.router.num_slots() // self.config.front.processes)

    # What the metrics ask for at each scrape.

    def num_running(self) -> int:
        return self.admission.num_running

    def num_waiting(self) -> int:
        return self.admission.num_waiting

    def retry_budget(self) -> float:
        return self.runner.budget.left

    def health_reports(self) -> list[HealthReport]:
        return self.health.reports()

    def pair_results(self) -> list[PairResult]:
        return self.pairs.results()

    def candid_directory(self) -> CandidDirectory | None:
        return self.health.candid_directory()


class Exchange:
    """One HTTP request for tokens. `request_id` is ours and unique; the client's is only echoed."""

    __slots__ = (
        "_arrived_s",
        "_endpoint",
        "_records",
        "_service",
        "_tenant",
        "_ticket",
        "_trace",
        "echoed_id",
        "request_id",
    )

    def __init__(
        self,
        service: Service,
        endpoint: Endpoint,
        tenant: Tenant,
        ticket: Ticket,
        client_id: str | None,
        trace: TraceContext | None,
    ) -> None:
        self._arrived_s = ticket.arrived_s
        self.request_id = RequestId(fresh_id())
        self.echoed_id = client_id or self.request_id
        self._service = service
        self._endpoint: Endpoint = endpoint
        self._tenant = tenant
        self._ticket = ticket
        self._trace = trace
        self._records: list[RequestRecord] = []

    async def answer(self, body: bytes, reply: Reply) -> None:
        """Answer the request. Whatever goes wrong is said in the reply.

        Cancelling gives the request up: its client has left.
        """
        try:
            try:
                wanted = self._read(body)
            except TraitsUnknown as unknown:
                await self._wait_until_known(unknown)
                wanted = self._read(body)
            if not self._service.admission.start_at_once(self._ticket):
                await self._wait_turn(wanted)
            await self._run(wanted, reply)
        except Exception as error:
            self._log_failure(error)
            self._fail(error, reply)

    def close(self) -> None:
        """Give the request's place back. May be called twice."""
        self._ticket.close()

    def refuse(self, error: Exception | Failed) -> Refusal:
        """The response for a request whose body cannot be had."""
        failed = error if isinstance(error, Failed) else failure_of(error)
        self._service.metrics.count_refused(failed.code)
        return refusal_of(error, self.echoed_id)

    def _read(self, body: bytes) -> ClientRequest:
        try:
            service = self._service
            wanted = service.reader.read(self._endpoint, body)
            if self._tenant.max_tokens is not None:
                wanted = self._within_tenants_limits(wanted)
            self._ticket.take(wanted.num_choices, wanted.cost)
        except TraitsUnknown:
            raise
        except NeuronDiError as error:
            self._service.metrics.count_refused(failure_of(error).code)
            raise
        return wanted

    async def _wait_until_known(self, unknown: TraitsUnknown) -> None:
        """Wait for a worker of the model: how a request is read depends on what it says."""
        service = self._service
        deadline = Deadline.after(service.limits.queue_timeout_s)
        with self._waiting(unknown.model, 1):  # how many choices it has will be read then
            while True:
                if self._ticket.refusal is not None:
                    raise self._ticket.refusal
                with suppress(TraitsUnknown):
                    service.traits.said_of(unknown.model)
                    return
                if deadline.has_passed():
                    reason = service.router.what_is_missing(unknown.model)
                    raise TraitsUnknown(unknown.model, reason)
                await service.health.wait_change(min(ROUTE_POLL_S, deadline.remaining_s()))

    async def _wait_turn(self, wanted: ClientRequest) -> None:
        with self._waiting(wanted.model, wanted.num_choices):
            await self._ticket.turn(Deadline.after(self._service.limits.queue_timeout_s))

    @contextmanager
    def _waiting(self, model: str, num_choices: int) -> Iterator[None]:
        """Count them meanwhile, and what came of it but that they may go on."""
        metrics = self._service.metrics
        counts = metrics.of(model)
        counts.num_waiting += num_choices
        try:
            yield
        except NeuronDiError as error:
            metrics.count_refused(failure_of(error).code)
            raise
        except asyncio.CancelledError:
            waited_s = now_s() - self._arrived_s
            metrics.count_left(model, self._tenant.name, num_choices, waited_s)
            raise
        finally:
            counts.num_waiting -= num_choices

    def _within_tenants_limits(self, wanted: ClientRequest) -> ClientRequest:
        sampling = wanted.sampling
        is_asked = not sampling.fits_context
        max_tokens = self._tenant.cap_tokens(
            sampling.max_tokens, is_asked=is_asked, param=sampling.max_tokens_param
        )
        if max_tokens == sampling.max_tokens:
            return wanted
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
        return msgspec.structs.replace(wanted, sampling=sampling)

    async def _run(self, wanted: ClientRequest, reply: Reply) -> None:
        service, num_choices = self._service, wanted.num_choices
        counts = service.metrics.of(wanted.model)  # one, whatever is known of the model later
        self._records = records = [
            RequestRecord(
                request_id=choice_id(self.request_id, index),
                model=wanted.model,
                tenant=self._tenant.name,
                arrived_s=self._arrived_s,
                counts=counts,
            )
            for index in range(num_choices)
        ]
        answer = answer_to(wanted, self.request_id, service.traits.of(wanted.model))
        kind = StreamedAnswer if wanted.stream else WholeAnswer
        content_type = "text/event-stream" if wanted.stream else "application/json"
        sink: ChoiceSink = kind(answer, records, reply, partial(self._headers, content_type))
        if wanted.n > 1 and wanted.options.report:
            sink = SharedReports(sink, wanted.n)
        choices: list[Choice] = []
        for index, record in enumerate(records):
            trace = None if self._trace is None else service.tracing.below(self._trace)
            request = wanted.choice(index, cache_scope=self._tenant.cache_scope)
            if trace is not None:
                request = msgspec.structs.replace(request, traceparent=trace.header())
            on_end = partial(service.end_choice, self._tenant, trace, request)
            choices.append(Choice(index, request, record, sink, on_end, counts.gaps))
        counts.num_running += num_choices
        try:
            await run_choices(choices, service.runner)
        finally:
            counts.num_running -= num_choices

    def _log_failure(self, error: Exception) -> None:
        """Say all of it here: clients are not told where things are.

        What was refused before a worker was looked for is counted, not logged: it may be a flood.
        """
        failed = failure_of(error)
        if not isinstance(error, NeuronDiError):
            _log.exception("internal_error", request=self.request_id)
        elif failed.fault != "client" and (self._records or isinstance(error, TraitsUnknown)):
            reason = failed.message
            model = error.model if isinstance(error, TraitsUnknown) else self._records[0].model
            if model not in self._service.model_names():  # then it is the client's own word
                reason = reason.replace(repr(model), "(hidden)")
            _log.warning("request_failed", request=self.request_id, code=failed.code, reason=reason)

    def _fail(self, error: Exception, reply: Reply) -> None:
        """Say it with the right status, or, where a stream has begun, as its last event.

        No DONE then, and a choice without a finish reason: the client can tell that this is
        not the end.
        """
        if reply.has_begun:
            reply.end(stream_error(error))
            return
        refusal = refusal_of(error, self.echoed_id)
        headers = [*refusal.headers, *route_headers(self._records)]
        reply.begin(refusal.status, headers, length=len(refusal.body), first=refusal.body)
        reply.end()

    def _headers(self, content_type: str) -> Headers:
        headers = [("content-type", content_type)]
        if content_type == "text/event-stream":
            # Middle boxes must pass each event on as it comes.
            headers += [("cache-control", "no-cache"), ("x-accel-buffering", "no")]
        return [*headers, ("x-request-id", self.echoed_id), *route_headers(self._records)]
