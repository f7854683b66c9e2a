"""What GET /metrics says."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from metric_samples import parse, samples
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import make_record, token

from neuron_di.config import ProxyOptions
from neuron_di.registry import RefusedRecord
from neuron_di.wire import Failed, LaneStatus
from neuron_di_proxy.health_report import HealthReport
from neuron_di_proxy.metrics import Metrics
from neuron_di_proxy.receipts import AttemptReceipt, Receipt
from neuron_di_proxy.self_test import PairResult

FIELDS = {"model": "tiny", "prompt": "hi"}


async def test_an_answer_is_counted(playing):
    for _ in range(2):
        await playing.proxy.post("/v1/completions", **FIELDS)
    seen = await samples(playing.proxy)
    assert seen["neuron_di_requests_total", "", "length"] == 2
    assert seen["neuron_di_attempts_total", "length"] == 2
    assert seen["vllm:time_to_first_token_seconds_count", "tiny"] == 2
    assert seen["vllm:inter_token_latency_seconds_count", "tiny"] == 8
    assert seen["neuron_di_inflight",] == 0
    assert seen["neuron_di_retry_budget",] == 100


async def test_workers_are_counted_by_role_and_state(playing):
    playing.proxy.directory.records.append(make_record("p9", "prefill", 1))
    expected = {
        ("neuron_di_workers", "prefill", "up"): 1,
        ("neuron_di_workers", "decode", "up"): 1,
        ("neuron_di_workers", "down", "prefill"): 1,
        ("neuron_di_workers", "both", "up"): 0,  # what is not there is below no threshold
    }

    async def is_so():
        return expected.items() <= (await samples(playing.proxy)).items()

    await until(is_so)


async def test_what_workers_count_is_shown_of_each(playing):
    playing.decode.says = {
        "num_blocks_quarantined": 2,
        "kv_bytes_received": 8192,
        "num_kv_mismatched": 3,
        "num_leases_ended": 4,
        "num_signals_refused": 5,
        "num_stale": 6,
        "num_streams_refused": 7,
    }
    names = ("blocks_quarantined", "kv_bytes_received_total", "kv_mismatched_total")
    names += ("leases_ended_total", "signals_refused_total", "stale_total")
    names += ("streams_refused_total", "blocks_free")
    values = (2, 8192, 3, 4, 5, 6, 7, 60)
    expected = {
        (f"neuron_di_worker_{name}", "d1"): value for name, value in zip(names, values, strict=True)
    }
    expected["neuron_di_worker_stale_total", "p1"] = 0

    async def is_so():
        return expected.items() <= (await samples(playing.proxy)).items()

    await until(is_so)


async def test_each_lane_is_shown_once_with_its_reason(playing):
    tcp = {"engine": "tcp", "verdicts": 'shm: not "here"\n; tcp: chosen'}
    shm = {"engine": "shm", "verdicts": "shm: chosen"}
    rest = {"reason": "for operators", "connect_s": 0.1}
    lanes = [LaneStatus(peer="p1", **tcp, **rest)] * 2 + [LaneStatus(peer="p2", **shm, **rest)]
    playing.decode.says = {"lanes": lanes}
    expected = {
        ("neuron_di_worker_lane", *sorted(("d1", "p1", "tcp", tcp["verdicts"]))): 1,
        ("neuron_di_worker_lane", *sorted(("d1", "p2", "shm", "shm: chosen"))): 1,
    }

    async def is_so():
        seen = await samples(playing.proxy)
        return expected == {key: seen[key] for key in seen if key[0] == "neuron_di_worker_lane"}

    await until(is_so)
    async with playing.proxy.http.get("/metrics") as response:
        assert (await response.text()).count("neuron_di_worker_lane{") == 2


async def test_a_worker_that_never_answered_has_no_counts(playing):
    playing.proxy.directory.records.append(make_record("p9", "prefill", 1))
    seen = await samples(playing.proxy)
    assert ("neuron_di_worker_stale_total", "p9") not in seen


async def test_failures_are_counted_by_their_code(cluster):
    async def refuse(leg):
        await leg.send(Failed(code="over_capacity", message="", http_status=503, retryable=True))

    cluster.prefill.script = refuse
    await cluster.proxy.post("/v1/completions", **FIELDS)
    await cluster.proxy.post("/v1/completions", model="tiny")
    await cluster.proxy.post("/v1/completions", model="large", prompt="hi")
    seen = await samples(cluster.proxy)
    assert seen["neuron_di_requests_total", "error", "over_capacity"] == 1
    assert seen["neuron_di_requests_total", "error", "invalid_request"] == 1
    assert seen["neuron_di_requests_total", "error", "model_not_found"] == 1
    assert seen["neuron_di_attempts_total", "over_capacity"] == 1


@pytest.mark.parametrize(("fault", "status", "num"), [("client", 400, 0), ("us", 500, 1)])
async def test_what_a_worker_refuses_for_the_clients_own_fault_is_no_answer(
    cluster, fault, status, num
):
    code = {"client": "invalid_request", "us": "internal_error"}[fault]

    async def refuse(leg):
        await leg.send(
            Failed(code=code, message="", http_status=status, retryable=False, fault=fault)
        )

    cluster.prefill.script = refuse
    await cluster.proxy.post("/v1/completions", **FIELDS)
    seen = await samples(cluster.proxy)
    assert seen["neuron_di_requests_total", "error", code] == 1
    assert seen["vllm:request_success_total", "error", "tiny"] == num
    assert seen["vllm:e2e_request_latency_seconds_count", "tiny"] == num


async def test_who_waits_for_a_worker_waits_and_its_receipt_says_how_long(playing, stack):
    records = [playing.prefill.record]
    limits = replace(AT_ONCE, queue_timeout_s=30)
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), records))
    asking = asyncio.create_task(proxy.post("/v1/completions", **FIELDS))

    async def waits():
        seen = await samples(proxy)
        return seen.get(("vllm:num_requests_waiting", "tiny")) == 1

    await until(waits)
    assert (await samples(proxy))["vllm:num_requests_running", "tiny"] == 0
    await asyncio.sleep(0.2)  # at least so long
    proxy.directory.records.append(playing.decode.record)
    status, answer = await asking
    assert status == 200
    seen = await samples(proxy)
    assert seen["vllm:num_requests_waiting", "tiny"] == 0
    assert seen["vllm:num_requests_running", "tiny"] == 0
    _, receipt = await proxy.get(f"/v1/receipts/{answer['id']}")
    assert 0.2 <= receipt["queued_s"] <= receipt["e2e_s"]
    assert seen["vllm:request_queue_time_seconds_sum", "tiny"] >= 0.2


async def test_a_client_that_leaves_is_counted(cluster):
    body = FIELDS | {"stream": True}
    opening = asyncio.create_task(cluster.proxy.http.post("/v1/completions", json=body))
    await (await cluster.prefill.next_leg()).send(token(0))
    (await opening).close()

    async def is_so():
        seen = await samples(cluster.proxy)
        return seen["neuron_di_requests_total", "", "cancelled"] == 1

    await until(is_so)


async def test_a_client_that_leaves_before_its_turn_is_counted_and_so_is_its_wait(cluster, stack):
    limits = replace(AT_ONCE, requests_max=1, queue_timeout_s=30)
    records = cluster.proxy.directory.records
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), records))
    running = asyncio.create_task(proxy.http.post("/v1/completions", json=FIELDS))
    await cluster.prefill.next_leg()
    waiting = [
        asyncio.create_task(proxy.http.post("/v1/completions", json=FIELDS | {"n": n}))
        for n in (1, 2)
    ]

    async def num_waiting():
        return (await samples(proxy))["vllm:num_requests_waiting", "tiny"]

    async def all_wait():
        return await num_waiting() == 3

    await until(all_wait)
    for each in waiting:
        each.cancel()

    async def nobody_waits():
        return await num_waiting() == 0

    await until(nobody_waits)
    seen = await samples(proxy)
    assert seen["neuron_di_requests_total", "", "cancelled"] == 3
    assert seen["vllm:request_success_total", "abort", "tiny"] == 3
    assert seen["vllm:request_queue_time_seconds_count", "tiny"] == 3
    assert seen["vllm:request_queue_time_seconds_sum", "tiny"] > 0
    assert seen["vllm:e2e_request_latency_seconds_count", "tiny"] == 3
    running.cancel()


async def test_two_proxies_count_apart(playing, stack):
    other = await stack.enter_async_context(
        RunningProxy(ProxyOptions(limits=AT_ONCE), playing.proxy.directory.records)
    )
    await playing.proxy.post("/v1/completions", **FIELDS)
    assert (await samples(other))["neuron_di_requests_total", "", "length"] == 0


class NoGauges:
    results: tuple = ()

    def num_running(self):
        return 3

    def num_waiting(self):
        return 2

    def retry_budget(self):
        return 1.5

    def health_reports(self):
        return [HealthReport(make_record("p1", "prefill"), "up", "")]

    def pair_results(self):
        return self.results

    def candid_directory(self):
        return None


def receipt(*attempts, **changes):
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
        "queued_s": 0.0,
        "ttft_s": None,
        "itl_mean_s": None,
        "e2e_s": 1.0,
        "attempts": list(attempts),
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


def attempt(code):
    return AttemptReceipt(
        attempt=0,
        prefill_worker="p1",
        decode_worker="d1",
        first_index=0,
        num_tokens=0,
        code=code,
        blamed=None,
    )


def test_every_attempt_and_each_continued_answer_is_counted():
    metrics = Metrics(NoGauges())
    metrics.count(
        receipt(attempt("peer_gone"), attempt("kv_corrupt"), attempt(None), grade="exact"), None
    )
    seen = parse(metrics.text().decode())
    assert seen["neuron_di_continued_total", "exact"] == 1
    for reason in ("peer_gone", "kv_corrupt", "stop"):
        assert seen["neuron_di_attempts_total", reason] == 1


def test_moved_bytes_and_the_time_to_verify_them_are_summed():
    metrics = Metrics(NoGauges())
    for _ in range(3):
        metrics.count(
            receipt(attempt(None), link="shm", form="direct", kv_bytes=4096, verify_s=0.5), None
        )
    seen = parse(metrics.text().decode())
    assert seen["neuron_di_kv_bytes_total", "shm"] == 3 * 4096
    assert seen["neuron_di_hand_overs_total", "direct", "shm"] == 3
    assert seen["neuron_di_kv_verify_seconds_total",] == 1.5


@pytest.mark.parametrize("first", ["asgi", "process"])
def test_an_answer_that_was_too_late_is_counted_whatever_was_imported_first(first):
    """A body that comes too late has the same code, and is no answer: it is never a receipt."""
    script = f"""
import sys
sys.path = {sys.path}
import neuron_di_proxy.{first}
from test_proxy_metrics import Metrics, NoGauges, attempt, receipt

metrics = Metrics(NoGauges())
code = "request_timeout"
metrics.count(receipt(attempt(code), finish_reason="error", num_generated=0), code)
print(metrics.text().decode())
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert parse(ended.stdout)["vllm:request_success_total", "error", "tiny"] == 1, ended.stderr


@pytest.mark.parametrize(("num_generated", "num_counted"), [(0, 0), (3, 1)])
def test_a_refused_request_is_no_answer_unless_tokens_came(num_generated, num_counted):
    metrics, code = Metrics(NoGauges()), "invalid_request"
    metrics.count(receipt(attempt(code), finish_reason="error", num_generated=num_generated), code)
    seen = parse(metrics.text().decode())
    assert seen.get(("vllm:request_success_total", "error", "tiny"), 0) == num_counted
    assert seen["neuron_di_requests_total", "error", "invalid_request"] == 1


@pytest.mark.parametrize("code", ["made_up_by_a_worker", "x" * 10_000])
def test_a_code_that_is_not_ours_makes_no_label(code):
    metrics = Metrics(NoGauges())
    metrics.count(receipt(attempt(code), finish_reason="error"), code)
    seen = parse(metrics.text().decode())
    assert seen["neuron_di_requests_total", "error", "other"] == 1
    assert seen["neuron_di_attempts_total", "other"] == 1


def test_a_pair_is_shown_once_as_its_last_processes_are():
    gauges = NoGauges()
    decode = make_record("d1", "decode")
    gauges.results = (
        PairResult(make_record("p1", "prefill"), decode, "failed", "x", 0.0),
        PairResult(make_record("p1", "prefill", incarnation="later"), decode, "ok", "", 1.0),
        PairResult(make_record("p2", "prefill"), decode, "failed", "x", 0.0),
    )
    seen = parse(Metrics(gauges).text().decode())
    assert seen["neuron_di_pair_degraded", "d1", "p1"] == 0
    assert seen["neuron_di_pair_degraded", "d1", "p2"] == 1
    assert (seen["neuron_di_inflight",], seen["neuron_di_retry_budget",]) == (3, 1.5)


class Troubled:
    """A directory with something to tell."""

    def trouble(self):
        return "the registry does not answer"

    def refused(self):
        return [RefusedRecord("/workers/x", "", "no")] * 3

    def num_ignored_by_fault(self):
        return {"key": 7, "too many": 1}


def test_what_is_wrong_with_the_registry():
    class Gauges(NoGauges):
        def health_reports(self):
            return [
                HealthReport(make_record(name, "decode"), "up", "", vanished_s=age_s)
                for name, age_s in (("d1", 3.0), ("d2", None))
            ]

        def candid_directory(self):
            return Troubled()

    told = parse(Metrics(Gauges()).text().decode())
    assert told["neuron_di_registry_trouble",] == 1
    assert told["neuron_di_registry_vanished",] == 1
    assert told["neuron_di_registry_refused",] == 3
    assert told["neuron_di_registry_ignored_total", "key"] == 7
    assert told["neuron_di_registry_ignored_total", "too many"] == 1
    calm = parse(Metrics(NoGauges()).text().decode())
    assert calm["neuron_di_registry_trouble",] == calm["neuron_di_registry_refused",] == 0


async def test_what_has_not_happened_is_there_as_zero(playing, stack):
    """Or a monitoring system sees no increase when it does for the first time."""
    fresh = await stack.enter_async_context(
        RunningProxy(ProxyOptions(limits=AT_ONCE), playing.proxy.directory.records)
    )
    seen = await samples(fresh)
    for name, labels in (
        ("neuron_di_requests_total", ("", "stop")),
        ("neuron_di_requests_total", ("error", "worker_failed")),
        ("neuron_di_attempts_total", ("peer_gone",)),
        ("neuron_di_continued_total", ("exact",)),
        ("neuron_di_registry_ignored_total", ("address",)),
        ("neuron_di_transfer_failures_total", ("kv_corrupt",)),
        ("vllm:prompt_tokens_total", ("tiny",)),
        ("vllm:request_success_total", ("stop", "tiny")),
    ):
        assert seen[name, *labels] == 0
