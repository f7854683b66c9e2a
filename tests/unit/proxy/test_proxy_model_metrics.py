"""What is counted of each model, under vLLM's names."""

import asyncio
import logging

import pytest
from metric_samples import parse, samples
from msgspec import structs
from running_proxy import RunningProxy, until
from scripted_worker import make_record, play_decode, play_prefill, receipt, token

from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di.wire import Failed
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.histogram import Histogram
from neuron_di_proxy.metrics import LINKS_MAX, MODELS_MAX, Metrics
from neuron_di_proxy.receipts import AttemptReceipt, Receipt

FIELDS = {"model": "tiny", "prompt": "hi"}


class Models:
    """What a proxy knows at this moment: workers of these models."""

    def __init__(self, *models):
        self.models = list(models)

    def num_running(self):
        return 0

    def num_waiting(self):
        return 0

    def retry_budget(self):
        return 1.0

    def health_reports(self):
        return [
            HealthReport(make_record("w", "both", model=each), "up", "") for each in self.models
        ]

    def pair_results(self):
        return []

    def candid_directory(self):
        return None


def ended(*num_tokens, **changes):
    attempts = [
        AttemptReceipt(
            attempt=number,
            prefill_worker="p1",
            decode_worker="d1",
            first_index=0,
            num_tokens=num,
            code=None,
            blamed=None,
        )
        for number, num in enumerate(num_tokens)
    ]
    fields = {
        "request_id": "r1",
        "attempt": 0,
        "model": "tiny",
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "finish_reason": "stop",
        "num_prompt": 7,
        "num_generated": sum(num_tokens),
        "num_cached": 3,
        "queued_s": 0.5,
        "ttft_s": 0.75,
        "itl_mean_s": None,
        "e2e_s": 1.0,
        "attempts": attempts,
        "continued": 0,
        "grade": None,
        "link": "",
        "kv_bytes": 0,
        "transfer_s": 0.0,
        "verify_s": 0.0,
        "prefill": None,
        "decode": None,
    }
    return Receipt(**(fields | changes))


def test_a_histogram_counts_as_prometheus_does():
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 3, 100):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.5", 3), ("+Inf", 5)]
    assert (histogram.count(), histogram.total) == (5, 106.5)


async def test_an_answer_is_counted_as_vllm_counts_it(playing):
    for _ in range(2):
        status, answer = await playing.proxy.post("/v1/completions", **FIELDS)
        assert status == 200
    seen = await samples(playing.proxy)
    assert seen["vllm:prompt_tokens_total", "tiny"] == 2 * answer["usage"]["prompt_tokens"]
    assert seen["vllm:generation_tokens_total", "tiny"] == 2 * answer["usage"]["completion_tokens"]
    assert seen["vllm:request_success_total", "length", "tiny"] == 2
    assert seen["vllm:request_success_total", "abort", "tiny"] == 0
    assert seen["vllm:num_requests_running", "tiny"] == 0
    assert seen["vllm:num_requests_waiting", "tiny"] == 0
    assert seen["neuron_di_transfer_seconds_count", "shm"] == 2
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert seen[f"vllm:{name}_seconds_count", "tiny"] == 2
    for name in ("prompt", "generation"):
        assert seen[f"vllm:request_{name}_tokens_sum", "tiny"] == 10

    async def is_shown():
        return (await samples(playing.proxy)).get(
            ("vllm:kv_cache_usage_perc", "d1", "tiny")
        ) == 1 / 16

    await until(is_shown)


async def test_who_runs_and_who_waits_is_seen_meanwhile(stack, cluster):
    config = ProxyOptions(limits=LimitOptions(requests_max=2, drain_timeout_s=2))
    workers = [cluster.prefill.record, cluster.decode.record]
    proxy = await stack.enter_async_context(RunningProxy(config, workers))
    both = asyncio.create_task(proxy.post("/v1/completions", n=2, **FIELDS))
    await cluster.prefill.next_leg()
    third = asyncio.create_task(proxy.post("/v1/completions", **FIELDS))

    async def is_so():
        seen = await samples(proxy)
        numbers = [
            seen.get((f"vllm:num_requests_{kind}", "tiny")) for kind in ("running", "waiting")
        ]
        return [*numbers, seen["neuron_di_inflight",], seen["neuron_di_waiting",]] == [2, 1, 1, 1]

    await until(is_so)
    third.cancel()
    both.cancel()
    await asyncio.gather(both, third, return_exceptions=True)

    async def is_over():
        seen = await samples(proxy)
        return (
            seen["vllm:num_requests_running", "tiny"],
            seen["vllm:num_requests_waiting", "tiny"],
            seen["vllm:request_success_total", "abort", "tiny"],
        ) == (0, 0, 3)  # who left before its turn is counted, too

    await until(is_over)


async def test_who_came_before_all_workers_is_counted_in_one_place(stack, cluster):
    """No worker's name is known then; when one is, fewer than none would run under it."""
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(), []))
    asking = asyncio.create_task(proxy.post("/v1/completions", **FIELDS))

    async def waits():
        return (await samples(proxy)).get(("vllm:num_requests_waiting", "other")) == 1

    await until(waits)
    proxy.directory.records.append(cluster.prefill.record)

    async def waits_as_the_models():
        return (await samples(proxy)).get(("vllm:num_requests_waiting", "tiny")) == 1

    await until(waits_as_the_models)
    seen = await samples(proxy)
    kinds = ("running", "waiting")
    assert [seen[f"vllm:num_requests_{kind}", "tiny"] for kind in kinds] == [0, 1]
    assert [seen[f"vllm:num_requests_{kind}", "other"] for kind in kinds] == [0, 0]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_who_waited_too_long_is_counted_as_refused(stack, cluster):
    limits = LimitOptions(requests_max=1, queue_timeout_s=0.05, drain_timeout_s=2)
    workers = [cluster.prefill.record, cluster.decode.record]
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), workers))
    first = asyncio.create_task(proxy.post("/v1/completions", **FIELDS))
    await cluster.prefill.next_leg()
    status, _ = await proxy.post("/v1/completions", **FIELDS)
    assert status == 503
    assert (await samples(proxy))["neuron_di_requests_total", "error", "over_capacity"] == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_tokens_are_counted_while_they_come(cluster):
    body = FIELDS | {"stream": True}
    opening = asyncio.create_task(cluster.proxy.http.post("/v1/completions", json=body))
    await play_prefill(await cluster.prefill.next_leg())
    decode = await cluster.decode.next_leg()
    await decode.send(token(1), token(2))

    async def has_come(num):
        seen = await samples(cluster.proxy)
        return seen.get(("vllm:generation_tokens_total", "tiny")) == num

    await until(lambda: has_come(2))  # the first one is counted with its answer
    (await opening).close()
    await until(lambda: has_come(3))


@pytest.mark.parametrize(
    ("attempts", "num_gaps", "num_generated"),
    [((5,), 4, 5), ((2, 3), 4, 5), ((4,), 3, 5), ((0,), 0, 0), ((1,), 0, 1)],
)
def test_no_token_is_counted_twice_or_forgotten(attempts, num_gaps, num_generated):
    metrics = Metrics(Models("tiny"))
    for _ in range(num_gaps):
        metrics.of("tiny").gaps.observe(0.01)
    metrics.count(ended(*attempts, num_generated=num_generated), None)
    seen = parse(metrics.text().decode())
    assert seen["vllm:generation_tokens_total", "tiny"] == num_generated
    assert seen["vllm:prefix_cache_queries_total", "tiny"] == 7
    assert seen["vllm:prefix_cache_hits_total", "tiny"] == 3


def test_attempts_that_gave_way_are_counted():
    metrics = Metrics(Models("tiny"))
    answer = ended(2, 3, num_generated=5)
    gave_way = structs.replace(answer.attempts[0], code="preempted")
    metrics.count(structs.replace(answer, attempts=(gave_way, *answer.attempts[1:])), None)
    seen = parse(metrics.text().decode())
    assert seen["vllm:num_preemptions_total", "tiny"] == 1
    assert seen["neuron_di_attempts_total", "preempted"] == 1


def test_the_time_in_queues_is_ours_and_the_workers():
    metrics = Metrics(Models("tiny"))
    metrics.count(ended(1, prefill=receipt("p1", "prefill", queued_s=0.25, prefill_s=2)), None)
    seen = parse(metrics.text().decode())
    assert seen["vllm:request_queue_time_seconds_sum", "tiny"] == 0.75
    assert seen["vllm:request_prefill_time_seconds_sum", "tiny"] == 2
    assert seen["vllm:request_decode_time_seconds_count", "tiny"] == 0


def test_labels_are_bounded_whatever_clients_and_workers_name():
    models = Models(*(f"m{number}" for number in range(MODELS_MAX + 10)))
    metrics = Metrics(models)
    for number in range(1000):
        metrics.count(ended(1, model=f"made-up-{number}", kv_bytes=1, link=f"l{number}"), None)
    for name in models.models:
        metrics.count(ended(1, model=name), None)
    models.models = ["m0"]
    metrics.count(ended(1, model="m1"), None)  # it was known once
    seen = parse(metrics.text().decode())
    named = {key[-1] for key in seen if key[0] == "vllm:prompt_tokens_total"}
    assert len(named) == MODELS_MAX
    assert {"other", "m0", "m1"} <= named
    assert seen["vllm:prompt_tokens_total", "m1"] == 14
    links = {key[-1] for key in seen if key[0] == "neuron_di_transfer_seconds_sum"}
    assert len(links) == LINKS_MAX + 1
    assert seen["neuron_di_transfer_seconds_count", "other"] == 1000 - LINKS_MAX


async def test_hand_overs_that_fail_are_counted_by_code(cluster):
    async def fail(leg):
        await leg.send(Failed(code="kv_expired", message="", http_status=502, retryable=True))

    cluster.prefill.script, cluster.decode.script = play_prefill, fail
    await cluster.proxy.post("/v1/completions", **FIELDS)
    assert (await samples(cluster.proxy))["neuron_di_transfer_failures_total", "kv_expired"] == 1


async def test_the_line_at_a_requests_end_says_where_the_time_went(cluster, caplog):
    caplog.set_level(logging.INFO)
    cluster.prefill.script, cluster.decode.script = play_prefill, play_decode(3)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with cluster.proxy.http.post("/v1/completions", json=FIELDS, headers=headers) as response:
        assert response.status == 200
    lines = [getattr(record, "event_fields", {}) for record in caplog.records]
    (line,) = [each for each in lines if each.get("event") == "request_end"]
    assert line["trace"] == trace_id
    assert line["tenant"]
    assert line["transfer_s"] == 0.25
    assert 0 <= line["queued_s"] <= line["ttft_s"] <= line["e2e_s"]
    assert {"prefill_s", "decode_s"} <= set(line)
