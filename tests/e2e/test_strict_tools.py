"""Strict tools on two workers: a model that may write anything calls them as their schemas say."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

# As Llama's: an answer that begins with a brace is a call.
TEMPLATE = (
    "{%- for tool in tools or [] %}{{- tool.function.name }}{%- endfor %}"
    '{#- {"name": …, "parameters": …}, and <|start_header_id|>ipython for what came of it #}'
    "{%- for message in messages %}{{- message.role + ': ' + message.content + '\n' }}{%- endfor %}"
)
ARGUMENTS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": ARGUMENTS, "strict": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("calls")
    write_random_checkpoint(folder, "llama", chat_template=TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(folder: Path) -> AsyncIterator[Client]:
    async with running_fleet(folder) as client:
        yield client


async def answer(server: Client, function: dict[str, Any], **params: Any) -> Any:
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "will it rain?"}],
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    async with server.session.post(server.url + "/v1/chat/completions", json=body | params) as got:
        assert got.status == 200, await got.text()
        return (await got.json())["choices"][0]


async def test_a_call_of_a_strict_tool_keeps_its_schema(server: Client, folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    braces = [i for i in range(tokenizer.num_vocab) if tokenizer.token_bytes(i) == b"{"]
    likes_calls = {"logit_bias": {str(token_id): 100 for token_id in braces}}
    for seed in range(4):
        fields = {"temperature": 1.0, "seed": seed} | likes_calls
        choice = await answer(server, FUNCTION, **fields)
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["unit"] in ("C", "F")
        assert isinstance(arguments["days"], int)
        assert arguments["days"] <= 9
        assert sorted(arguments) == ["days", "unit"]
    # Else nothing binds a model without any sense.
    choice = await answer(server, FUNCTION | {"strict": False}, **likes_calls)
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"] or not choice["message"]["tool_calls"]


async def test_text_is_what_it_would_be_without_strict_tools(server: Client) -> None:
    """The model chooses: what it says where it does not call is its own."""
    free = await answer(server, FUNCTION | {"strict": None}, max_tokens=24)
    bound = await answer(server, FUNCTION, max_tokens=24)
    assert bound == free
    assert bound["message"]["content"]


async def test_a_schema_that_no_grammar_can_keep_is_refused_where_it_binds(server: Client) -> None:
    odd = {"name": "f", "parameters": {"type": "object", "not": {}}}
    assert (await answer(server, odd, max_tokens=4))["finish_reason"] == "length"
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": odd | {"strict": True}}],
    }
    async with server.session.post(server.url + "/v1/chat/completions", json=body) as got:
        error = (await got.json())["error"]
        assert (got.status, error["param"]) == (400, "tools")
