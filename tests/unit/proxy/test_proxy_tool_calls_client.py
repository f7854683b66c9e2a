"""Tool calls and reasoning as OpenAI's own client reads them, over real HTTP."""

import json

import msgspec
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import ScriptedWorker, finished, token

from neuron_di.config import ProxyOptions

MESSAGES = [{"role": "user", "content": "What is the weather in Ulm?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FORCED = ['[{"name": "weather"', ', "arguments": {"ci', 'ty": "Ulm"}}']
FORCED += [', {"name": "weather", "argu', 'ments": {}}]']
IN_WORDS = ["<think>", "Hm.", "</think>", "\n\n", '<tool_call>{"name": "weather", "argum']
IN_WORDS += ['ents": {"city": "Ulm"}}', "</tool_call>"]


def answers(texts):
    async def script(leg):
        for index, text in enumerate(texts):
            await leg.send(token(index, text))
        await leg.send(finished(len(texts), reason="stop"))

    return script


@pytest.fixture
async def worker(stack):
    return await stack.enter_async_context(ScriptedWorker("b1", "both"))


@pytest.fixture
async def ask(stack, worker):
    """Ask both ways; returns the whole answer's choice and what the stream's helper makes of it."""
    record = msgspec.structs.replace(
        worker.record, tool_format="hermes", reasoning=("<think>", "</think>")
    )
    proxy = await stack.enter_async_context(RunningProxy(ProxyOptions(limits=AT_ONCE), [record]))

    async def ask(**fields):
        fields |= {"model": "tiny", "messages": MESSAGES, "tools": [TOOL]}
        create = proxy.openai.chat.completions.create
        whole = await create(**fields)
        state = ChatCompletionStreamState()
        async for chunk in await create(**fields, stream=True):
            state.handle_chunk(chunk)
        return whole.choices[0], state.current_completion_snapshot.choices[0]

    return ask


async def test_forced_calls(worker, ask):
    worker.script = answers(FORCED)
    for choice in await ask(tool_choice="required"):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        functions = [call.function for call in choice.message.tool_calls]
        assert [each.name for each in functions] == ["weather", "weather"]
        assert [each.arguments for each in functions] == ['{"city": "Ulm"}', "{}"]
        assert len({call.id for call in choice.message.tool_calls}) == 2
    assert worker.legs[0].message.sampling.grammar.reasoning == ("<think>", "</think>")
    assert json.loads(bytes(worker.legs[0].message.options.tools)) == [TOOL]


async def test_a_call_in_the_models_own_words(worker, ask):
    worker.script = answers(IN_WORDS)
    for choice in await ask():
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning == "Hm."
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert (call.type, call.function.arguments) == ("function", '{"city": "Ulm"}')
    assert worker.legs[0].message.sampling.grammar is None


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
}
IN_FORMAT = ["<think>", "Hm.", "</think>", '{"answer', '": "<tool_', 'call>{}"}']


async def test_text_in_a_format_or_calls_as_the_model_chooses(worker, ask):
    """What agents ask for at every turn."""
    worker.script = answers(IN_WORDS)
    for choice in await ask(response_format=FORMAT):
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", None)
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Ulm"}')
    worker.script = answers(IN_FORMAT)
    for choice in await ask(response_format=FORMAT):
        assert choice.finish_reason == "stop"
        assert choice.message.reasoning == "Hm."
        assert json.loads(choice.message.content) == {"answer": "<tool_call>{}"}
        assert not choice.message.tool_calls
    grammars = [leg.message.sampling.grammar for leg in worker.legs]
    assert len(grammars) == 4
    for grammar in grammars:
        assert (grammar.kind, json.loads(grammar.value)) == ("json_schema", {"type": "object"})
        assert grammar.reasoning == ("<think>", "</think>")
        assert (grammar.calls.format, grammar.calls.is_parallel) == ("hermes", True)
        properties = json.loads(grammar.calls.call_schema)["properties"]
        assert properties["name"] == {"const": "weather"}
