"""Workers of one host hand blocks over without a copy; whoever is killed, none is lost."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai_kit import Answer, Client, eventually, gather
from process_kit import session_of_many

from neuron_di.config import EngineOptions, LogOptions, ServeOptions, TransferOptions
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

NUM_BLOCKS = 300
PROMPTS = [f"Once upon a time, {number} friends " * (3 + number % 5) for number in range(16)]
LONG = {"max_tokens": 400, "ignore_eos": True}


def options(folder: Path, **more: Any) -> ServeOptions:
    return ServeOptions(
        model=str(folder),
        port=0,
        engine=EngineOptions(threads=1, num_blocks=NUM_BLOCKS),
        log=LogOptions(log_level="error"),
        **more,
    )


async def answers(client: Client) -> list[Answer]:
    return await gather(*(client.ask(prompt, max_tokens=24) for prompt in PROMPTS))


async def test_no_byte_of_kv_moves_and_no_block_is_lost(tiny_tales: Path) -> None:
    async with session_of_many() as session, Fleet(options(tiny_tales, decode=2)) as fleet:
        client = Client(session, fleet.url, fleet.model_name)
        found = await answers(client)
        receipts = [await client.receipt(answer.answer_id) for answer in found]
        assert {each["decode_worker"] for each in receipts} == {"decode-0", "decode-1"}
        for each in receipts:
            assert (each["link"], each["form"], each["kv_bytes"]) == ("handover", "handed_over", 0)
            assert each["decode"]["kv_blocks"] > 0
        load = await client.until_idle()
        assert {status["num_blocks"] for status in load.values()} == {NUM_BLOCKS}
        for name in ("decode-0", "decode-1"):
            (lane,) = load[name]["lanes"]
            assert (lane["peer"], lane["engine"]) == ("prefill-0", "handover")
            assert load[name]["kv_bytes_received"] == 0


async def test_a_copy_gives_the_same_answers(tiny_tales: Path, tiny_tales_1p1d: Client) -> None:
    copying = options(tiny_tales, kv_transfer=TransferOptions(transfer=("shm",)))
    async with session_of_many() as session, Fleet(copying) as fleet:
        client = Client(session, fleet.url, fleet.model_name)
        copied = await answers(client)
        receipt = await client.receipt(copied[0].answer_id)
        assert (receipt["link"], receipt["form"]) == ("shm", "direct")
        assert receipt["kv_bytes"] > 0
    handed = await answers(tiny_tales_1p1d)
    assert [answer.text for answer in handed] == [answer.text for answer in copied]


@pytest.mark.timeout(300)
async def test_who_is_killed_in_mid_request_comes_back_with_its_blocks(tiny_tales: Path) -> None:
    async with session_of_many() as session, Fleet(options(tiny_tales)) as fleet:
        client = Client(session, fleet.url, fleet.model_name)
        undisturbed = [answer.text for answer in await answers(client)]
        for names in (("decode-0",), ("prefill-0",), ("decode-0", "prefill-0")):
            former = fleet.pids()
            async with client.post(PROMPTS[0], stream=True, **LONG) as long:
                await long.content.readline()  # so that one holds blocks of both for certain
                running = asyncio.create_task(answers(client))
                await asyncio.sleep(0.02)  # and others are anywhere
                for name in names:
                    os.kill(former[name], signal.SIGKILL)
                assert (await long.read()).endswith(b"data: [DONE]\n\n")
            assert [answer.text for answer in await running] == undisturbed
            await eventually(partial(_when_back, client, fleet, former, names))
        load = await client.until_idle()
        assert {status["num_blocks"] for status in load.values()} == {NUM_BLOCKS}
        receipt = await client.receipt((await client.ask(PROMPTS[0], max_tokens=4)).answer_id)
        assert receipt["link"] == "handover"


async def _when_back(
    client: Client, fleet: Fleet, former: dict[str, int], names: tuple[str, ...]
) -> bool | None:
    pids = fleet.pids()
    if any(pids.get(name) in (None, former[name]) for name in names):
        return None
    report = await client.get("/status")
    here = {each["record"]["worker_id"]: each for each in report["workers"] if each["status"]}
    is_back = all(name in here and here[name]["record"]["pid"] == pids[name] for name in names)
    return is_back or None
