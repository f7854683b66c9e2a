"""Whole servers whose KV tensors have no handle: it goes by torch-neuronx's own classes.

As on the SDKs that have these: the stand-in gives nothing of its KV but PyTorch's tensors then.
So far this has run on a simulator of libnrt and a stand-in for these classes only.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from neuron_faults import kill_who_receives, until_tried
from neuron_kit import Host, has_compiler, simulated_host
from nrt_sim.check_trace import check_trace, problems
from openai_kit import gather
from process_kit import run, said

from neuron_di.llm import LLM
from neuron_di.wire import SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]

NUM_TOKENS = 16
LONG = "The cat sat on the mat. " * 18
PROMPTS = ["Once upon a time", LONG, "Tom", "A bird saw a red ball in the tree, and it sang. Then"]
# The long prompt's KV, half a megabyte, takes two seconds then.
BYTES_PER_S = 250_000


@pytest.fixture(scope="module")
def expected(tiny_tales: Path) -> dict[str, str]:
    """What one process makes of the prompts, on the CPU."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tiny_tales), threads=1, dtype="float32") as llm:
        texts = [generation.text for generation in llm.generate(PROMPTS, sampling)]
        return dict(zip(PROMPTS, texts, strict=True))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(tiny_tales: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """With the classes, and without handles."""
    with simulated_host(tiny_tales, tmp_path_factory.mktemp("artifacts")) as host:
        for degree in (1, 2):
            ended = await host.compile(f"--tp={degree}")
            assert ended.code == 0, ended.stderr
        yield host.with_(STAND_IN_CLOSED_CLASSES="1")


@pytest.mark.parametrize("form", ["1", "2.24"])
async def test_tokens_are_those_of_the_cpu(
    host: Host, expected: dict[str, str], form: str, tmp_path: Path
) -> None:
    """And no process has broken a rule of libnrt's by the time it ended."""
    trace = tmp_path / "trace.jsonl"
    chosen = host.with_(STAND_IN_CLOSED_CLASSES=form, NRT_SIM_TRACE=str(trace))
    async with chosen.serving("--prefill-tp=1", "--decode-tp=2") as serving:
        client = serving.client
        for _ in range(2):  # the second time in slots that were used before
            asked = (
                client.ask(prompt, stream=True, max_tokens=NUM_TOKENS, ignore_eos=True)
                for prompt in PROMPTS
            )
            answers = await gather(*asked)
            assert [answer.text for answer in answers] == list(expected.values())
            for answer in answers:
                receipt = await client.receipt(answer.answer_id)
                assert receipt["link"] == "nrt"
                assert receipt["kv_bytes"] > 0
        load = await client.until_idle()
        assert not any(status["num_kv_mismatched"] for status in load.values())
        report = await run("status", "--url", client.url)
        assert "decode-0 takes KV from prefill-0 by nrt" in report.stdout
    check_trace(trace)


async def test_without_the_classes_both_reasons_are_shown(host: Host) -> None:
    """The stand-in's variable says that there are none, which leaves the tensors as they are."""
    async with host.with_(STAND_IN_CLOSED_CLASSES="none").serving("--tp=1") as serving:
        await serving.client.ask("Once", max_tokens=2)
        report = await run("status", "--url", serving.client.url)
        assert "decode-0 takes KV from prefill-0 by shm" in report.stdout
        assert "torch-neuronx registers no NeuronTransferEngine" in report.stdout
        assert "have no handle of the runtime" in report.stdout


async def test_a_decode_worker_that_dies_while_kv_moves(
    host: Host, expected: dict[str, str], tmp_path: Path
) -> None:
    """The prefill worker's device has sends posted to nobody: it is started again, and says why."""
    trace = tmp_path / "trace.jsonl"
    slow = host.with_(NRT_SIM_BYTES_PER_S=str(BYTES_PER_S), NRT_SIM_TRACE=str(trace))
    async with slow.serving("--decode=2", "--decode-tp=2") as serving:
        client = serving.client
        await until_tried(serving)
        answering = asyncio.create_task(
            client.ask(LONG, stream=True, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        try:
            killed = await kill_who_receives(trace, serving)
            answer = await answering
        finally:
            answering.cancel()
        assert answer.text == expected[LONG]
        await said(serving.process, "event=nrt_messages_posted_for_good")
        await said(serving.process, "^prefill-0 ended by itself.*; starting it again")
        await said(serving.process, "^prefill-0 is back")
        again = await client.ask("Once", max_tokens=NUM_TOKENS)
        assert (await client.receipt(again.answer_id))["link"] == "nrt"
    # Neither of the two that ended so could close the runtime; nobody broke another of its rules.
    ended = {serving.pids[killed], serving.pids["prefill-0"]}
    broken = problems(_lines(trace))
    assert set(broken) == {f"process {pid}: nrt_init without nrt_close" for pid in ended}


def _lines(trace: Path) -> list[str]:
    """What the runtimes were asked for so far, one for each call."""
    return trace.read_text(encoding="utf-8").splitlines()
