"""A worker is killed in mid-stream: every choice goes on, and says what it would have said."""

import asyncio
import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from chaos.hold import Hold
from openai_kit import DEADLINE_S, eventually
from process_kit import session_of_many

from neuron_di.config import EngineOptions, LogOptions, ServeOptions
from neuron_di.obs.sync_point import VARIABLE
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

BODY: dict[str, Any] = {
    "prompt": "def main(",
    "n": 3,
    "seed": 11,
    "temperature": 1.0,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "logprobs": 2,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


async def stream(fleet: Fleet, has_begun: asyncio.Event) -> tuple[dict[int, list[Any]], list[Any]]:
    """(text, logprobs) of every chunk by choice, and the members that tell of a continuation.

    `has_begun` is set when there is a chunk of each choice.
    """
    said: dict[int, list[Any]] = defaultdict(list)
    continued = []
    async with (
        session_of_many() as session,
        session.post(
            f"{fleet.url}/v1/completions", json=BODY | {"model": fleet.model_name}
        ) as answer,
    ):
        assert answer.status == 200
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            assert "error" not in chunk
            (choice,) = chunk["choices"]
            said[choice["index"]].append((choice["text"], choice["logprobs"]))
            continued.append(chunk.get("neuron_di"))
            if len(said) == BODY["n"]:
                has_begun.set()
    return said, [each for each in continued if each is not None]


async def test_every_choice_of_an_answer_is_continued(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))  # who is held there cannot be at its end by now
    options = ServeOptions(
        model=str(llama),
        prefill=1,
        decode=2,
        port=0,
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="error"),
    )
    async with Fleet(options) as fleet:
        undisturbed, none = await stream(fleet, asyncio.Event())
        # The two decode workers take turns, so at least one of three choices is on each.
        pid, has_begun = fleet.pids()["decode-0"], asyncio.Event()
        with Hold(tmp_path, "decoding") as hold:
            streaming = asyncio.create_task(stream(fleet, has_begun))

            async def has_come() -> bool | None:
                return pid in hold.pids or None

            await eventually(has_come)
            await asyncio.wait_for(has_begun.wait(), DEADLINE_S)
            os.kill(pid, signal.SIGKILL)
        disturbed, continued = await streaming
    assert none == []
    assert sorted(undisturbed) == [0, 1, 2]
    assert disturbed == undisturbed
    assert continued
    assert all(each == {"continued": 1, "grade": "exact"} for each in continued)
