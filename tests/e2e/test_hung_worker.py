"""A step hangs for ever: its request goes on elsewhere, its process says where, and comes back."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from chaos.hold import Hold
from openai_kit import DEADLINE_S

from neuron_di.config import EngineOptions, LimitOptions, LogOptions, ServeOptions
from neuron_di.obs.sync_point import VARIABLE
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

HANG_TIMEOUT_S = 10.0  # longer than what a start does in one turn
BODY = {"prompt": "def main(", "seed": 11, "max_tokens": 40, "ignore_eos": True}


async def answer(session: aiohttp.ClientSession, fleet: Fleet) -> str:
    body = BODY | {"model": fleet.model_name}
    async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
        return text


@pytest.mark.parametrize(
    ("place", "num_prefill", "num_decode"), [("prefilling", 2, 1), ("decoding", 1, 2)]
)
async def test_a_worker_whose_step_hangs_is_started_again(
    place: str,
    num_prefill: int,
    num_decode: int,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    told: asyncio.Queue[str] = asyncio.Queue()
    options = ServeOptions(
        model=str(llama),
        prefill=num_prefill,
        decode=num_decode,
        port=0,
        hang_timeout_s=HANG_TIMEOUT_S,
        limits=LimitOptions(stall_timeout_s=2.0),
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="error"),
    )
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
        Fleet(options, tell=told.put_nowait) as fleet,
    ):
        undisturbed = await answer(session, fleet)
        names = {pid: name for name, pid in fleet.pids().items()}
        with Hold(tmp_path, place) as hold:
            answering = asyncio.create_task(answer(session, fleet))
            await hold.come(DEADLINE_S)
            hold.let_others_pass()
            assert await answering == undisturbed
            name = names[hold.pids[0]]
            async with asyncio.timeout(DEADLINE_S):
                assert (
                    await told.get()
                    == f"{name} ended by itself with code 1; starting it again in 0.2 s"
                )
                assert (await told.get()).startswith(f"{name} is back (pid ")
        assert await answer(session, fleet) == undisturbed
    logged = capfd.readouterr().err
    assert "event=hangs" in logged
    assert "in reach" in logged, "where the step hung"
