"""Whole servers on simulated NeuronCores: the CPU backend's tokens, KV from device to device.

So far this has run on a simulator of libnrt only.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from neuron_kit import Host, has_compiler, simulated_host
from nrt_sim.check_trace import check_trace
from openai_kit import Client, gather
from process_kit import run

from neuron_di.llm import LLM
from neuron_di.wire import SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]

TRANSPOSED = "--neuron-k-transposed"
NUM_TOKENS = 24
PROMPTS = [
    "Once upon a time",
    "The cat sat on the mat. " * 9,
    "One day, a little fox went to the river. It was a warm day, and the water was blue.",
    "Tom",
    "A bird saw a red ball in the tree, and it sang. Then",
]


@pytest.fixture(scope="module")
def expected(tiny_tales: Path) -> list[str]:
    """What one process makes of the prompts, on the CPU."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tiny_tales), threads=1, dtype="float32") as llm:
        return [generation.text for generation in llm.generate(PROMPTS, sampling)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(tiny_tales: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """For which the model is compiled in all the shapes that are served here."""
    with simulated_host(tiny_tales, tmp_path_factory.mktemp("artifacts")) as host:
        for shape in (("--tp=2",), ("--tp=2", TRANSPOSED), ("--tp=4", TRANSPOSED)):
            ended = await host.compile(*shape)
            assert ended.code == 0, ended.stderr
        yield host


async def check(client: Client, expected: list[str], link: str, **params: Any) -> None:
    """All prompts at once, each of them streamed: these texts, and KV by this engine."""
    params |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    answers = await gather(*(client.ask(prompt, **params) for prompt in PROMPTS))
    assert [answer.text for answer in answers] == expected
    for answer in answers:
        receipt = await client.receipt(answer.answer_id)
        assert receipt["link"] == link
        assert receipt["kv_bytes"] > 0
    load = await client.until_idle()
    assert not any(status["num_kv_mismatched"] for status in load.values())


async def lanes(client: Client) -> str:
    """What `neuron-di status` says of the decode worker's lanes."""
    report = await run("status", "--url", client.url)
    assert report.code == 0, report.stderr
    return report.stdout


async def test_tokens_are_those_of_the_cpu(host: Host, expected: list[str], tmp_path: Path) -> None:
    """And no process has broken a rule of libnrt's by the time it ended."""
    trace = tmp_path / "trace.jsonl"
    async with host.with_(NRT_SIM_TRACE=str(trace)).serving("--tp=2") as serving:
        await check(serving.client, expected, "nrt")
        await check(serving.client, expected, "nrt")  # in slots that were used before
        assert "decode-0 takes KV from prefill-0 by nrt" in await lanes(serving.client)
    check_trace(trace)


async def test_transposed_keys_go_from_two_ranks_to_four(host: Host, expected: list[str]) -> None:
    """A head's keys of a slot are one message, with the pad, to which idle rows' garbage goes
    meanwhile: nobody reads it, but a trace's check takes it for a fault. So here is none."""
    async with host.serving("--prefill-tp=2", "--decode-tp=4", TRANSPOSED) as serving:
        await check(serving.client, expected, "nrt")
        await check(serving.client, expected, "nrt")


async def test_without_the_gate_kv_goes_by_shm(host: Host, expected: list[str]) -> None:
    """Through both mirrors, from two ranks to four, which have each head twice; keys transposed."""
    closed = host.with_(NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED="0")
    async with closed.serving("--prefill-tp=2", "--decode-tp=4", TRANSPOSED) as serving:
        await check(serving.client, expected, "shm")
        shown = await lanes(serving.client)
        assert "decode-0 takes KV from prefill-0 by shm" in shown
        assert "NEURON_RT_ASYNC_SENDRECV_EXPERIMENTAL_ENABLED" in shown
