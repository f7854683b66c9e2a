"""The grammar that the proxy asks for when calls are forced: what it lets a model write."""

import json
import random

import msgspec
import numpy as np
import pytest
from hand_clock import HandClock
from tokenizer_kit import make_tokenizer

from neuron_di.clock import use_clock
from neuron_di.errors import BadRequest
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di_proxy.message_parts import MessageParts
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.tool_calls import read_tools, tool_grammar

EOS = 0
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/Leaf"}, "again": {"$ref": "#"}},
    "required": ["left"],
    "additionalProperties": False,
    "$defs": {"Leaf": {"enum": ["a", "b]}", 'c"']}},
}
PLAIN = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "tree", "parameters": TREE}},
    {"type": "function", "function": {"name": "plain", "parameters": PLAIN}},
    {"type": "function", "function": {"name": "none"}},
]
STEPS_MAX = 600


@pytest.fixture(scope="module")
def vocabulary():
    tokenizer = make_tokenizer("byte_level")
    return Vocabulary(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def compiler(vocabulary):
    return GrammarCompiler(vocabulary)


def tool_use(choice, parallel):
    tools = msgspec.Raw(json.dumps(TOOLS).encode())
    return read_tools(tools, msgspec.Raw(json.dumps(choice).encode()), parallel, ModelTraits())


def random_text(vocabulary, state, rng):
    """What a model without any sense writes. After a while it would like to come to an end."""
    logits_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    text = b""
    for step in range(STEPS_MAX):
        allowed = np.flatnonzero(~np.isneginf(state.masked(logits_V))).tolist()
        closing = [i for i in allowed if i == EOS or vocabulary.token_bytes[i][:1] in b'"}]']
        tired = closing and step > rng.randrange(200)
        chosen = rng.choice(closing if tired else allowed)
        if state.accept(chosen):
            return text.decode()
        text += vocabulary.token_bytes[chosen]
    return pytest.fail("it never ended")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("choice", "parallel"),
    [
        ("required", None),
        ("required", False),
        ({"type": "function", "function": {"name": "tree"}}, None),
    ],
)
def test_whatever_a_model_writes_is_calls_and_nothing_else(
    vocabulary, compiler, choice, parallel, seed
):
    use = tool_use(choice, parallel)
    text = random_text(vocabulary, compiler.state_of(tool_grammar(use)), random.Random(seed))
    reader, parts = use.reader(), MessageParts()
    reader.feed(text, parts)
    reader.end(parts)
    assert parts.content == ""
    assert reader.all_whole
    expected = json.loads(text)
    called = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in parts.calls]
    assert called == expected
    assert len(called) == 1 or (choice, parallel) == ("required", None)
    for call in called:
        if call["name"] == "tree":
            assert call["arguments"]["left"] in TREE["$defs"]["Leaf"]["enum"]


@pytest.mark.parametrize("choice", ["required", "auto", "named"])
@pytest.mark.parametrize("call_format", ["hermes", "mistral", "llama3_json"])
@pytest.mark.parametrize(
    ("secret", "reason"),
    [
        ({"type": "string", "format": "binary"}, "a `format` that is not supported: binary$"),
        ({"type": "string", "format": "secret"}, "a `format` that is not supported$"),
        ({"type": "object", "minProperties": 2}, "`minProperties` is more than"),
    ],
)
def test_a_refusal_names_the_tool_at_fault(compiler, choice, call_format, secret, reason):
    parameters = {"type": "object", "properties": {"secret": secret}, "required": ["secret"]}
    bad = {"name": "bad", "parameters": parameters, "strict": True}
    tools = msgspec.Raw(json.dumps([*TOOLS, {"type": "function", "function": bad}]).encode())
    named = {"type": "function", "function": {"name": "bad"}}
    chosen = msgspec.Raw(json.dumps(named if choice == "named" else choice).encode())
    use = read_tools(tools, chosen, None, ModelTraits(tool_format=call_format))
    match = f"^the schema of the tool 'bad' cannot be followed: .*{reason}"
    with use_clock(HandClock()), pytest.raises(BadRequest, match=match) as caught:
        compiler.state_of(tool_grammar(use))
    assert caught.value.param == "tools"
    assert "secret" not in caught.value.message
