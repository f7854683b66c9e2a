"""Prompts that begin alike: what was computed once is copied, and the answers are the same."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Answer, Client, gather
from process_kit import run, running_fleet, session_of_many

from neuron_di.config import (
    EngineOptions,
    FrontOptions,
    HandOverOptions,
    LogOptions,
    RoutingOptions,
    ServeOptions,
    TransferOptions,
)
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHUNK = 64
BEGINNING = "Once upon a time, four friends went to the river with a small boat. " * 12
PROMPTS = [BEGINNING + end for end in ("They met a fox.", "It rained.", "Suddenly, they")]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def expected(tiny_tales: Path) -> AsyncIterator[list[Answer]]:
    async with running_fleet(tiny_tales, chunk_tokens=CHUNK, prefix_cache="off") as client:
        answers = [await client.ask(prompt, max_tokens=24) for prompt in PROMPTS * 2]
        assert await found_in(client, answers) == [0] * len(answers)
        yield answers


async def found_in(client: Client, answers: list[Answer]) -> list[int]:
    """Tokens of each prompt that were found; usage and receipt agree on them."""
    receipts = [await client.receipt(answer.answer_id) for answer in answers]
    numbers: list[int] = [receipt["num_cached"] for receipt in receipts]
    return numbers


def same(answers: list[Answer], expected: list[Answer]) -> bool:
    """Bit for bit."""
    return [(a.text, a.labels, a.logprobs) for a in answers] == [
        (a.text, a.labels, a.logprobs) for a in expected
    ]


@pytest.mark.parametrize(
    "engine",
    [{}, {"combined": True}, {"tp": 2}, {"dtype": "bfloat16"}],
    ids=["1p1d", "combined", "tp2", "bfloat16"],
)
async def test_what_was_computed_once_is_found(
    tiny_tales: Path, expected: list[Answer], engine: dict[str, Any]
) -> None:
    async with running_fleet(tiny_tales, chunk_tokens=CHUNK, **engine) as client:
        answers = [await client.ask(prompt, max_tokens=24) for prompt in PROMPTS * 2]
        first, *others = await found_in(client, answers)
        num_prompt = answers[0].usage["prompt_tokens"]
        assert first == 0
        assert all(CHUNK < each < num_prompt and each % CHUNK == 0 for each in others)
        load = await client.until_idle()
        kept = {name: status["num_blocks_cached"] for name, status in load.items()}
        worker = "combined-0" if "combined" in engine else "prefill-0"
        assert kept.pop(worker) * 16 >= max(others)
        assert not any(kept.values()), "a decode worker computes no prompts"
    if engine in ({}, {"combined": True}):
        assert same(answers, expected)
    assert [answer.text for answer in answers[:3]] == [answer.text for answer in answers[3:]]


@pytest.mark.parametrize("lane", ["tcp", "shm", "handover"])
async def test_layers_of_what_was_found_leave_too(
    tiny_tales: Path, expected: list[Answer], lane: str
) -> None:
    options = ServeOptions(
        model=str(tiny_tales),
        port=0,
        engine=EngineOptions(threads=1, chunk_tokens=CHUNK),
        kv_transfer=TransferOptions(transfer=(lane,)),
        hand_over=HandOverOptions(stream_layers="on"),
        log=LogOptions(log_level="error"),
    )
    async with session_of_many() as session, Fleet(options) as fleet:
        client = Client(session, fleet.url, fleet.model_name)
        answers = await gather(*(client.ask(prompt, max_tokens=24) for prompt in PROMPTS * 2))
        assert sum(await found_in(client, answers)) > 0
        await client.until_idle()
    assert same(answers, expected)


async def test_tenants_share_nothing_and_turns_of_a_chat_meet(
    tiny_tales: Path, tmp_path: Path
) -> None:
    """Two prefill workers, and the policy that sends what begins alike to the same one."""
    path = tmp_path / "keys.toml"
    keys = {
        name: (await run("key", "create", str(path), name)).stdout.strip()
        for name in ("alice", "bob")
    }
    options = ServeOptions(
        model=str(tiny_tales),
        prefill=2,
        port=0,
        engine=EngineOptions(threads=1, chunk_tokens=CHUNK),
        routing=RoutingOptions(routing="prefix-affinity"),
        front=FrontOptions(api_keys=str(path)),
        log=LogOptions(log_level="error"),
    )
    async with session_of_many() as session, Fleet(options) as fleet:
        client = Client(session, fleet.url, fleet.model_name)

        async def found(tenant: str, prompt: str) -> int:
            headers = {"Authorization": f"Bearer {keys[tenant]}"}
            body = {"model": client.model, "prompt": prompt, "max_tokens": 4}
            url = client.url + "/v1/completions"
            async with session.post(url, json=body, headers=headers) as response:
                usage = (await response.json())["usage"]
            number: int = usage["prompt_tokens_details"]["cached_tokens"]
            return number

        chats = [f"{number}. {BEGINNING * 3}" for number in range(3)]
        assert [await found("alice", chat) for chat in chats] == [0, 0, 0]
        assert [await found("bob", chat) for chat in chats] == [0, 0, 0]
        for chat in chats:
            assert await found("alice", chat + "The next day") >= 8 * CHUNK
            assert await found("bob", chat + "The next day") >= 8 * CHUNK


async def test_a_pool_that_is_full_keeps_nothing_from_anybody(tiny_tales: Path) -> None:
    """Blocks for one prompt and a half: each prompt takes what was kept for the others."""
    prompts = [f"{number} " + BEGINNING for number in range(6)]
    async with running_fleet(tiny_tales, chunk_tokens=16, num_blocks=36) as client:
        answers = [await client.ask(prompt, max_tokens=8) for prompt in prompts * 2]
        load = await client.until_idle()
    assert [answer.text for answer in answers[:6]] == [answer.text for answer in answers[6:]]
    assert all(answer.finish_reason == "length" for answer in answers)
    assert load["prefill-0"]["num_blocks_cached"] > 0


async def test_logprobs_of_a_prompt_are_computed_whole(tiny_tales: Path) -> None:
    async with running_fleet(tiny_tales, chunk_tokens=CHUNK) as client:

        async def scored() -> tuple[list[float], dict[str, Any]]:
            async with client.post(PROMPTS[0], echo=True, max_tokens=4) as response:
                document = await response.json()
            (choice,) = document["choices"]
            return choice["logprobs"]["token_logprobs"], document["usage"]

        before = await scored()
        (plain,) = await gather(client.ask(PROMPTS[0], max_tokens=4))
        assert (await found_in(client, [plain]))[0] > 0
        assert await scored() == before
        logprobs, usage = before
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert len(logprobs) == usage["total_tokens"]
