"""A worker is killed in mid-stream: every choice goes on, and says what it would have said."""

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from process_kit import session_of_many

from neuron_di.config import EngineOptions, LogOptions, ServeOptions
from neuron_di.serve import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

CHUNKS_BEFORE = 2  # of each choice, when the worker is killed: soon, as it does not wait for us
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


async def stream(fleet: Fleet, kill: bool) -> tuple[dict[int, list[Any]], list[Any]]:
    """(text, logprobs) of every chunk by choice, and the members that tell of a continuation."""
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
            if kill and min(len(said[index]) for index in range(BODY["n"])) == CHUNKS_BEFORE:
                os.kill(fleet.pids()["decode-0"], signal.SIGKILL)
                kill = False
    return said, [each for each in continued if each is not None]


async def test_every_choice_of_an_answer_is_continued(llama: Path) -> None:
    options = ServeOptions(
        model=str(llama),
        prefill=1,
        decode=2,
        port=0,
        engine=EngineOptions(threads=1),
        log=LogOptions(log_level="error"),
    )
    async with Fleet(options) as fleet:
        undisturbed, none = await stream(fleet, kill=False)
        # The two decode workers take turns, so at least one of three choices is on each.
        disturbed, continued = await stream(fleet, kill=True)
    assert none == []
    assert sorted(undisturbed) == [0, 1, 2]
    assert disturbed == undisturbed
    assert continued
    assert all(each == {"continued": 1, "grade": "exact"} for each in continued)
