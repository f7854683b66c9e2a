"""Bad input gets words; a worker killed while its memory is mapped costs nobody an answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.device_check.fleets import fleet
from benchmarks.device_check.models import checkpoint
from benchmarks.device_check.record import Record
from benchmarks.device_check.settings import ROOT, Settings
from neuron_di.serve import Fleet

REFUSAL_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A `neuron-di serve` that must say no, in words that have these in them."""

    name: str
    flags: tuple[str, ...]
    environ: dict[str, str]
    words: tuple[str, ...]


REFUSALS = (
    Refusal("no GPU is visible", (), {"CUDA_VISIBLE_DEVICES": ""}, ("GPU",)),
    Refusal("a GPU that is not there", ("--cuda-devices=99",), {}, ("cuda-devices",)),
    Refusal("a pool larger than the GPU", ("--kv-memory=100TiB",), {}, ("memory",)),
    Refusal("ranks on GPUs", ("--tp=2",), {}, ("tp",)),
)


def measure(settings: Settings, record: Record) -> None:
    model = checkpoint(settings.shapes[0], Path(settings.models))
    wrong = refusals(settings, record, model) if settings.device == "cuda" else []
    lost = asyncio.run(killed(settings, record, model))
    if wrong or lost:
        raise RuntimeError("; ".join([*wrong, *lost]))


def refusals(settings: Settings, record: Record, model: Path) -> list[str]:
    """What did not refuse as it should. In a rehearsal a simulated GPU is always visible."""
    rows, wrong = [], []
    for refusal in REFUSALS[1:] if settings.is_small else REFUSALS:
        code, said = _serve(refusal, model)
        last = (said.strip().splitlines() or [""])[-1].replace(str(ROOT), ".")
        rows.append([refusal.name, str(code), last.replace(str(model), "MODEL")])
        record.table("Refusals", ["", "exit code", "last line"], rows)
        is_clear = code not in (None, 0) and _TRACEBACK not in said
        if not is_clear or not all(word.lower() in said.lower() for word in refusal.words):
            wrong.append(f"{refusal.name}: no clear refusal")
    return wrong


def _serve(refusal: Refusal, model: Path) -> tuple[int | None, str]:
    """Exit code, None where it had to be ended, and what it said."""
    command = [sys.executable, "-m", "neuron_di", "serve", str(model), "--device=cuda", "--port=0"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [*command, "--log-level=error", *refusal.flags],
            cwd=ROOT, env={**os.environ, **refusal.environ},
            stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code: int | None = process.wait(REFUSAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        said.seek(0)
        return code, said.read()


async def killed(settings: Settings, record: Record, model: Path) -> list[str]:
    """What was not as without a fault. Streams run, one worker after the other is killed."""
    wrong: list[str] = []
    is_invariant = settings.device == "cuda"
    async with (
        fleet(settings, model, decode=2, batch_invariant=is_invariant) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as session,
    ):
        client = Client(session, server, settings)
        expected = await client.ask_all()
        if await client.ask_all() != expected:
            wrong.append("the same prompts had other tokens without any fault")
        for name in ("decode-0", "prefill-0"):
            pid = server.pids()[name]
            answers = asyncio.create_task(client.ask_all())
            await client.first_token.wait()
            os.kill(pid, signal.SIGKILL)
            found = await answers
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            record.note(f"{name} killed: {same} of {len(expected)} answers as without it.")
            if same < len(expected):
                wrong.append(f"{len(expected) - same} answers changed when {name} was killed")
            await _back(server, name, pid)
    return wrong


async def _back(server: Fleet, name: str, pid: int) -> None:
    """Until it runs again, and the proxy can use it. TimeoutError where it does not."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while server.pids().get(name, pid) == pid:  # noqa: ASYNC110 - a fleet tells nobody
            await asyncio.sleep(0.2)


class Client:
    """Asks for the same answers again and again, streamed and greedy."""

    def __init__(self, session: aiohttp.ClientSession, server: Fleet, settings: Settings) -> None:
        self._session = session
        self._server = server
        self._num_new = settings.pick(256, 128, 10)
        self._prompts = [
            [3 + (7 * number + 13 * at) % 2000 for at in range(settings.pick(900, 400, 20))]
            for number in range(settings.pick(16, 8, 3))
        ]
        self.first_token = asyncio.Event()

    async def ask_all(self) -> list[str]:
        """Every answer's text. aiohttp.ClientError where one is refused or cut."""
        self.first_token.clear()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(prompt)) for prompt in self._prompts]
        return [task.result() for task in tasks]

    async def _ask(self, prompt: list[int]) -> str:
        body: dict[str, Any] = {
            "model": self._server.model_name,
            "prompt": prompt,
            "max_tokens": self._num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        lines = []
        url = f"{self._server.url}/v1/completions"
        async with self._session.post(url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.first_token.set()
                    lines.append(_text_of(line))
        return "".join(lines)


def _text_of(line: bytes) -> str:
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise RuntimeError(f"an answer ended with {event['error']}")
    return "".join(choice.get("text", "") for choice in event.get("choices", []))
