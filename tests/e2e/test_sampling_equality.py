"""Seeded sampling draws the same tokens on two workers, on one, and without any."""

from typing import Any

import msgspec
import pytest
from openai_kit import Answer, Client, gather
from oracle_kit import Oracle

from neuron_di.llm import LLM
from neuron_di.wire import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = (
    "def main(",
    "import os\n",
    "class Reader:",
    "    return self",
    "# The first",
    "for i in",
)
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.1, "top_p": 0.95, "top_k": 100, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 1.5},
    {"temperature": 0.9, "frequency_penalty": -1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "presence_penalty": -0.5, "frequency_penalty": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "stop": ["e", "zz"]},
    {"temperature": 1.0, "stop": [" t"], "min_tokens": 8},
    {"temperature": 0.0, "frequency_penalty": 2.0},
)
# Each variation twice, with another prompt and seed.
CASES = [
    (PROMPTS[index % len(PROMPTS)], {"seed": index - 3, "max_tokens": 24} | variation)
    for index, variation in enumerate(VARIATIONS * 2)
]


async def test_1p1d_equals_combined_and_one_process(
    llama_1p1d: Client, llama_combined: Client, llama_llm: LLM, oracle: Oracle
) -> None:
    pair = await gather(*(llama_1p1d.ask(prompt, **params) for prompt, params in CASES))
    whole = await gather(*(llama_combined.ask(prompt, **params) for prompt, params in CASES))
    for (prompt, params), ours, theirs in zip(CASES, pair, whole, strict=True):
        assert _content(ours) == _content(theirs)
        (alone,) = llama_llm.generate([prompt], msgspec.convert(params, SamplingParams))
        assert ours.text == alone.text
        assert ours.finish_reason == alone.finish_reason
        assert ours.labels == [oracle.label(token_id) for token_id in alone.token_ids]
    reasons = {answer.finish_reason for answer in pair}
    assert reasons == {"stop", "length"}, "both ends were tried"
    receipts = [await llama_combined.receipt(answer.answer_id) for answer in whole]
    assert {receipt["decode_worker"] for receipt in receipts} == {"combined-0"}
    assert {receipt["kv_bytes"] for receipt in receipts} == {0}


async def test_answer_does_not_depend_on_who_shares_the_batch(llama_1p1d: Client) -> None:
    alone = [await llama_1p1d.ask(prompt, **params) for prompt, params in CASES]
    crowd = [*reversed(CASES), *CASES]
    together = await gather(
        *(llama_1p1d.ask(prompt, stream=True, **params) for prompt, params in crowd),
        at_once=len(crowd),
    )
    for answers in (together[: len(CASES)][::-1], together[len(CASES) :]):
        assert list(map(_content, answers)) == list(map(_content, alone))


async def test_seed_decides(llama_1p1d: Client) -> None:
    params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    answers = [await llama_1p1d.ask("def f", seed=seed, **params) for seed in (1, 1, 2, -1)]
    assert _content(answers[0]) == _content(answers[1])
    assert len({answer.text for answer in answers}) == 3


async def test_no_seed_is_a_new_seed_for_both_legs(llama_1p1d: Client) -> None:
    """A seed is drawn once: two legs with seeds of their own could not agree on a stop."""
    params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    answers = await gather(*(llama_1p1d.ask("def f", **params) for _ in range(4)))
    assert len({answer.text for answer in answers}) == 4


def _content(answer: Answer) -> tuple[str, list[str], list[float], str]:
    return answer.text, answer.labels, answer.logprobs, answer.finish_reason


async def test_offline_prompts_without_a_seed_draw_numbers_of_their_own(llama_llm: LLM) -> None:
    prompts = ["def main("] * 4
    drawn = [each.text for each in llama_llm.generate(prompts, SamplingParams(max_tokens=20))]
    drawn += [each.text for each in llama_llm.generate(prompts, SamplingParams(max_tokens=20))]
    assert len(set(drawn)) == 8
    seeded = llama_llm.generate(prompts, SamplingParams(max_tokens=20, seed=0))
    assert len({each.text for each in seeded}) == 1
