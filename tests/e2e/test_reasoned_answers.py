"""What a model that can reason must answer, on two workers: a format and a call bind it anyhow."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai_kit import Client
from process_kit import running_fleet

from neuron_di.request import Tokenizer
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

ASK = {"role": "user", "content": "hi there"}
SCHEMA = {"const": {"a": 1}}
FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
}
ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "parameters": ARGUMENTS}
CALL = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("reasons")
    write_random_checkpoint(folder, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(folder: Path) -> AsyncIterator[Client]:
    async with running_fleet(folder) as client:
        yield client


@pytest.fixture(scope="module")
def likes(folder: Path) -> Any:
    """A logit_bias for tokens with a "<" in them: what begins a tag."""
    tokenizer = Tokenizer.load(folder)
    ids = [i for i in range(tokenizer.num_vocab) if b"<" in tokenizer.token_bytes(i)]
    return lambda bias: {"logit_bias": {str(token_id): bias for token_id in ids}}


async def answer(server: Client, *messages: dict[str, str], **params: Any) -> Any:
    body = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": 120}
    async with server.session.post(server.url + "/v1/chat/completions", json=body | params) as got:
        assert got.status == 200, await got.text()
        return (await got.json())["choices"][0]


async def test_an_answer_without_reasoning_keeps_what_is_asked(server: Client, likes: Any) -> None:
    formatted = await answer(server, ASK, **FORMAT, **likes(-100))
    assert json.loads(formatted["message"]["content"]) == {"a": 1}
    assert formatted["message"].get("reasoning") is None
    called = await answer(server, ASK, **CALL, **likes(-100), parallel_tool_calls=False)
    (call,) = called["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert (formatted["finish_reason"], called["finish_reason"]) == ("stop", "tool_calls")


async def test_a_model_calls_or_keeps_the_format_as_it_likes(
    server: Client, folder: Path, likes: Any
) -> None:
    both = {"tools": CALL["tools"], "parallel_tool_calls": False} | FORMAT
    text = await answer(server, ASK, **both, **likes(-100))
    assert json.loads(text["message"]["content"]) == {"a": 1}
    assert not text["message"].get("tool_calls")
    # Tags begin alike, so that a model that likes "<" may reason first.
    thoughtless = {"chat_template_kwargs": {"enable_thinking": False}}
    called = await answer(server, ASK, **both, **thoughtless, **likes(20))
    (call,) = called["message"]["tool_calls"]
    assert (call["function"]["name"], called["message"]["content"]) == ("f", None)
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert (text["finish_reason"], called["finish_reason"]) == ("stop", "tool_calls")
    streamed = {"stream": True} | both | thoughtless | likes(20)
    body = {"model": server.model, "messages": [ASK], "temperature": 0, "max_tokens": 120}
    url = server.url + "/v1/chat/completions"
    async with server.session.post(url, json=body | streamed) as got:
        lines = [line async for line in got.content if line.startswith(b"data: {")]
    choices = [json.loads(line.removeprefix(b"data: "))["choices"][0] for line in lines]
    deltas = [each for choice in choices for each in choice["delta"].get("tool_calls", ())]
    arguments = "".join(each["function"].get("arguments", "") for each in deltas)
    assert arguments == call["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("asked", [FORMAT, CALL], ids=["format", "call"])
async def test_reasoning_that_the_model_begins_is_free(
    server: Client, likes: Any, asked: dict[str, Any]
) -> None:
    reasoned = await answer(server, ASK, **asked, **likes(100))
    assert reasoned["message"]["reasoning"]
    assert not reasoned["message"]["content"]
    assert reasoned["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [FORMAT, CALL], ids=["format", "call"])
async def test_a_prompt_that_ends_in_reasoning_is_reasoned_on(
    server: Client, likes: Any, asked: dict[str, Any]
) -> None:
    begun = {"role": "assistant", "content": "<think>so"}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    reasoned = await answer(server, ASK, begun, **going_on, **asked, **likes(-100))
    assert len(reasoned["message"]["reasoning"]) > len('{"a": 1}')
    assert not reasoned["message"]["content"]
    assert reasoned["finish_reason"] == "length"
