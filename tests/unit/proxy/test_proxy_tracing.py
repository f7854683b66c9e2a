"""Traces as a collector gets them: a real one that decodes with OpenTelemetry's own schema."""

import asyncio
import base64
from contextlib import AsyncExitStack

import msgspec
import pytest
from aiohttp import web
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import finished, parked, receipt, token

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di.errors import ConfigError
from neuron_di.wire import Released
from neuron_di_proxy import tracing
from neuron_di_proxy.receipts import Receipt
from neuron_di_proxy.spans import EndedChoice, spans_of
from neuron_di_proxy.trace_context import new_trace
from neuron_di_proxy.tracing import Tracing

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FIELDS = {"model": "tiny", "prompt": "a secret prompt"}
PARTS = ["answer", "prefill", "transfer", "decode"]


class Collector:
    """Takes OTLP over HTTP while entered; answers with `statuses`, then 200."""

    def __init__(self):
        self.statuses = []
        self.spans = []
        self.bodies = []
        self.num_asked = 0
        self._arrived = asyncio.Event()

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _take(self, request):
        self.num_asked += 1
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        assert request.content_type == "application/json"
        self.headers = request.headers
        body = await request.read()
        self.bodies.append(body)
        # Fails for any field that the schema does not have.
        message = json_format.Parse(body, ExportTraceServiceRequest())
        for of_resource in message.resource_spans:
            names = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            assert names["service.name"] == "neuron-di-proxy"
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        self._arrived.set()
        return web.json_response({})

    async def wait_for(self, num_spans):
        async with asyncio.timeout(30):
            while len(self.spans) < num_spans:
                self._arrived.clear()
                await self._arrived.wait()
        return self.spans


def hex_of(some_id):
    # OTLP's JSON has ids in hex, where protobuf's own would have base64.
    return base64.b64encode(some_id).decode()


def value_of(span, key):
    (value,) = (each.value for each in span.attributes if each.key == key)
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture
async def collector(stack: AsyncExitStack):
    return await stack.enter_async_context(Collector())


@pytest.fixture
def soon(monkeypatch):
    """Batches and retries without a wait worth mentioning."""
    monkeypatch.setattr(tracing, "BATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(tracing, "RETRY_DELAY_S", 0.01)


@pytest.fixture
async def traced(stack, cluster, collector, soon):
    """A proxy that sends traces, before workers that say how long things took."""

    async def prefill(leg):
        took = receipt("p1", "prefill", prefill_s=0.001, queued_s=0.25)
        await leg.send(token(leg.first_index), parked(), Released(receipt=took))

    async def decode(leg):
        for index in range(1, 4):
            await leg.send(token(index))
        end = finished(4)
        took = msgspec.structs.replace(end.receipt, decode_s=0.0005, transfer_s=0.0001, link="shm")
        await leg.send(msgspec.structs.replace(end, receipt=took))

    cluster.prefill.script, cluster.decode.script = prefill, decode
    front = FrontOptions(otlp_endpoint=collector.url)
    config = ProxyOptions(limits=AT_ONCE, front=front)
    cluster.proxy = await stack.enter_async_context(
        RunningProxy(config, [cluster.prefill.record, cluster.decode.record])
    )
    return cluster


async def ask(proxy, **more):
    async with proxy.http.post("/v1/completions", **({"json": FIELDS} | more)) as response:
        return response.status, await response.json()


async def test_an_answers_parts_are_below_the_clients_span(traced, collector):
    await ask(traced.proxy, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    spans = {span.name: span for span in await collector.wait_for(4)}
    assert list(spans) == ["answer", "queue", *PARTS[1:]]
    answer = spans.pop("answer")
    assert (hex_of(answer.trace_id), hex_of(answer.parent_span_id)) == (TRACE, SPAN)
    assert value_of(answer, "gen_ai.usage.output_tokens") == 4
    assert value_of(answer, "gen_ai.request.model") == "tiny"
    for span in spans.values():
        assert span.parent_span_id == answer.span_id
        assert hex_of(span.trace_id) == TRACE
        assert answer.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= answer.end_time_unix_nano
    assert value_of(spans["prefill"], "neuron_di.worker") == "p1"
    assert value_of(spans["transfer"], "neuron_di.kv_bytes") == 4096
    assert not any(word in b"".join(collector.bodies) for word in (b"secret", b"Once", b"upon"))
    # Both legs were told the answer's span.
    for worker in (traced.prefill, traced.decode):
        assert worker.legs[-1].message.traceparent == f"00-{TRACE}-{hex_of(answer.span_id)}-01"


async def test_a_trace_begins_here_where_the_client_has_none(traced, collector):
    await ask(traced.proxy, headers={"traceparent": "00-not-valid-01"})
    await ask(traced.proxy)
    answers = [span for span in await collector.wait_for(8) if span.name == "answer"]
    assert len({span.trace_id for span in answers}) == 2
    assert [span.parent_span_id for span in answers] == [b"", b""]


async def test_choices_of_an_answer_share_its_trace(traced, collector):
    await ask(traced.proxy, json=FIELDS | {"n": 3})
    spans = await collector.wait_for(12)
    assert len({span.trace_id for span in spans}) == 1
    assert len({span.span_id for span in spans if span.name == "answer"}) == 3


async def test_a_client_that_decided_against_it_is_not_recorded(traced, collector):
    header = f"00-{TRACE}-{SPAN}-00"
    await ask(traced.proxy, headers={"traceparent": header})
    assert traced.decode.legs[-1].message.traceparent == header
    await ask(traced.proxy)
    assert TRACE not in {hex_of(span.trace_id) for span in await collector.wait_for(4)}


async def test_a_failure_is_marked_and_names_no_words(traced, collector):
    async def fail(leg):
        await leg.break_off()

    traced.prefill.script = fail
    status, _ = await ask(traced.proxy, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert status == 500
    (answer,) = [span for span in await collector.wait_for(1) if span.name == "answer"]
    assert value_of(answer, "error.type") == "worker_failed"
    assert answer.status.code == 2
    assert b"secret" not in b"".join(collector.bodies)
    assert b"Once" not in b"".join(collector.bodies)


async def test_a_busy_collector_is_asked_again(traced, collector):
    collector.statuses = [503, 429]
    await ask(traced.proxy)
    await collector.wait_for(4)
    assert collector.num_asked == 3


async def test_without_a_collector_a_trace_is_passed_on_unchanged(playing):
    header = f"00-{TRACE}-{SPAN}-01"
    await ask(playing.proxy, headers={"traceparent": header})
    await ask(playing.proxy)
    await ask(playing.proxy, headers={"traceparent": "00-not-valid-01"})
    seen = [leg.message.traceparent for leg in playing.decode.legs]
    assert seen == [header, None, None]


def ended(**changes):
    fields = {
        "request_id": "r1",
        "attempt": 0,
        "model": "tiny",
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "finish_reason": "stop",
        "num_prompt": 1,
        "num_generated": 1,
        "num_cached": 0,
        "queued_s": 1.0,
        "ttft_s": 3.0,
        "itl_mean_s": None,
        "e2e_s": 10.0,
        "attempts": [None],
        "continued": 0,
        "grade": None,
        "link": "shm",
        "kv_bytes": 4,
        "transfer_s": 0.5,
        "verify_s": 0.0,
        "prefill": receipt("p1", "prefill", prefill_s=1.5),
        "decode": receipt("d1", "decode", decode_s=6.0),
    }
    return EndedChoice(
        trace=new_trace().below(),
        receipt=Receipt(**(fields | changes)),
        code=None,
        tenant="t",
        ended_unix_s=110.0,
    )


def times_of(choice):
    return {
        span["name"]: (int(span["startTimeUnixNano"]) / 1e9, int(span["endTimeUnixNano"]) / 1e9)
        for span in spans_of(choice)
    }


def test_where_the_parts_of_an_answer_lie():
    assert times_of(ended()) == {
        "answer": (100.0, 110.0),
        "queue": (100.0, 101.0),
        "prefill": (101.5, 103.0),  # to the first token
        "transfer": (103.0, 103.5),
        "decode": (104.0, 110.0),
    }


def test_of_several_attempts_the_last_one_lies_before_the_end():
    times = times_of(ended(attempts=[None, None]))
    assert times["prefill"] == (102.0, 103.5)
    assert times["transfer"] == (103.5, 104.0)
    assert times["decode"] == (104.0, 110.0)


def test_no_part_leaves_its_answer_whatever_workers_say():
    times = times_of(
        ended(
            prefill=receipt("p1", "prefill", prefill_s=1e6),
            decode=receipt("d1", "decode", decode_s=1e6),
            transfer_s=1e6,
        )
    )
    assert all(100 <= start_s <= end_s <= 110 for start_s, end_s in times.values())
    assert set(times_of(ended(prefill=None, decode=None, link="", queued_s=0.0))) == {"answer"}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://there/x", "http://", "collector"])
def test_an_endpoint_must_be_an_address(endpoint):
    with pytest.raises(ConfigError, match="such as http"):
        Tracing(endpoint, lambda *_: None)


def test_an_endpoint_shows_no_password():
    with pytest.raises(ConfigError, match=tracing.HEADERS_VARIABLE) as caught:
        Tracing("http://me:secret@collector:4318/v1/traces", lambda *_: None)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("text", ["secret", "a secret=1", "=secret", "key=secret%0d%0ax: y"])
def test_headers_that_are_none_are_refused_and_not_shown(monkeypatch, text):
    monkeypatch.setenv(tracing.HEADERS_VARIABLE, text)
    with pytest.raises(ConfigError, match="no list of NAME=VALUE") as caught:
        Tracing("http://127.0.0.1:1/", lambda *_: None)
    assert "secret" not in caught.value.message
    Tracing(None, lambda *_: None)


async def test_a_collector_gets_its_headers(collector, monkeypatch):
    text = "authorization=Bearer%20a%3Db , x-scope=two,"
    monkeypatch.setenv(tracing.HEADERS_VARIABLE, text)
    choice = ended()
    async with Tracing(collector.url, lambda *_: None) as traces:
        traces.end(choice.trace, choice.receipt, None, "t")
    assert collector.headers["authorization"] == "Bearer a=b"
    assert collector.headers["x-scope"] == "two"


class Counts(dict):
    def add(self, outcome, num):
        self[outcome] = self.get(outcome, 0) + num


async def test_a_collector_that_is_gone_costs_traces_and_nothing_else(soon, monkeypatch):
    monkeypatch.setattr(tracing, "QUEUE_MAX", 10)
    counts = Counts()
    choice = ended()
    async with Tracing("http://127.0.0.1:1/v1/traces", counts.add) as traces:
        for _ in range(25):
            traces.end(choice.trace, choice.receipt, None, "t")
        assert counts == {"dropped": 15}
    assert counts == {"dropped": 25}


async def test_what_is_left_is_sent_at_the_end(collector, monkeypatch):
    monkeypatch.setattr(tracing, "BATCH_INTERVAL_S", 3600)
    counts = Counts()
    choice = ended()
    async with Tracing(collector.url, counts.add) as traces:
        for _ in range(tracing.BATCH_MAX + 1):
            traces.end(choice.trace, choice.receipt, None, "t")
    assert counts == {"sent": tracing.BATCH_MAX + 1}
    assert collector.num_asked == 2


async def test_a_collector_that_refuses_is_not_asked_again(collector, soon):
    collector.statuses = [400]
    counts = Counts()
    choice = ended()
    async with Tracing(collector.url, counts.add) as traces:
        traces.end(choice.trace, choice.receipt, None, "t")
    assert counts == {"dropped": 1}
    assert collector.num_asked == 1
