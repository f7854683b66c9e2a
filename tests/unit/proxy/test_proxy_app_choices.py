"""Requests for several choices, with real clients over real HTTP."""

import asyncio
import json
from dataclasses import replace

import openai
import pytest
from running_proxy import AT_ONCE, RunningProxy, read_events
from scripted_worker import (
    WORDS,
    ScriptedWorker,
    finished,
    parked,
    play_decode,
    play_prefill,
    released,
    token,
)

from neuron_di.config import ProxyOptions
from neuron_di.wire import Failed

MESSAGES = [{"role": "user", "content": "Tell me a story"}]
FIELDS = {"model": "tiny", "prompt": "hi"}


def choice_of(leg):
    """The index of the choice that a leg belongs to."""
    return int(leg.message.request_id.partition("-")[2] or 0)


def by_choice(*scripts):
    """A script that plays another one for each choice."""

    async def script(leg):
        await scripts[choice_of(leg)](leg)

    return script


async def stay(leg):
    await leg.ended.wait()


async def break_after_one(leg):
    await leg.send(token(leg.first_index + 1))
    await leg.break_off()


async def hang_up_after_one(leg):
    await leg.send(token(leg.first_index + 1))
    leg.hang_up()
    await asyncio.Event().wait()


async def post_stream(cluster, **fields):
    """Headers and events of one streamed completion."""
    body = FIELDS | {"stream": True} | fields
    async with cluster.proxy.http.post("/v1/completions", json=body) as response:
        assert response.status == 200
        return response.headers, [event async for event in read_events(response)]


@pytest.fixture
async def uneven(cluster):
    """Workers that answer choice i with i + 2 tokens."""
    cluster.prefill.script = play_prefill
    cluster.decode.script = by_choice(*(play_decode(index + 2) for index in range(8)))
    return cluster


async def test_three_choices_of_a_completion(uneven):
    answer = await uneven.proxy.openai.completions.create(model="tiny", prompt="hi", n=3, seed=7)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (index, "".join(WORDS[: index + 2])) for index in range(3)
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9)
    seeds = {leg.message.request_id: leg.message.sampling.seed for leg in uneven.decode.legs}
    inner = answer.id.removeprefix("cmpl-")
    assert seeds == {inner: 7, f"{inner}-1": 8, f"{inner}-2": 9}
    legs = uneven.prefill.legs
    assert seeds == {leg.message.request_id: leg.message.sampling.seed for leg in legs}


async def test_three_choices_of_a_streamed_chat(uneven):
    stream = await uneven.proxy.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, usage = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.created) for chunk in [*chunks, usage]}) == 1
    for index in range(3):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.content for choice in mine] == [*WORDS[: index + 2], None]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (index + 2)
        assert [choice.finish_reason for choice in mine] == [None] * (index + 2) + ["length"]
    assert usage.choices == []
    assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (5, 9)


async def test_eight_choices_and_no_more(uneven):
    client = uneven.proxy.openai
    answer = await client.completions.create(model="tiny", prompt="hi", n=8, best_of=8)
    assert [choice.index for choice in answer.choices] == list(range(8))
    with pytest.raises(openai.BadRequestError) as error:
        await client.completions.create(model="tiny", prompt="hi", n=9)
    assert error.value.param == "n"


async def test_choices_run_at_once_and_arrive_as_they_come(cluster):
    body = FIELDS | {"stream": True, "n": 2}
    opening = asyncio.create_task(cluster.proxy.http.post("/v1/completions", json=body))
    legs = {}
    for worker in (cluster.prefill, cluster.decode):
        for _ in range(2):
            leg = await worker.next_leg()
            legs[worker.role, choice_of(leg)] = leg
    await legs["prefill", 1].send(token(0))
    async with await opening as response:
        events = read_events(response)

        async def next_choice():
            return json.loads(await anext(events))["choices"][0]

        assert (await next_choice())["index"] == 1
        await legs["prefill", 0].finish(token(0), parked(), released())
        assert (await next_choice())["index"] == 0
        await legs["prefill", 1].finish(parked(), released())
        await legs["decode", 1].finish(token(1), finished(2))
        assert [(await next_choice())["finish_reason"] for _ in range(2)] == [None, "length"]
        await legs["decode", 0].finish(finished(1))
        assert (await next_choice())["finish_reason"] == "length"
        assert [event async for event in events] == ["[DONE]"]


async def test_every_choice_has_a_receipt(uneven):
    _, answer = await uneven.proxy.post("/v1/completions", **FIELDS, n=3)
    ids = [answer["id"], f"{answer['id']}-1", f"{answer['id']}-2"]
    receipts = [(await uneven.proxy.get(f"/v1/receipts/{each}"))[1] for each in ids]
    assert [receipt["num_generated"] for receipt in receipts] == [2, 3, 4]
    assert [receipt["request_id"] for receipt in receipts] == [
        each.removeprefix("cmpl-") for each in ids
    ]
    assert (await uneven.proxy.get(f"/v1/receipts/{answer['id']}-3"))[0] == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_before_the_first_byte_has_a_status(cluster, stream):
    async def refuse(leg):
        await leg.send(
            Failed(code="too_long", message="m", http_status=400, retryable=False, fault="client")
        )

    cluster.prefill.script = by_choice(stay, refuse, stay)
    status, body = await cluster.proxy.post("/v1/completions", **FIELDS, n=3, stream=stream)
    assert (status, body["error"]["code"]) == (400, "too_long")
    others = [leg for leg in cluster.prefill.legs if choice_of(leg) != 1]
    assert len(others) == 2
    for leg in others + cluster.decode.legs:
        await leg.closed.wait()


async def test_a_choice_that_fails_later_ends_the_stream_and_the_others(cluster):
    cluster.prefill.script = play_prefill
    cluster.decode.script = by_choice(play_decode(2), hang_up_after_one, stay)
    _, events = await post_stream(cluster, n=3)
    documents = [json.loads(event) for event in events]
    assert [set(document) for document in documents if "error" in document] == [{"error"}]
    assert documents[-1]["error"]["code"] == "peer_gone"
    [left] = [leg for leg in cluster.decode.legs if choice_of(leg) == 2]
    await left.closed.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_closes_the_legs_of_every_choice(cluster, stream):
    cluster.prefill.script = play_prefill
    asking = asyncio.create_task(
        cluster.proxy.post("/v1/completions", **FIELDS, n=3, stream=stream)
    )
    legs = [await cluster.decode.next_leg() for _ in range(3)]
    asking.cancel()
    for leg in legs:
        await leg.closed.wait()
    while await cluster.proxy.num_running():
        pass
    for leg in legs:
        _, receipt = await cluster.proxy.get(f"/v1/receipts/{leg.message.request_id}")
        assert receipt["finish_reason"] == "cancelled"


async def test_each_choice_goes_on_by_itself(stack):
    drop = by_choice(play_decode(5), break_after_one, break_after_one)

    async def script(leg):
        await (play_decode(5) if leg.message.attempt else drop)(leg)

    workers = [
        await stack.enter_async_context(ScriptedWorker(name, role, played))
        for name, role, played in (
            ("p1", "prefill", play_prefill),
            ("d1", "decode", script),
            ("d2", "decode", script),
        )
    ]
    limits = replace(AT_ONCE, continuations_max=2, queue_timeout_s=5)
    records = [worker.record for worker in workers]
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), records))
    async with proxy.http.post("/v1/completions", json=FIELDS | {"n": 3}) as response:
        assert response.headers["X-Neuron-Di-Continued"] == "2"
        assert response.headers["X-Neuron-Di-Route"].endswith("attempt=0")
        answer = await response.json()
    assert [choice["text"] for choice in answer["choices"]] == ["".join(WORDS[:5])] * 3
    assert answer["neuron_di"] == {"continued": 2, "grade": "recomputed"}
    body = FIELDS | {"n": 3, "stream": True}
    async with proxy.http.post("/v1/completions", json=body) as response:
        events = [event async for event in read_events(response)]
    ends = {}
    for chunk in map(json.loads, events[:-1]):
        if chunk["choices"][0]["finish_reason"]:
            ends[chunk["choices"][0]["index"]] = chunk.get("neuron_di")
        else:
            assert "neuron_di" not in chunk
    continued = {"continued": 1, "grade": "recomputed"}
    assert ends == {0: None, 1: continued, 2: continued}
