"""A pool that is too small for all answers at once costs time, and no answer."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from openai_kit import DEADLINE_S, Client
from process_kit import running_fleet

from neuron_di import LLM, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_TOKENS = 100
PROMPTS = [[3 + n, *range(40, 52)] for n in range(10)]
# 192 positions; the ten would take 1,120 at their ends.
ROOM: dict[str, Any] = {
    "context_tokens": 160, "block_size": 16, "num_blocks": 12, "decode_batch": 8,
    "reserve_tokens": 16,
}  # fmt: skip


async def num_preempted(client: Client) -> int:
    async with asyncio.timeout(DEADLINE_S), client.session.get(f"{client.url}/metrics") as response:
        found = re.search(r'attempts_total{.*reason="preempted"} (\d+)', await response.text())
    return int(found[1]) if found else 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_combined", [False, True], ids=["1P1D", "combined"])
async def test_every_answer_is_what_it_is_alone(
    llama: Path, llama_llm: LLM, is_combined: bool
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [answer.text for answer in llama_llm.generate(PROMPTS, sampling)]
    async with running_fleet(llama, combined=is_combined, **ROOM) as client:
        answers = await asyncio.gather(
            *(
                client.ask(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, stream=bool(n % 2))
                for n, prompt in enumerate(PROMPTS)
            )
        )
        assert [answer.text for answer in answers] == expected
        assert {answer.finish_reason for answer in answers} == {"length"}
        assert await num_preempted(client) > 0
        await client.until_idle()
