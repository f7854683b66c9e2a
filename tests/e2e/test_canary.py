"""B53: what clients send and get, and their keys, are nowhere but in their answers.

Everything runs as users start it, at log level debug; the canaries go in wherever a client can
put text, good requests and bad ones, and a worker is killed under a stream.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai_kit import Answer, Client, Refused, eventually
from process_kit import command, run, said, session_of_many

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "canaryprompt7391"
PIECE_CHARS = 12  # of an answer: long enough not to be found by chance
BAD_BODIES: list[Any] = [
    PROMPT.encode(),
    b'{"model": "' + PROMPT.encode(),
    b'{"model": "MODEL", "prompt": "%b", "prompt": "%b"}' % (PROMPT.encode(), PROMPT.encode()),
    b'{"model": "MODEL", "prompt": "%b\xff"}' % PROMPT.encode(),
    b'{"model": "MODEL", "prompt": "%b\\ud800"}' % PROMPT.encode(),
    {"prompt": {PROMPT: PROMPT}},
    {"prompt": [PROMPT, 1]},
    {"prompt": PROMPT, "stop": {"text": PROMPT}},
    {"prompt": PROMPT, "stop": [PROMPT] * 100},
    {"prompt": PROMPT, "seed": PROMPT},
    {"prompt": PROMPT, "logit_bias": {PROMPT: 1}},
    {"prompt": PROMPT, "n": 1000},
    {"prompt": PROMPT, "suffix": PROMPT},
    {"prompt": PROMPT * 2000},
    {"messages": PROMPT},
    {"messages": [{"role": PROMPT, "content": PROMPT}]},
    {"messages": [{"role": "user", "content": {PROMPT: PROMPT}}]},
    {"messages": [{"role": "user", "content": [{"type": PROMPT, PROMPT: PROMPT}]}]},
    {
        "messages": [{"role": "user", "content": PROMPT}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": PROMPT}}},
    },
    {
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PROMPT}}],
    },
]


class Seen:
    """All that anybody but the client who asked could read."""

    def __init__(self) -> None:
        self.logs: list[str] = []
        self.texts: list[str] = []  # of errors, metrics, states and receipts
        self.answers: list[str] = []  # what only the client may see


@asynccontextmanager
async def serving(
    folder: Path, keys: Path, seen: Seen
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """`serve` with two decode workers, its URL; every line it logs goes to `seen`."""
    async with command(
        "serve",
        str(folder),
        "--port=0",
        "--threads=1",
        "--decode=2",
        "--log-level=debug",
        f"--api-keys={keys}",
    ) as process:
        url = (await said(process, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        assert process.stderr is not None
        stderr = process.stderr

        async def read() -> None:
            while line := await stderr.readline():
                seen.logs.append(line.decode())

        reading = asyncio.create_task(read())
        try:
            yield url, process
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 60)
        finally:
            if process.returncode is None:
                process.kill()
            await reading


async def make_keys(path: Path) -> dict[str, str]:
    """The texts of two keys by tenant, made as an operator makes them."""
    tenant = await run("key", "create", str(path), "alice")
    operator = await run("key", "create", str(path), "op", "--operator")
    return {"alice": tenant.stdout.strip(), "op": operator.stdout.strip()}


async def ask(client: Client, seen: Seen, body: Any, key: str | None) -> int:
    """Post it. An answer is for the client only; a refusal may be read by anybody."""
    if isinstance(body, dict):
        body = json.dumps({"model": client.model, **body}).encode()
    path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = body.replace(b"MODEL", client.model.encode())
    async with client.session.post(client.url + path, data=data, headers=headers) as response:
        text = await response.text()
    if response.status == 200:
        seen.answers.append(text)
    else:
        seen.texts.append(f"{response.headers} {text}")
    return response.status


async def stream_over_a_killed_worker(client: Client, seen: Seen, operator: str) -> None:
    body = {
        "model": client.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 300,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.session.post(f"{client.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200
        lines = [await response.content.readline() for _ in range(40)]
        headers = {"Authorization": f"Bearer {operator}"}
        async with client.session.get(f"{client.url}/status", headers=headers) as state:
            report = await state.json()
        (pid,) = [
            each["record"]["pid"]
            for each in report["workers"]
            if f"decode={each['record']['worker_id']};" in response.headers["X-Neuron-Di-Route"]
        ]
        os.kill(pid, signal.SIGKILL)
        lines += [line async for line in response.content]
    seen.answers.append(b"".join(lines).decode())
    assert lines[-2] == b"data: [DONE]\n"


def texts_of(answer: str) -> list[str]:
    """What the model said: one text, or the texts of the choices."""
    if not answer.startswith("data: "):
        choices = json.loads(answer)["choices"]
        return [c.get("text") or c["message"]["content"] or "" for c in choices]
    events = [line.removeprefix("data: ") for line in answer.splitlines() if "{" in line]
    chunks = [json.loads(event)["choices"] for event in events]
    return ["".join(c["delta"].get("content") or "" for cs in chunks for c in cs)]


def pieces_of(text: str) -> list[str]:
    return [text[i : i + PIECE_CHARS] for i in range(0, len(text) - PIECE_CHARS, PIECE_CHARS)]


async def look_around(client: Client, seen: Seen, operator: str) -> None:
    """Whatever an operator reads, and what anybody can."""
    headers = {"Authorization": f"Bearer {operator}"}
    ids = {
        json.loads(line.removeprefix("data: "))["id"]
        for answer in seen.answers
        for line in answer.splitlines()
        if '"id"' in line
    }
    paths = ["/metrics", "/status", "/v1/models", "/openapi.json", "/nothing/here"]
    for path in [*paths, *(f"/v1/receipts/{each}" for each in ids)]:
        async with client.session.get(client.url + path, headers=headers) as response:
            seen.texts.append(await response.text())
    for path in ("/health", "/ready", "/metrics"):
        async with aiohttp.ClientSession() as nobody, nobody.get(client.url + path) as response:
            seen.texts.append(await response.text())


async def test_b53_no_prompt_no_answer_and_no_key_is_seen_elsewhere(
    llama: Path, tmp_path: Path
) -> None:
    seen = Seen()
    keys = await make_keys(tmp_path / "keys.toml")
    wrong = keys["alice"][:-1] + ("a" if keys["alice"][-1] != "a" else "b")
    good: list[Any] = [
        {"prompt": PROMPT, "max_tokens": 40, "stop": [PROMPT], "user": PROMPT, "logprobs": 2},
        {"prompt": [PROMPT, PROMPT], "max_tokens": 40, "n": 2, "echo": True},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "logprobs": True},
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "stream": True},
    ]
    async with (
        serving(llama, tmp_path / "keys.toml", seen) as (url, _),
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {keys['alice']}"}) as session,
    ):
        client = Client(session, url, "tiny-llama")
        assert [await ask(client, seen, body, keys["alice"]) for body in good] == [200] * len(good)
        for body in BAD_BODIES:
            # Some are the client's right: a template may know any role.
            status = await ask(client, seen, body, keys["alice"])
            assert status < 500, body
        for key in (wrong, PROMPT, keys["alice"] + PROMPT):
            assert await ask(client, seen, good[0], key) == 401
        await stream_over_a_killed_worker(client, seen, keys["op"])
        await look_around(client, seen, keys["op"])
    logs, texts = "".join(seen.logs), "\n".join(seen.texts)
    assert "event=request_end" in logs
    answers = [text for answer in seen.answers for text in texts_of(answer)]
    pieces = [piece for text in answers for piece in pieces_of(text)]
    assert len(pieces) > 50
    secrets = [key.split("-", 2)[2] for key in (*keys.values(), wrong)]
    for canary in (PROMPT, *secrets, *pieces):
        for form in {
            canary,
            json.dumps(canary)[1:-1],
            json.dumps(canary, ensure_ascii=False)[1:-1],
        }:
            assert form not in logs, "in the logs"
            assert form not in texts, "in an error, the metrics, a state or a receipt"


async def ask_until_admitted(client: Client) -> Answer:
    """The last of those who left may not be noticed yet, and wait before us."""
    while True:
        try:
            return await client.ask("def main(", max_tokens=4)
        except Refused as refusal:
            if refusal.status != 503:
                raise
        await asyncio.sleep(0.1)


async def test_b26_a_storm_of_aborts_leaves_nothing_behind(llama_1p1d: Client) -> None:
    """A thousand clients that leave at any moment: no block, no place, no request stays.

    And who comes after them is served as before, within ten seconds.
    """
    await llama_1p1d.until_idle()
    before = await llama_1p1d.ask("def main(", max_tokens=4)

    async def leave(number: int) -> None:
        # At another moment each: before the head, in prefill, in the hand-over, in mid-stream.
        params = {"max_tokens": 400, "ignore_eos": True, "stream": number % 3 > 0}
        prompt = [3 + number % 50] * (1 + 7 * (number % 40))
        asking = asyncio.create_task(llama_1p1d.ask(prompt, **params))
        await asyncio.sleep(0.002 * (number % 97))
        asking.cancel()
        await asyncio.wait({asking})

    async with asyncio.timeout(100):
        for start in range(0, 1000, 50):
            await asyncio.gather(*(leave(start + index) for index in range(50)))
    async with asyncio.timeout(10):
        after = await asyncio.gather(*(ask_until_admitted(llama_1p1d) for _ in range(20)))
    assert {str(each.labels) for each in after} == {str(before.labels)}
    load = await llama_1p1d.until_idle()
    assert all(each["num_blocks_quarantined"] == 0 for each in load.values())


async def test_b27_under_overload_everything_is_answered(llama: Path, tmp_path: Path) -> None:
    """More than can run and wait, at once: 200 or 503 for each, none lost and none stuck."""
    arguments = ("serve", str(llama), "--port=0", "--threads=1", "--requests-max=4")
    async with command(*arguments, "--queue-max=8", "--log-level=warning") as process:
        url = (await said(process, r"serving tiny-llama at (http://\S+)/v1$"))[1]
        async with session_of_many() as session:
            client = Client(session, url, "tiny-llama")
            statuses = []

            async def one(number: int) -> None:
                params = {"max_tokens": 20, "ignore_eos": True, "stream": number % 2 > 0}
                async with client.post("def main(", **params) as response:
                    body = await response.read()
                statuses.append(response.status)
                if response.status == 200:
                    assert body.count(b'"finish_reason":"length"') == 1
                else:
                    assert json.loads(body)["error"]["code"] == "over_capacity"
                    assert 1 <= int(response.headers["Retry-After"]) <= 60

            async with asyncio.timeout(100):
                for _ in range(3):
                    await asyncio.gather(*(one(number) for number in range(40)))
            assert len(statuses) == 120
            assert set(statuses) == {200, 503}
            assert statuses.count(200) >= 3 * 12
            await client.until_idle()

            async def answers() -> bool | None:
                return (await client.ask("def main(", max_tokens=4)).usage is not None or None

            assert await eventually(answers)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
