"""/tokenize and /detokenize from a client's document to a worker's tokenizer, over real HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from scripted_worker import make_record, make_status
from transformers import AutoTokenizer

from neuron_di.config import LimitOptions
from neuron_di.errors import BadRequest, CapacityError, NeuronDiError
from neuron_di.request import Tokenizer
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE
from neuron_di.wire import WorkerRecord, encode_json
from neuron_di.worker.leg_report import failed
from neuron_di.worker.prompts import PromptReader
from neuron_di.worker.tokenize_api import add_tokenize_routes
from neuron_di_proxy.failure import LegFailed
from neuron_di_proxy.health import Health
from neuron_di_proxy.known_models import ModelNotFound
from neuron_di_proxy.route import Router
from neuron_di_proxy.tokenize import forward_tokenize
from neuron_di_proxy.worker_client import WorkerClient

ASK = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    write_random_checkpoint(folder, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    return folder


class Workers:
    """A directory of tokenizers that listen, or do not. All of them are fit."""

    def __init__(self, stack: AsyncExitStack, client: WorkerClient) -> None:
        self._stack = stack
        self._records: list[WorkerRecord] = []
        self.client = client
        self.router = Router(self, self)
        self.health = Health(client, self, LimitOptions(freeze_timeout_s=1, probe_interval_s=0.05))
        self.asked: list[str] = []

    def workers(self) -> tuple[WorkerRecord, ...]:
        return tuple(self._records)

    def why_not(self, _: WorkerRecord) -> str:
        return ""

    async def add(
        self, name: str, folder: Path, *, model: str = "m", refuses: NeuronDiError | None = None
    ) -> None:
        tokenizer = Tokenizer.load(folder)
        prompts = PromptReader(tokenizer, num_vocab=tokenizer.num_vocab, context_tokens=256)

        @web.middleware
        async def note(request: web.Request, handler: object) -> web.StreamResponse:
            if request.path != "/status":
                self.asked.append(name)
            if refuses is not None:
                return web.Response(body=encode_json(failed(refuses)), status=refuses.http_status)
            return await handler(request)

        async def tell(_: web.Request) -> web.Response:
            record = next(each for each in self._records if each.worker_id == name)
            return web.Response(body=encode_json(make_status(record)))

        app = web.Application(middlewares=[note])
        add_tokenize_routes(app, prompts)
        app.router.add_get("/status", tell)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._announce(name, model, runner.addresses[0][1])

    async def add_dead(self, name: str) -> None:
        async with AsyncExitStack() as gone:
            runner = web.AppRunner(web.Application())
            await runner.setup()
            gone.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[0][1]
        self._announce(name, "m", port)

    async def add_frozen(self, name: str) -> None:
        """One that takes connections and says nothing."""

        async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(1024):
                pass
            writer.close()

        server = await asyncio.start_server(listen, "127.0.0.1", 0)
        self._stack.callback(server.close)
        self._announce(name, "m", server.sockets[0].getsockname()[1])

    async def ask(self, kind: str, **fields: object) -> dict[str, object]:
        body = json.dumps(fields).encode()
        return json.loads(await self.forward(kind, body))

    async def forward(self, kind: str, body: bytes) -> bytes:
        return await forward_tokenize(kind, body, self.router, self.client, self.health)

    def _announce(self, name: str, model: str, port: int) -> None:
        self._records.append(make_record(name, "decode", port, model=model, context_tokens=256))


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(WorkerClient(LimitOptions()))
        yield Workers(stack, client)


async def test_texts_chats_and_ids(workers: Workers, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    await workers.add("one", folder)
    ids = theirs("héllo 日本")["input_ids"]
    text = await workers.ask("tokenize", model="m", prompt="héllo 日本", return_token_strs=True)
    assert text == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": theirs.convert_ids_to_tokens(ids),
    }
    fields = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    chat = await workers.ask("tokenize", messages=[ASK], **fields)  # the only model's
    assert chat["token_strs"] is None
    assert (
        chat["tokens"]
        == (
            theirs.apply_chat_template(
                [ASK], tools=[TOOL], add_generation_prompt=True, enable_thinking=True
            )["input_ids"]
        )
    )
    back = await workers.ask("detokenize", model="m", tokens=[1, *ids])
    assert back == {"prompt": "<|im_start|>héllo 日本"}
    nothing = await workers.ask("detokenize", tokens=[])
    assert nothing == {"prompt": ""}


async def test_a_last_message_goes_on_as_in_a_chat(workers: Workers, folder: Path) -> None:
    await workers.add("one", folder)
    last = [ASK, {"role": "assistant", "content": "so"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(last, continue_final_message=True)["input_ids"]
    fields = {"messages": last, "continue_final_message": True}
    for further in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        assert (await workers.ask("tokenize", **fields, **further))["tokens"] == expected
    with pytest.raises(BadRequest) as caught:
        await workers.ask("tokenize", **fields, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


async def test_how_long_to_reason_is_said_as_in_a_chat(workers: Workers, tmp_path: Path) -> None:
    template = TOOL_CHAT_TEMPLATE + "{{ reasoning_effort }}"
    write_random_checkpoint(tmp_path, "llama", chat_template=template)
    await workers.add("one", tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for effort in ("low", "high"):
        expected = theirs.apply_chat_template(
            [ASK], add_generation_prompt=True, reasoning_effort=effort
        )["input_ids"]
        chat = await workers.ask("tokenize", messages=[ASK], reasoning_effort=effort)
        assert chat["tokens"] == expected


async def test_null_is_what_is_not_there(workers: Workers, folder: Path) -> None:
    await workers.add("one", folder)
    others = ("chat_template", "mm_processor_kwargs", "model", "return_token_strs", "tools")
    text = {**dict.fromkeys(others), "messages": None, "prompt": "x"}
    assert await workers.ask("tokenize", **text) == await workers.ask("tokenize", prompt="x")
    chat = {**dict.fromkeys(others), "messages": [ASK], "prompt": None}
    assert await workers.ask("tokenize", **chat) == await workers.ask("tokenize", messages=[ASK])
    assert await workers.ask("detokenize", tokens=[5], model=None) is not None


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": [ASK]}, "prompt"),
        ("tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("tokenize", {"prompt": "x", "frobnicate": 1}, "frobnicate"),
        ("tokenize", {"prompt": "x", "frobnicate": None}, "frobnicate"),
        ("tokenize", {"prompt": None, "messages": None}, "prompt"),
        ("tokenize", {"messages": [ASK], "tools": []}, "tools"),
        ("tokenize", {"messages": [ASK], "tools": [1]}, "tools[0]"),
        ("tokenize", {"messages": [ASK], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ("tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs"),
        ("tokenize", {"prompt": "x", "model": 7}, "model"),
        ("tokenize", {"messages": [ASK], "chat_template": "x"}, "chat_template"),
        ("tokenize", {"messages": [ASK], "kv_transfer_params": {}}, "kv_transfer_params"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("detokenize", {"tokens": [1], "prompt": "x"}, "prompt"),
        ("detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("detokenize", {"tokens": [1] * 257}, "tokens"),  # the context holds 256
    ],
)
async def test_no_worker_is_asked_what_cannot_be_meant(
    workers: Workers, folder: Path, kind: str, fields: dict[str, object], param: str
) -> None:
    await workers.add("one", folder)
    with pytest.raises(BadRequest) as caught:
        await workers.ask(kind, **fields)
    assert caught.value.param == param
    assert workers.asked == []


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"prompt":"x","prompt":"y"}', b'{"prompt":"\\ud800"}', b"\xff"]
)
async def test_what_is_no_document_is_refused(workers: Workers, folder: Path, body: bytes) -> None:
    await workers.add("one", folder)
    with pytest.raises(BadRequest):
        await workers.forward("tokenize", body)
    assert workers.asked == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {"a": 1}}, "prompt"),
        ({"messages": "x"}, "messages"),
        ({"messages": [ASK], "documents": [1]}, "documents"),
        ({"messages": [ASK], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_the_worker_refuses_reaches_the_client(
    workers: Workers, folder: Path, fields: dict[str, object], param: str
) -> None:
    await workers.add("one", folder)
    await workers.add("two", folder)
    with pytest.raises(LegFailed) as caught:
        await workers.ask("tokenize", **fields)
    assert (caught.value.failed.http_status, caught.value.failed.param) == (400, param)
    assert len(workers.asked) == 1, "another worker would say the same"


async def test_a_worker_that_cannot_be_asked_is_passed_over(workers: Workers, folder: Path) -> None:
    await workers.add_dead("dead")
    await workers.add("busy", folder, refuses=CapacityError("too many wait"))
    await workers.add("alive", folder)
    for _ in range(6):
        answer = await workers.ask("tokenize", prompt="x")
        assert answer["count"] == 1
    assert workers.asked.count("alive") == 6
    assert workers.asked.count("busy") > 0


async def test_nobody_waits_for_a_worker_that_is_frozen(workers: Workers, folder: Path) -> None:
    await workers.add_frozen("frozen")
    await workers.add("alive", folder)
    async with workers.health:
        for _ in range(4):
            answer = await workers.ask("tokenize", prompt="x")
            assert answer["count"] == 1


async def test_with_nobody_to_ask_the_client_may_come_again(workers: Workers, folder: Path) -> None:
    with pytest.raises(CapacityError):
        await workers.ask("tokenize", prompt="x")
    await workers.add_dead("dead")
    with pytest.raises(CapacityError):
        await workers.ask("tokenize", model="m", prompt="x")
    with pytest.raises(ModelNotFound):
        await workers.ask("tokenize", model="other", prompt="x")


async def test_with_several_models_one_must_be_named(workers: Workers, folder: Path) -> None:
    await workers.add("one", folder)
    await workers.add("two", folder, model="n")
    with pytest.raises(BadRequest) as caught:
        await workers.ask("tokenize", prompt="x")
    assert caught.value.param == "model"
    for model, name in (("m", "one"), ("n", "two")):
        workers.asked.clear()
        await workers.ask("tokenize", model=model, prompt="x")
        assert workers.asked == [name]


async def test_an_answer_without_end_is_cut(workers: Workers, folder: Path) -> None:
    await workers.add("one", folder)
    with pytest.raises(NeuronDiError, match="too many bytes"):
        await workers.client.ask(
            workers.workers()[0],
            "/detokenize",
            msgspec.defstruct("Ids", [("tokens", list[int])])(tokens=[100] * 1000),
            timeout_s=10,
            bytes_max=100,
        )
