"""Several choices of one answer are what as many requests, each with its own seed, would give."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai_kit import DEADLINE_S, Client, gather

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

SEED = (1 << 63) - 2  # so that the third choice's seed has wrapped
SEEDS = (SEED, SEED + 1, -(1 << 63))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = "def main("
MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Write a loop"}]


@pytest_asyncio.fixture(loop_scope="session")
async def users(llama_1p1d: Client) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of the fleet."""
    url = f"{llama_1p1d.url}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="unused", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


def split(params: dict[str, Any]) -> dict[str, Any]:
    """Parameters as OpenAI's client takes them: those that it does not know in `extra_body`."""
    known = dict(params)
    extra = {name: known.pop(name) for name in ("ignore_eos",) if name in known}
    return known | {"extra_body": extra}


@pytest.mark.parametrize("prompt", [PROMPT, MESSAGES], ids=["completion", "chat"])
async def test_choices_are_requests_with_seeds_of_their_own(
    llama_1p1d: Client, users: openai.AsyncOpenAI, prompt: Any
) -> None:
    alone = await gather(*(llama_1p1d.ask(prompt, seed=seed, **SAMPLED) for seed in SEEDS))
    expected = [answer.text for answer in alone]
    assert len(set(expected)) == len(SEEDS), "seeds that differ show which choice is which"
    params = {"model": llama_1p1d.model, "n": len(SEEDS), "seed": SEED, **split(SAMPLED)}
    if prompt is PROMPT:
        whole = await users.completions.create(prompt=prompt, **params)
        texts = [choice.text for choice in whole.choices]
        stream = await users.completions.create(
            prompt=prompt, stream=True, stream_options={"include_usage": True}, **params
        )
    else:
        whole = await users.chat.completions.create(messages=prompt, **params)
        texts = [choice.message.content for choice in whole.choices]
        stream = await users.chat.completions.create(
            messages=prompt, stream=True, stream_options={"include_usage": True}, **params
        )
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert texts == expected
    assert {choice.finish_reason for choice in whole.choices} == {"length"}

    *chunks, last = [chunk async for chunk in stream]
    for index, text in enumerate(expected):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        pieces = [each.text if prompt is PROMPT else each.delta.content or "" for each in mine]
        assert "".join(pieces) == text
        assert [each.finish_reason for each in mine] == [None] * (len(mine) - 1) + ["length"]
    num_prompt = alone[0].usage["prompt_tokens"]
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens == num_prompt
        assert usage.completion_tokens == len(SEEDS) * SAMPLED["max_tokens"]


async def test_offsets_are_the_same_whatever_a_stop_string_holds_back(
    users: openai.AsyncOpenAI, llama_1p1d: Client
) -> None:
    params = {"model": llama_1p1d.model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    free = (await users.completions.create(logprobs=1, **params)).choices[0]
    assert free.logprobs is not None
    held_back = [free.text[:5], free.text[8:15], free.text[-3:]]
    stop = [f"{text}and what never comes" for text in held_back]
    whole = (await users.completions.create(logprobs=1, stop=stop, **params)).choices[0]
    assert (whole.text, whole.logprobs) == (free.text, free.logprobs)
    offsets, pieces = [], []
    async for chunk in await users.completions.create(logprobs=1, stop=stop, stream=True, **params):
        pieces.append(chunk.choices[0].text)
        if chunk.choices[0].logprobs is not None:
            offsets += chunk.choices[0].logprobs.text_offset or []
    assert "".join(pieces) == free.text
    assert offsets == free.logprobs.text_offset


async def test_every_choice_moves_its_own_kv(llama_1p1d: Client, users: openai.AsyncOpenAI) -> None:
    answer = await users.completions.create(
        model=llama_1p1d.model, prompt=PROMPT, n=3, **split(SAMPLED)
    )
    receipts = [
        await llama_1p1d.receipt(answer_id)
        for answer_id in (answer.id, f"{answer.id}-1", f"{answer.id}-2")
    ]
    assert len({receipt["request_id"] for receipt in receipts}) == 3
    for receipt in receipts:
        assert receipt["num_generated"] == SAMPLED["max_tokens"]
        assert (receipt["link"], receipt["form"]) == ("handover", "handed_over")
    await llama_1p1d.until_idle()


async def test_greedy_choices_are_all_the_same(
    llama_1p1d: Client, users: openai.AsyncOpenAI
) -> None:
    alone = await llama_1p1d.ask(PROMPT, max_tokens=6)
    answer = await users.completions.create(
        model=llama_1p1d.model, prompt=PROMPT, n=3, temperature=0, max_tokens=6
    )
    assert [choice.text for choice in answer.choices] == [alone.text] * 3


async def test_a_client_that_leaves_frees_what_every_choice_held(llama_1p1d: Client) -> None:
    steps = (await llama_1p1d.load())["decode-0"]["num_steps"]
    long = {"ignore_eos": True, "max_tokens": 3500, "n": 4, "stream": True}
    async with llama_1p1d.post(PROMPT, **long) as response:
        for _ in range(12):
            await response.content.readuntil(b"\n\n")
    load = await llama_1p1d.until_idle()
    assert load["decode-0"]["num_steps"] - steps < long["max_tokens"]
