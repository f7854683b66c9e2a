"""What clients see of recovery: over real HTTP, with workers that really hang up."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
from running_proxy import AT_ONCE, RunningProxy, read_events, until
from scripted_worker import (
    WORDS,
    ScriptedWorker,
    play_decode,
    play_prefill,
    token,
)

from neuron_di.config import ProxyOptions
from neuron_di.wire import Failed

FIVE_WORDS = "".join(WORDS[:5])
FIELDS = {"model": "tiny", "prompt": "hi"}
STREAM = FIELDS | {"stream": True}
LIMITS = replace(
    AT_ONCE,
    retries_max=2,
    continuations_max=2,
    queue_timeout_s=5,
    probe_interval_s=0.05,
)


class Cluster2x2:
    """Two prefill and two decode workers behind a proxy. It takes p1 and d1 first."""

    def __init__(self, workers, proxy):
        self.p1, self.p2, self.d1, self.d2 = self.workers = workers
        self.proxy = proxy

    async def stream(self, **fields):
        """Headers and events of one streamed completion."""
        async with self.proxy.http.post("/v1/completions", json=STREAM | fields) as response:
            assert response.status == 200
            return response.headers, [event async for event in read_events(response)]

    async def pairs(self):
        """The pairs that were tested."""
        return (await self.proxy.get("/status"))[1]["pairs"]

    async def until_health(self, status):
        """Wait for this status of GET /health, and return what else it says."""
        body = {}

        async def is_so():
            nonlocal body
            _, body = await self.proxy.get("/health")
            return body["status"] == status

        await until(is_so)
        return body


@pytest.fixture
async def make(stack):
    async def make(**limits):
        workers = []
        for name in ("p1", "p2", "d1", "d2"):
            role, script = (
                ("prefill", play_prefill) if name[0] == "p" else ("decode", play_decode(5))
            )
            workers.append(await stack.enter_async_context(ScriptedWorker(name, role, script)))
        config = ProxyOptions(limits=replace(LIMITS, **limits))
        records = [worker.record for worker in workers]
        return Cluster2x2(workers, await stack.enter_async_context(RunningProxy(config, records)))

    return make


def hang_up_after(num_tokens):
    async def script(leg):
        await leg.send(*(token(leg.first_index + 1 + i) for i in range(num_tokens)))
        leg.hang_up()
        await asyncio.Event().wait()

    return script


async def hang_up(leg):
    leg.hang_up()
    await asyncio.Event().wait()


async def test_an_undisturbed_answer_has_openais_shape_and_says_its_route(make):
    cluster = await make()
    headers, events = await cluster.stream()
    assert headers["X-Neuron-Di-Route"] == "prefill=p1; decode=d1; attempt=0"
    assert "X-Neuron-Di-Continued" not in headers
    assert not [event for event in events if "neuron_di" in event]
    async with cluster.proxy.http.post("/v1/completions", json=FIELDS) as response:
        assert response.headers["X-Neuron-Di-Route"] == "prefill=p2; decode=d2; attempt=0"
        assert "X-Neuron-Di-Continued" not in response.headers
        assert set(await response.json()) == {
            "id", "created", "model", "object", "choices", "usage",
        }  # fmt: skip


async def test_a_retry_is_only_visible_in_the_route(make):
    cluster = await make()
    cluster.p1.script = hang_up
    headers, events = await cluster.stream()
    assert headers["X-Neuron-Di-Route"] == "prefill=p2; decode=d2; attempt=1"
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == FIVE_WORDS
    assert not any("neuron_di" in chunk for chunk in chunks)
    [first], [second] = cluster.p1.legs, cluster.p2.legs
    assert first.message.request_id == second.message.request_id
    assert (first.message.attempt, second.message.attempt) == (0, 1)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_a_continued_stream_says_so_in_its_final_chunk(make, num_tokens):
    cluster = await make()
    cluster.d1.script = hang_up_after(num_tokens)
    headers, events = await cluster.stream()
    assert headers["X-Neuron-Di-Route"] == "prefill=p1; decode=d1; attempt=0"  # when it began
    *chunks, last = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == FIVE_WORDS
    assert not any("neuron_di" in chunk for chunk in chunks)
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["neuron_di"] == {"continued": 1, "grade": "recomputed"}
    _, receipt = await cluster.proxy.get(f"/v1/receipts/{last['id']}")
    assert (receipt["continued"], receipt["grade"], receipt["attempt"]) == (1, "recomputed", 1)
    assert [
        (a["decode_worker"], a["first_index"], a["num_tokens"]) for a in receipt["attempts"]
    ] == [
        ("d1", 0, num_tokens + 1),
        ("d2", num_tokens + 1, 4 - num_tokens),
    ]
    assert [(a["code"], a["blamed"]) for a in receipt["attempts"]] == [
        ("peer_gone", "d1"),
        (None, None),
    ]


async def test_a_continued_document_says_so_in_a_header_and_a_member(make):
    cluster = await make()
    cluster.d1.script = hang_up_after(2)
    async with cluster.proxy.http.post("/v1/completions", json=FIELDS) as response:
        assert response.headers["X-Neuron-Di-Continued"] == "1"
        assert response.headers["X-Neuron-Di-Route"].endswith("decode=d2; attempt=1")
        answer = await response.json()
    assert answer["choices"][0]["text"] == FIVE_WORDS
    assert answer["neuron_di"] == {"continued": 1, "grade": "recomputed"}


async def test_openais_client_reads_a_continued_stream(make):
    cluster = await make()
    cluster.d1.script = hang_up_after(2)
    stream = await cluster.proxy.openai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == [*WORDS[:5], None]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].neuron_di == {"continued": 1, "grade": "recomputed"}


async def test_when_everything_fails_after_the_first_byte_the_stream_ends_with_an_error(make):
    cluster = await make()
    cluster.d1.script = cluster.d2.script = hang_up_after(1)
    _, events = await cluster.stream()
    *chunks, last = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == FIVE_WORDS + WORDS[5]
    assert last["error"]["code"] == "peer_gone"
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)


async def test_when_everything_fails_before_it_the_status_says_so(make):
    cluster = await make()
    cluster.p1.script = cluster.p2.script = hang_up
    async with cluster.proxy.http.post("/v1/completions", json=STREAM) as response:
        assert response.status == 502
        assert response.headers["X-Neuron-Di-Route"].endswith("attempt=2")
        assert (await response.json())["error"]["code"] == "peer_gone"


async def test_no_worker_in_time_is_503(make):
    cluster = await make(queue_timeout_s=0.2)
    cluster.proxy.directory.records.remove(cluster.d1.record)
    await cluster.d2.stop()
    async with cluster.proxy.http.post("/v1/completions", json=STREAM) as response:
        assert response.status in (502, 503)
    async with cluster.proxy.http.post("/v1/completions", json=STREAM) as response:
        assert response.status == 503
        assert "Retry-After" in response.headers
        message = (await response.json())["error"]["message"]
    assert "no decode worker" in message
    assert "d2 is gone" in message


async def test_a_clients_own_fault_is_told_once(make):
    async def refuse(leg):
        await leg.send(
            Failed(code="too_long", message="m", http_status=400, retryable=False, fault="client")
        )

    cluster = await make()
    cluster.p1.script = refuse
    with pytest.raises(openai.BadRequestError):
        await cluster.proxy.openai.completions.create(model="tiny", prompt="hi")
    assert (len(cluster.p1.legs), len(cluster.p2.legs)) == (1, 0)


async def test_the_deadline_ends_a_stream_with_an_error_event(make):
    async def stay(leg):
        await leg.send(token(1))
        await leg.ended.wait()

    cluster = await make(request_timeout_s=1.0)
    cluster.d1.script = stay
    _, events = await cluster.stream()
    last = json.loads(events[-1])
    assert last["error"]["code"] == "request_timeout"
    await cluster.d1.legs[0].closed.wait()


async def test_a_frozen_worker_is_left_although_its_connections_stay_open(make):
    async def freeze(leg):
        await leg.send(token(1))
        cluster.d1.freeze()
        await leg.ended.wait()

    cluster = await make(freeze_timeout_s=1.0)
    cluster.d1.script = freeze
    _, events = await cluster.stream()
    last = json.loads(events[-2])
    assert last["neuron_di"]["continued"] == 1
    status, body = await cluster.proxy.get("/health")
    assert (status, body["status"]) == (200, "degraded")
    assert [(each["prefill"], each["decode"]) for each in body["degraded"]] == [(None, "d1")]
    cluster.d1.thaw()
    assert await cluster.until_health("ok") == {"status": "ok"}


async def test_a_restarted_worker_serves_again(make):
    cluster = await make()
    old = cluster.d1.record
    cluster.d1.restart()
    body = await cluster.until_health("degraded")
    assert "another process" in body["degraded"][0]["reason"]
    records = cluster.proxy.directory.records
    records[records.index(old)] = cluster.d1.record
    assert await cluster.until_health("ok") == {"status": "ok"}
    for _ in range(2):
        await cluster.stream()
    assert len(cluster.d1.legs) == 1


async def test_a_pair_that_cannot_hand_over_is_degraded_and_avoided(make):
    async def fail(leg):
        fault = {"code": "kv_error", "message": "no link", "http_status": 502, "retryable": True}
        if leg.message.prefill.worker_id == "p1":
            await leg.send(Failed(**fault))
        else:
            await play_decode(2)(leg)

    cluster = await make()
    cluster.d1.self_test = fail
    body = await cluster.until_health("degraded")
    assert {"prefill": "p1", "decode": "d1", "reason": "no link"} in body["degraded"]
    for _ in range(4):
        await cluster.stream()
    partners = {leg.message.prefill.worker_id for leg in cluster.d1.legs}
    assert partners <= {"p2"}


async def test_a_self_test_is_no_request(make):
    cluster = await make()

    async def all_are_tested():
        return len(await cluster.pairs()) == 4

    await until(all_are_tested)
    _, body = await cluster.proxy.get("/status")
    assert {pair["outcome"] for pair in body["pairs"]} == {"ok"}
    assert (body["proxy"]["num_admitted"], body["proxy"]["num_running"]) == (0, 0)
    assert [len(worker.self_tests) for worker in cluster.workers] == [2, 2, 2, 2]


async def test_a_worker_that_stalls_is_left(make):
    async def stall(leg):
        await leg.send(token(1))
        while True:
            await leg.keep_alive()
            await asyncio.sleep(0.01)

    cluster = await make(stall_timeout_s=1.0)
    cluster.d1.script = stall
    _, events = await cluster.stream()
    assert json.loads(events[-2])["neuron_di"]["continued"] == 1
