"""A client that leaves frees what its request held, on both workers, wherever it was."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Answer, Client, eventually
from process_kit import running_fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHUNK_TOKENS = 8
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 3500}
LONG_PROMPT = list(range(3, 1903)) * 2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(llama: Path) -> AsyncIterator[Client]:
    """One place to decode, few to prefill, and prompts take many steps."""
    async with running_fleet(
        llama, chunk_tokens=CHUNK_TOKENS, decode_batch=1, prefill_batch=2, prefix_cache="off"
    ) as client:
        yield client


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def still_answers(narrow: Client) -> AsyncIterator[None]:
    """Before and after each test the fleet is idle, and afterwards it answers as before."""
    await narrow.until_idle()
    answer = await narrow.ask("def main(", max_tokens=4)
    yield
    await narrow.until_idle()
    assert (await narrow.ask("def main(", max_tokens=4)).labels == answer.labels


@pytest.mark.parametrize("stream", [False, True])
async def test_while_prefill_runs(narrow: Client, stream: bool) -> None:
    steps = (await narrow.load())["prefill-0"]["num_steps"]
    reading = asyncio.create_task(narrow.ask(LONG_PROMPT, max_tokens=9, stream=stream))
    await _until(narrow, "prefill-0", num_running=1)
    await _leave(reading)
    load = await narrow.until_idle()
    num_steps = load["prefill-0"]["num_steps"] - steps
    assert num_steps < len(LONG_PROMPT) // CHUNK_TOKENS, "the prompt was computed to its end"


async def test_while_streaming(narrow: Client) -> None:
    steps = (await narrow.load())["decode-0"]["num_steps"]
    async with narrow.post("def main(", **LONG, stream=True) as response:
        chunks = [await response.content.readuntil(b"\n\n") for _ in range(5)]
    load = await narrow.until_idle()
    assert load["decode-0"]["num_steps"] - steps < LONG["max_tokens"] - 1
    first = json.loads(chunks[0].removeprefix(b"data: "))
    receipt = await narrow.receipt(first["id"])
    assert receipt["finish_reason"] == "cancelled"
    assert receipt["num_generated"] < LONG["max_tokens"]


async def test_while_decoding_for_an_answer_that_is_not_streamed(narrow: Client) -> None:
    steps = (await narrow.load())["decode-0"]["num_steps"]
    reading = asyncio.create_task(narrow.ask("def main(", **LONG))
    await _until(narrow, "decode-0", num_running=1)
    await _leave(reading)
    load = await narrow.until_idle()
    assert load["decode-0"]["num_steps"] - steps < LONG["max_tokens"] - 1


async def test_while_parked_for_a_busy_decode_worker(narrow: Client) -> None:
    running = asyncio.create_task(narrow.ask("def main(", **LONG))
    await _until(narrow, "decode-0", num_running=1)
    parked = asyncio.create_task(narrow.ask("import os", max_tokens=9))
    await _until(narrow, "decode-0", num_running=1, num_waiting=1)
    assert (await narrow.load())["prefill-0"]["num_transferring"] == 1
    await _leave(parked)
    await _until(narrow, "decode-0", num_running=1, num_waiting=0)
    # A worker counts its blocks at the end of a turn, its requests at any time.
    num_blocks = (await narrow.load())["prefill-0"]["num_blocks"]
    counts = {"num_running": 0, "num_transferring": 0, "num_blocks_free": num_blocks}
    await _until(narrow, "prefill-0", **counts)
    load = await narrow.load()
    assert load["decode-0"]["num_running"] == 1, "the other request went on"
    await _leave(running)


async def test_while_waiting_for_a_busy_prefill_worker(narrow: Client) -> None:
    running = asyncio.create_task(narrow.ask(LONG_PROMPT, max_tokens=2, ignore_eos=True))
    await _until(narrow, "prefill-0", num_running=1)
    waiting = asyncio.create_task(narrow.ask("import os", max_tokens=9))
    await _until(narrow, "prefill-0", num_running=1, num_waiting=1)
    await _leave(waiting)
    await _until(narrow, "prefill-0", num_running=1, num_waiting=0)
    answer = await running
    assert answer.usage == {
        "prompt_tokens": len(LONG_PROMPT),
        "completion_tokens": 2,
        "total_tokens": len(LONG_PROMPT) + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_many_leave_at_once(narrow: Client) -> None:
    """In every state there is: some run, some are parked, most wait."""
    readings = [
        asyncio.create_task(
            narrow.ask([3 + index] * (1 + 40 * index), stream=index % 2 == 0, **LONG)
        )
        for index in range(12)
    ]
    await _until(narrow, "decode-0", num_running=1)
    await asyncio.gather(*map(_leave, readings))


async def _until(client: Client, worker_id: str, **counters: int) -> None:
    """Wait until a worker's status shows all these numbers at once."""

    async def shown() -> bool | None:
        status = (await client.load())[worker_id]
        return all(status[name] == number for name, number in counters.items()) or None

    await eventually(shown)


async def _leave(reading: asyncio.Task[Answer]) -> None:
    """Disconnect: a client that stops waiting closes its connection."""
    assert not reading.done()
    reading.cancel()
    await asyncio.wait({reading})
    assert reading.cancelled()
