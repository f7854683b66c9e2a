"""A decode worker dies while KV moves to its device: the answer comes all the same.

So far this has run on a simulator of libnrt only.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from neuron_faults import kill_who_receives, until_tried
from neuron_kit import Host, has_compiler, simulated_host
from nrt_sim.check_trace import problems
from process_kit import said

from neuron_di.llm import LLM
from neuron_di.wire import SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not has_compiler(), reason="the simulator is built by a C compiler"),
]

NUM_TOKENS = 12
PROMPT = "The cat sat on the mat. " * 18
# The prompt's KV, half a megabyte, takes two seconds then.
BYTES_PER_S = 250_000


@pytest.fixture(scope="module")
def expected(tiny_tales: Path) -> str:
    """What one process makes of the prompt, on the CPU."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tiny_tales), threads=1, dtype="float32") as llm:
        (generation,) = llm.generate([PROMPT], sampling)
    return generation.text


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(tiny_tales: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """With a slow network. What its devices are told to send stands in a file."""
    folder = tmp_path_factory.mktemp("recovery")
    with simulated_host(tiny_tales, folder / "artifacts") as host:
        slow = host.with_(
            NRT_SIM_BYTES_PER_S=str(BYTES_PER_S), NRT_SIM_TRACE=str(folder / "trace.jsonl")
        )
        for degree in (1, 2):
            ended = await slow.compile(f"--tp={degree}")
            assert ended.code == 0, ended.stderr
        yield slow


async def test_a_decode_worker_that_dies_while_kv_moves(host: Host, expected: str) -> None:
    """The prefill worker's device has sends posted to nobody: it is started again, and says why."""
    async with host.serving("--decode=2", "--decode-tp=2") as serving:
        client = serving.client
        await until_tried(serving)
        answering = asyncio.create_task(
            client.ask(PROMPT, stream=True, max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        try:
            killed = await kill_who_receives(_trace(host), serving)
            answer = await answering
        finally:
            answering.cancel()
        assert answer.text == expected
        attempts = (await client.receipt(answer.answer_id))["attempts"]
        assert [attempt["decode_worker"] for attempt in attempts[:2]] == [killed, _other(killed)]
        await said(serving.process, "event=nrt_messages_posted_for_good")
        await said(serving.process, "^prefill-0 ended by itself.*; starting it again")
        await said(serving.process, "^prefill-0 is back")
        again = await client.ask("Once", max_tokens=NUM_TOKENS)
        assert (await client.receipt(again.answer_id))["link"] == "nrt"
    # Neither of the two that ended so could close the runtime; nobody broke another of its rules.
    ended = {serving.pids[killed], serving.pids["prefill-0"]}
    broken = problems(_trace(host).read_text(encoding="utf-8").splitlines())
    assert set(broken) == {f"process {pid}: nrt_init without nrt_close" for pid in ended}


def _trace(host: Host) -> Path:
    """What the runtimes were asked for so far, a line for each call."""
    return Path(host.environ["NRT_SIM_TRACE"])


def _other(name: str) -> str:
    return {"decode-0": "decode-1", "decode-1": "decode-0"}[name]
