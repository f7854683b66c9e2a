"""A request that comes before any worker of its model is read by what the first one says."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from metric_samples import samples
from running_proxy import AT_ONCE, RunningProxy, until
from scripted_worker import finished, play_prefill, token

from neuron_di.config import ProxyOptions
from neuron_di.wire import SamplingDefaults

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TOOLS = [{"type": "function", "function": {"name": "look"}}]
PATIENT = replace(AT_ONCE, queue_timeout_s=30)


@pytest.fixture
async def early(stack):
    """A proxy that knows no worker yet."""
    return await stack.enter_async_context(RunningProxy(ProxyOptions(limits=PATIENT), []))


async def num_waiting(proxy):
    """Requests of a model that no worker has said to have."""
    return (await samples(proxy)).get(("vllm:num_requests_waiting", "other"), 0)


async def answer_of(early, cluster, **fields):
    """What a request gets that waits when the workers join; and its sampling, as these see it."""
    asking = asyncio.create_task(early.post("/v1/chat/completions", **ASK, **fields))

    async def waits():
        return await num_waiting(early) == 1

    seen = []

    async def play(leg):
        seen.append(leg.message.sampling)
        await play_prefill(leg)

    async def play_answer(leg):
        await leg.finish(token(1, text="<think>why</think>so"), finished(2))

    await until(waits)
    cluster.prefill.script, cluster.decode.script = play, play_answer
    early.directory.records += [
        msgspec.structs.replace(
            each.record,
            tool_format="hermes",
            reasoning=("<think>", "</think>"),
            sampling_defaults=SamplingDefaults(temperature=0.6),
        )
        for each in (cluster.prefill, cluster.decode)
    ]
    status, document = await asking
    assert status == 200, document
    return document, seen[-1]


async def test_its_models_defaults_are_used(early, cluster):
    assert (await answer_of(early, cluster))[1].temperature == 0.6


async def test_the_model_is_shown_tools_that_it_knows(early, cluster):
    assert (await answer_of(early, cluster, tools=TOOLS))[0]["choices"]


async def test_reasoning_comes_first_in_what_has_a_format(early, cluster):
    _, sampling = await answer_of(early, cluster, response_format={"type": "json_object"})
    assert sampling.grammar.reasoning == ("<think>", "</think>")


async def test_what_is_wrong_whatever_the_model_is_refused_at_once(early):
    status, document = await early.post("/v1/chat/completions", **ASK, top_p="x")
    assert (status, document["error"]["param"]) == (400, "top_p")


async def test_who_leaves_meanwhile_is_counted(early):
    asking = asyncio.create_task(early.post("/v1/chat/completions", **ASK))

    async def are_waiting(count):
        return await num_waiting(early) == count

    await until(lambda: are_waiting(1))
    asking.cancel()
    await until(lambda: are_waiting(0))
    assert (await samples(early))["neuron_di_requests_total", "", "cancelled"] == 1


async def test_an_end_of_the_server_ends_the_wait(stack):
    limits = replace(PATIENT, drain_timeout_s=0.1)
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=limits), []))
    asking = asyncio.create_task(proxy.post("/v1/chat/completions", **ASK))

    async def waits():
        return await num_waiting(proxy) == 1

    await until(waits)
    proxy.shutdown.set()
    status, document = await asking
    assert status == 503
    assert "shutting down" in document["error"]["message"]
