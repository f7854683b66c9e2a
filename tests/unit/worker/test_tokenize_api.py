"""Tokens over HTTP: a worker's own answers, one at a time."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from transformers import AutoTokenizer
from worker_kit import until

from neuron_di.request import Tokenizer
from neuron_di.testing import write_random_checkpoint
from neuron_di.wire import DetokenizeIds, PromptOptions, TokenizePrompt, encode_json
from neuron_di.worker.prompts import PromptReader
from neuron_di.worker.tokenize_api import QUEUED_MAX, add_tokenize_routes

ASK = {"role": "user", "content": "hi"}
TEXT = "def f(x):\n    return 'héé 日本'\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_random_checkpoint(folder, "llama")
    return folder


class Site:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, path: str, body: bytes) -> tuple[int, dict[str, object]]:
        async with self.session.post(f"{self.url}{path}", data=body) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def serving(prompts: PromptReader) -> AsyncIterator[Site]:
    app = web.Application()
    add_tokenize_routes(app, prompts)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield Site(f"http://127.0.0.1:{port}", session)
    finally:
        await runner.cleanup()


def reader(folder: Path) -> PromptReader:
    tokenizer = Tokenizer.load(folder)
    return PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=512)


def question(endpoint: str, prompt: object, **fields: object) -> bytes:
    raw = msgspec.Raw(json.dumps(prompt).encode())
    return encode_json(TokenizePrompt(endpoint=endpoint, prompt=raw, **fields))


async def test_ids_and_strings_equal_transformers(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs(TEXT)["input_ids"]
    async with serving(reader(folder)) as site:
        plain = await site.ask("/tokenize", question("completions", TEXT))
        told = await site.ask("/tokenize", question("completions", TEXT, with_strings=True))
        back = await site.ask("/detokenize", encode_json(DetokenizeIds(ids)))
        special = await site.ask("/detokenize", encode_json(DetokenizeIds([1, *ids])))
    assert plain == (
        200,
        {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None},
    )
    assert told[1]["token_strs"] == theirs.convert_ids_to_tokens(ids)
    assert back == (200, {"prompt": TEXT})
    assert special == (200, {"prompt": "<|im_start|>" + TEXT})


async def test_a_chat_is_what_its_leg_would_be(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    async with serving(reader(folder)) as site:
        for wish in (True, False):
            options = PromptOptions(add_generation_prompt=wish)
            body = question("chat", [ASK], options=options)
            status, answer = await site.ask("/tokenize", body)
            assert status == 200
            expected = theirs.apply_chat_template([ASK], add_generation_prompt=wish)
            assert answer["tokens"] == expected["input_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", question("chat", "x"), 400, "messages"),
        ("/tokenize", question("completions", {}), 400, "prompt"),
        ("/tokenize", question("completions", "\ud800"), 502, None),
        ("/tokenize", b"{", 502, None),  # the proxy's mistake, not the client's
        ("/tokenize", b'{"endpoint":"other","prompt":1}', 502, None),
        ("/tokenize", question("completions", "a" * 50_000), 400, "prompt"),
        ("/detokenize", b'{"tokens":[2048]}', 400, "tokens"),
        ("/detokenize", encode_json(DetokenizeIds([5] * 513)), 400, "tokens"),
        ("/detokenize", b'{"tokens":[-1]}', 400, "tokens"),
        ("/detokenize", b'{"tokens":["x"]}', 502, None),
    ],
)
async def test_refusals_are_said_in_words(
    folder: Path, path: str, body: bytes, status: int, param: str | None
) -> None:
    async with serving(reader(folder)) as site:
        found, answer = await site.ask(path, body)
        after, _ = await site.ask("/tokenize", question("completions", "x"))
    assert (found, answer["type"], answer.get("param")) == (status, "failed", param)
    assert after == 200


class SlowReader(PromptReader):
    """Each prompt waits for `gate`; counts how many are worked on together."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.load(folder)
        super().__init__(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=512)
        self.gate = threading.Event()
        self.num_running = self.num_running_max = self.num_done = 0

    def read_prompt(self, *args: object) -> object:
        self.num_running += 1
        self.num_running_max = max(self.num_running, self.num_running_max)
        self.gate.wait(20)
        self.num_running -= 1
        self.num_done += 1
        return super().read_prompt(*args)


async def test_one_is_worked_on_and_few_wait(folder: Path) -> None:
    prompts = SlowReader(folder)
    body = question("completions", "x")
    async with serving(prompts) as site:
        asks = [asyncio.create_task(site.ask("/tokenize", body)) for _ in range(QUEUED_MAX + 4)]
        await until(lambda: sum(ask.done() for ask in asks) == 3)
        refused = [ask.result() for ask in asks if ask.done()]
        prompts.gate.set()
        answers = await asyncio.gather(*asks)
    assert [(status, answer["code"]) for status, answer in refused] == [(503, "over_capacity")] * 3
    assert sorted(status for status, _ in answers) == [200] * (QUEUED_MAX + 1) + [503] * 3
    assert prompts.num_running_max == 1


async def test_who_leaves_gives_its_turn_up_when_its_work_is_done(folder: Path) -> None:
    prompts = SlowReader(folder)
    body = question("completions", "x")
    async with serving(prompts) as site:
        leaver = asyncio.create_task(site.ask("/tokenize", body))
        await until(lambda: prompts.num_running == 1)
        leaver.cancel()
        stayer = asyncio.create_task(site.ask("/tokenize", body))
        await asyncio.sleep(0.1)
        running_meanwhile = prompts.num_running
        prompts.gate.set()
        status, _ = await stayer
    assert running_meanwhile == 1
    assert status == 200
    assert prompts.num_running_max == 1
    assert prompts.num_done == 2


async def test_a_prompt_that_got_no_thread_keeps_no_other_one_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = question("completions", "x")
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="prompts"))
    start = threading.Thread.start

    def start_other(thread: threading.Thread) -> None:
        if thread.name.startswith("prompts"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async with serving(reader(folder)) as site:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_other)
            _, failed = await site.ask("/tokenize", body)
        async with asyncio.timeout(20):
            status, _ = await site.ask("/tokenize", body)
    assert (failed["code"], failed["retryable"]) == ("worker_failed", True)  # others may have one
    assert status == 200
