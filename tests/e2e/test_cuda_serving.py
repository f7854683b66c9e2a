"""Whole servers on a simulated GPU: the CPU backend's tokens, KV from device to device.

On a GPU where there is one, else in Triton's interpreter and on a simulator of the CUDA runtime.
"""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cuda_kit import GpuHost, needs_interpreter
from openai_kit import Client, eventually, gather
from process_kit import run, said

from neuron_di.llm import LLM
from neuron_di.wire import SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.minutes,
    pytest.mark.asyncio(loop_scope="session"),
    needs_interpreter,
]

NUM_TOKENS = 10
PROMPTS = [
    "Once upon a time",
    "The cat sat on the mat. " * 9,
    "Tom",
]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[str]:
    """What one process makes of the prompts, on the CPU."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(llama), threads=1, dtype="float32") as llm:
        return [generation.text for generation in llm.generate(PROMPTS, sampling)]


@pytest.fixture
def host(llama: Path) -> GpuHost:
    return GpuHost.simulated(llama)


async def check(client: Client, expected: list[str], link: str | None, **params: Any) -> None:
    """All prompts at once, each of them streamed: these texts, and KV by this engine."""
    params |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    answers = await gather(*(client.ask(prompt, **params) for prompt in PROMPTS))
    assert [answer.text for answer in answers] == expected
    for answer in answers:
        if link is not None:
            receipt = await client.receipt(answer.answer_id)
            assert receipt["link"] == link
            assert receipt["kv_bytes"] > 0
    load = await client.until_idle()
    assert not any(status["num_kv_mismatched"] for status in load.values())


async def test_tokens_are_those_of_the_cpu(host: GpuHost, expected: list[str]) -> None:
    async with host.serving() as serving:
        await check(serving.client, expected, "cuda_ipc")
        await check(serving.client, expected, "cuda_ipc")  # in blocks that were used before
        report = await run("status", "--url", serving.client.url)
        assert "decode-0 takes KV from prefill-0 by cuda_ipc" in report.stdout, report.stdout


async def test_by_tcp_through_the_hosts_memory(host: GpuHost, expected: list[str]) -> None:
    async with host.serving("--transfer=tcp") as serving:
        await check(serving.client, expected, "tcp")


async def test_combined(host: GpuHost, expected: list[str]) -> None:
    async with host.serving("--combined") as serving:
        await check(serving.client, expected, None)


async def test_a_killed_decode_worker(host: GpuHost, expected: list[str]) -> None:
    """While its answers run, with prefill's memory mapped: they go on elsewhere."""
    async with host.serving("--decode=2") as serving:
        client = serving.client
        await client.until_idle()
        asking = [
            asyncio.create_task(client.ask(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
            for prompt in PROMPTS
        ]
        await until_decoding(client)
        os.kill(serving.pids["decode-0"], signal.SIGKILL)
        assert [(await answer).text for answer in asking] == expected
        await said(serving.process, "^decode-0 is back")
        await check(client, expected, "cuda_ipc")


async def test_what_a_killed_worker_leaves_is_continued_exactly(
    host: GpuHost, expected: list[str]
) -> None:
    """With rows that do not depend on their batch: answer and receipt say so, and it is so."""
    async with host.serving("--decode=2", "--batch-invariant") as serving:
        client = serving.client
        await client.until_idle()
        texts: list[str] = []
        continued: list[Any] = []
        params = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        async with client.post(PROMPTS[0], **params) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                texts += [choice["text"] for choice in chunk["choices"]]
                continued += [chunk["neuron_di"]] if "neuron_di" in chunk else []
                if len(texts) == NUM_TOKENS // 2:  # what it has is replayed
                    (name,) = await busy_decode_workers(client)
                    os.kill(serving.pids[name], signal.SIGKILL)
        assert "".join(texts) == expected[0]
        assert continued == [{"continued": 1, "grade": "exact"}]
        receipt = await client.receipt(chunk["id"])
        first, second = receipt["attempts"]
        assert first["num_tokens"] >= NUM_TOKENS // 2 > 0 < second["num_tokens"]


async def busy_decode_workers(client: Client) -> list[str]:
    load = await client.load()
    return [name for name, status in load.items() if name != "prefill-0" and status["num_running"]]


async def test_a_device_that_fails_in_a_step(
    host: GpuHost, expected: list[str], tmp_path: Path
) -> None:
    """The worker says so and ends, is started again, and its answers go on elsewhere."""
    broken = tmp_path / "broken"
    async with host.with_(FAKE_CUDA_BREAK=str(broken)).serving("--decode=2") as serving:
        client = serving.client
        await client.until_idle()
        asking = [
            asyncio.create_task(client.ask(prompt, max_tokens=NUM_TOKENS, ignore_eos=True))
            for prompt in PROMPTS
        ]
        await until_decoding(client)
        broken.with_suffix(f".{serving.pids['decode-0']}").touch()
        assert [(await answer).text for answer in asking] == expected
        await said(serving.process, "event=engine_failed")
        await said(serving.process, "^decode-0 ended by itself.*; starting it again")
        await said(serving.process, "^decode-0 is back")
        await check(client, expected, "cuda_ipc")


async def until_decoding(client: Client) -> None:
    """The first decode worker has a request."""

    async def is_busy() -> bool | None:
        status = (await client.load()).get("decode-0")
        return bool(status and status["num_running"]) or None

    await eventually(is_busy)
