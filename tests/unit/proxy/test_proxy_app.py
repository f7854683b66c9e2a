"""The endpoints, with real clients over real HTTP."""

import asyncio
import json

import openai
import pytest
from running_proxy import read_events
from scripted_worker import (
    WORDS,
    ScriptedWorker,
    finished,
    make_record,
    parked,
    play_decode,
    play_prefill,
    released,
    token,
)

from neuron_di.wire import Failed, TokenLogprob, TokenLogprobs

MESSAGES = [{"role": "user", "content": "Tell me a story"}]
FIVE_WORDS = "".join(WORDS[:5])


async def stream_events(cluster, **fields):
    body = {"model": "tiny", "prompt": "hi", "stream": True} | fields
    async with cluster.proxy.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        return [event async for event in read_events(response)]


async def test_a_chat_as_one_document(playing):
    answer = await playing.proxy.openai.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == FIVE_WORDS
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
    }


async def test_a_completion_as_one_document(playing):
    answer = await playing.proxy.openai.completions.create(model="tiny", prompt="hi")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    assert [choice.text for choice in answer.choices] == [FIVE_WORDS]
    assert answer.usage.total_tokens == 10


async def test_a_streamed_chat(playing):
    stream = await playing.proxy.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].delta.content for chunk in chunks] == [*WORDS[:5], None]
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 5
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")


async def test_a_streamed_completion_with_usage(playing):
    stream = await playing.proxy.openai.completions.create(
        model="tiny", prompt=[1, 2, 3], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == FIVE_WORDS
    assert all(chunk.usage is None for chunk in texts)
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (5, 5)
    assert usage.id.startswith("cmpl-")


async def test_a_stream_ends_with_done_once(playing):
    events = await stream_events(playing)
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * 5 + ["length"]


async def test_the_first_token_reaches_the_client_before_decode_answers(cluster):
    body = {"model": "tiny", "prompt": "hi", "stream": True}
    opening = asyncio.create_task(cluster.proxy.http.post("/v1/completions", json=body))
    prefill_leg, decode_leg = await cluster.prefill.next_leg(), await cluster.decode.next_leg()
    await prefill_leg.send(token(0))
    async with await opening as response:
        events = read_events(response)
        assert json.loads(await anext(events))["choices"][0]["text"] == WORDS[0]
        await prefill_leg.finish(parked(), released())
        await decode_leg.finish(token(1), finished(2))
        assert json.loads(await anext(events))["choices"][0]["text"] == WORDS[1]
        assert [event async for event in events][-1] == "[DONE]"


@pytest.mark.parametrize("reason", ["length", "stop"])
async def test_one_token_is_the_whole_answer(cluster, reason):
    async def script(leg):
        await leg.send(token(0), finished(1, "p1", reason))

    cluster.prefill.script = script
    status, answer = await cluster.proxy.post(
        "/v1/completions", model="tiny", prompt="hi", max_tokens=1
    )
    assert status == 200
    assert answer["choices"][0]["text"] == WORDS[0]
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == 1
    await (await cluster.decode.next_leg()).closed.wait()


async def test_both_legs_draw_from_the_same_seed(playing):
    await playing.proxy.post("/v1/completions", model="tiny", prompt="hi")
    [prefill_leg], [decode_leg] = playing.prefill.legs, playing.decode.legs
    assert prefill_leg.message.sampling == decode_leg.message.sampling
    assert prefill_leg.message.endpoint == "completions"


async def test_the_messages_reach_prefill_unread(playing):
    raw = b'{"model":"tiny","messages":[ {"role" :"user","content":"caf\\u00e9"}]}'
    async with playing.proxy.http.post("/v1/chat/completions", data=raw) as response:
        assert response.status == 200
    [leg] = playing.prefill.legs
    assert bytes(leg.message.prompt) == b'[ {"role" :"user","content":"caf\\u00e9"}]'
    assert leg.message.endpoint == "chat"


async def test_logprobs_reach_the_openai_client(playing):
    entry = TokenLogprob("Once", -0.5, [79, 110, 99, 101], 100)

    async def script(leg):
        await leg.send(token(0, logprobs=TokenLogprobs(chosen=entry, top=[entry])), finished(1))

    playing.prefill.script = script
    client = playing.proxy.openai
    chat = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1
    )
    content = chat.choices[0].logprobs.content
    assert [(item.token, item.logprob, item.bytes) for item in content] == [
        ("Once", -0.5, [79, 110, 99, 101])
    ]
    assert content[0].top_logprobs[0].token == "Once"
    legacy = await client.completions.create(model="tiny", prompt="hi", logprobs=1)
    assert legacy.choices[0].logprobs.tokens == ["Once"]
    assert legacy.choices[0].logprobs.text_offset == [0]


async def test_2p3d_takes_turns(playing, stack):
    more = [("p2", "prefill"), ("d2", "decode"), ("d3", "decode")]
    workers = [playing.prefill, playing.decode]
    for worker_id, role in more:
        script = play_prefill if role == "prefill" else play_decode(5)
        worker = await stack.enter_async_context(ScriptedWorker(worker_id, role, script))
        playing.proxy.directory.records.append(worker.record)
        workers.append(worker)
    for _ in range(6):
        assert (await playing.proxy.post("/v1/completions", model="tiny", prompt="hi"))[0] == 200
    counts = {worker.worker_id: len(worker.legs) for worker in workers}
    assert counts == {"p1": 3, "p2": 3, "d1": 2, "d2": 2, "d3": 2}


async def test_a_combined_worker_serves_alone(playing, stack):
    async def script(leg):
        await leg.send(*(token(index) for index in range(5)), finished(5, "b1"))

    both = await stack.enter_async_context(ScriptedWorker("b1", "both", script))
    playing.proxy.directory.records[:] = [both.record]
    status, answer = await playing.proxy.post("/v1/completions", model="tiny", prompt="hi")
    assert (status, answer["choices"][0]["text"]) == (200, FIVE_WORDS)
    _, receipt = await playing.proxy.get(f"/v1/receipts/{answer['id']}")
    assert receipt["prefill_worker"] == receipt["decode_worker"] == "b1"


async def test_the_receipt_of_an_answer(playing):
    _, answer = await playing.proxy.post("/v1/completions", model="tiny", prompt="hi")
    status, receipt = await playing.proxy.get(f"/v1/receipts/{answer['id']}")
    assert status == 200
    assert receipt["request_id"] == answer["id"].removeprefix("cmpl-")
    assert (receipt["prefill_worker"], receipt["decode_worker"]) == ("p1", "d1")
    assert (receipt["kv_bytes"], receipt["transfer_s"]) == (4096, 0.25)
    assert (receipt["num_prompt"], receipt["num_generated"]) == (5, 5)
    assert receipt["finish_reason"] == "length"
    assert receipt["ttft_s"] > 0
    assert receipt["itl_mean_s"] >= 0
    assert receipt["prefill"]["worker_id"] == "p1"
    assert receipt["decode"]["worker_id"] == "d1"


async def test_a_receipt_nobody_has(playing):
    status, body = await playing.proxy.get("/v1/receipts/cmpl-unknown")
    assert (status, body["error"]["code"]) == (404, "receipt_not_found")


async def test_models(playing):
    playing.proxy.directory.records.append(make_record("p9", "prefill", model="large"))
    models = await playing.proxy.openai.models.list()
    assert [model.id for model in models.data] == ["large", "tiny"]


async def test_models_whose_workers_only_start_again_are_still_there(playing):
    directory = playing.proxy.directory
    assert (await playing.proxy.get("/v1/models/tiny"))[0] == 200
    for records in (directory.records[:1], []):
        directory.records = records
        models = await playing.proxy.openai.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await playing.proxy.get("/v1/models/tiny"))[0] == 200
        assert (await playing.proxy.get("/v1/models/other"))[0] == 404


async def test_health_says_what_is_missing(playing):
    assert await playing.proxy.get("/health") == (200, {"status": "ok"})
    playing.proxy.directory.records.remove(playing.decode.record)
    status, body = await playing.proxy.get("/health")
    assert status == 503
    assert "no decode worker" in body["reason"]


async def test_status_marks_a_worker_that_is_gone(playing):
    await playing.decode.stop()
    status, body = await playing.proxy.get("/status")
    assert status == 200
    prefill, decode = body["workers"]
    assert prefill["record"]["worker_id"] == "p1"
    assert prefill["status"]["num_blocks"] == 64
    assert prefill["unreachable"] is None
    assert decode["record"]["worker_id"] == "d1"
    assert decode["status"] is None
    assert "d1 is gone" in decode["unreachable"]
    assert body["proxy"]["num_running"] == 0


async def test_the_clients_request_id_is_echoed_and_goes_no_further(playing):
    body = {"model": "tiny", "prompt": "hi"}
    for _ in range(2):  # the same id twice is two requests
        async with playing.proxy.http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "mine/1"}
        ) as response:
            assert response.headers["X-Request-Id"] == "mine/1"
    ids = {leg.message.request_id for leg in playing.prefill.legs + playing.decode.legs}
    assert len(ids) == 2
    assert "mine/1" not in ids


async def test_a_request_without_an_id_gets_ours(playing):
    body = {"model": "tiny", "prompt": "hi"}
    async with playing.proxy.http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert answer["id"] == f"cmpl-{response.headers['X-Request-Id']}"


@pytest.mark.parametrize("bad", ["x" * 129, "a b", "é", 'a"b', " "])
async def test_a_request_id_that_is_not_one(playing, bad):
    async with playing.proxy.http.get("/health", headers={"X-Request-Id": bad}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "X-Request-Id"
        assert response.headers["X-Request-Id"] != bad


async def test_openais_errors_are_raised_by_openais_client(playing):
    client = playing.proxy.openai
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.completions.create(model="large", prompt="hi")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, n=9)
    assert bad.value.param == "n"
    assert set(bad.value.body) == {"message", "type", "param", "code"}


async def test_a_prompt_that_prefill_refuses_is_the_clients_fault(cluster):
    async def script(leg):
        await leg.send(
            Failed(
                code="context_length_exceeded",
                message="the prompt has 3000 tokens; the context holds 2048",
                http_status=400,
                retryable=False,
                param="prompt",
            )
        )

    cluster.prefill.script = script
    for stream in (False, True):
        status, body = await cluster.proxy.post(
            "/v1/completions", model="tiny", prompt="hi", stream=stream
        )
        assert status == 400
        assert body["error"] == {
            "message": "the prompt has 3000 tokens; the context holds 2048",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "context_length_exceeded",
        }
        await (await cluster.decode.next_leg()).closed.wait()
