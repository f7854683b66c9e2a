"""Answers that are tool calls, or text that keeps a format: the model chooses, and keeps either."""

import json
import random

import msgspec
import numpy as np
import pytest
from grammar_kit import EOS, Kit, with_special_tokens

from neuron_di.errors import BadRequest, RemoteProtocolError
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import CallGrammar, Grammar
from neuron_di_proxy.message_parts import MessageParts
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.tool_calls import read_tools, tool_grammar

ARGUMENTS = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/N"}, "s": {"enum": ["</tool_call>", "]", ";"]}},
    "required": ["n"],
    "additionalProperties": False,
    "$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": ARGUMENTS, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["f", "x"]}, "answer": {"type": "boolean"}},
    "required": ["name", "answer"],
    "additionalProperties": False,
}
FORMAT = Grammar(kind="json_schema", value=json.dumps(SCHEMA))
FORMATS = ["hermes", "mistral", "llama3_json"]
TAGS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
CALL = {
    "hermes": '<tool_call>{"name":"f","arguments":{"n":7}}</tool_call>',
    "mistral": '[TOOL_CALLS][{"name":"f","arguments":{"n":7}}]',
    "llama3_json": '{"name":"f","parameters":{"n":7}}',
}
TWO = {
    "hermes": CALL["hermes"] + "\n" + CALL["hermes"] + "\n",
    "mistral": CALL["mistral"][:-1] + ", " + CALL["mistral"][13:],
    "llama3_json": CALL["llama3_json"] + "; " + CALL["llama3_json"],
}
STEPS_MAX = 600


@pytest.fixture(scope="module")
def kit():
    return Kit()


@pytest.fixture(scope="module")
def special():
    return with_special_tokens(*TAGS.values(), "</tool_call>")


def tool_use(call_format, parallel=None):
    return read_tools(
        msgspec.Raw(json.dumps(TOOLS).encode()),
        None,
        parallel,
        ModelTraits(tool_format=call_format),
    )


def either(call_format, text=FORMAT, parallel=None):
    return tool_grammar(tool_use(call_format, parallel), text)


def allowed(state, vocabulary):
    raw_V = np.zeros(vocabulary.num_vocab, dtype=np.float32)
    return np.flatnonzero(~np.isneginf(state.masked(raw_V))).tolist()


def random_text(vocabulary, state, rng, first):
    """What a model without any sense writes; it begins with `first` as far as it can."""
    text = b""
    for step in range(STEPS_MAX):
        ids = allowed(state, vocabulary)
        so = [i for i in ids if i != EOS and first.startswith(text + vocabulary.token_bytes[i])]
        closing = [i for i in ids if i == EOS or vocabulary.token_bytes[i][:1] in b'"}]<']
        tired = closing and step > rng.randrange(200)
        chosen = rng.choice(so or (closing if tired else ids))
        if state.accept(chosen):
            return text.decode()
        text += vocabulary.token_bytes[chosen]
    return pytest.fail("it never ended")


def read(use, text):
    """(the calls that a reader finds, what is content)."""
    reader, parts = use.reader(), MessageParts()
    reader.feed(text, parts)
    reader.end(parts)
    assert reader.all_whole
    return [(call.name, json.loads(call.arguments)) for call in parts.calls], parts.content


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("tags", ["spelled", "special"])
def test_whatever_a_model_writes_is_calls_or_the_format(
    kit, special, tags, call_format, parallel, seed
):
    vocabulary = special if tags == "special" else kit.vocabulary
    compiler = GrammarCompiler(vocabulary)
    use, rng = tool_use(call_format, parallel), random.Random(seed)
    grammar = tool_grammar(use, FORMAT)
    begins = TAGS[call_format] if call_format != "llama3_json" else CALL[call_format][:16]
    text = random_text(vocabulary, compiler.state_of(grammar), rng, begins.encode())
    calls, content = read(use, text)
    assert content == ""
    assert len(calls) == 1 or (calls and parallel)
    for name, arguments in calls:
        if name == "f":
            assert {"n"} <= arguments.keys() <= {"n", "s"}
            assert 0 <= arguments["n"] <= 99
            assert arguments.get("s", "]") in ("</tool_call>", "]", ";")
        else:
            assert (name, arguments) == ("g", {})
    text = random_text(vocabulary, compiler.state_of(grammar), rng, b'{"name":"x')
    calls, content = read(use, text)
    assert calls == []
    assert content == text
    assert sorted(json.loads(text)) == ["answer", "name"]


@pytest.mark.parametrize("call_format", FORMATS)
def test_the_first_token_may_begin_either(kit, call_format):
    state = kit.compiler.state_of(either(call_format))
    first = {kit.vocabulary.token_bytes[i][:1] for i in kit.allowed(state)}
    assert first == {b"{", TAGS[call_format][:1].encode()}


@pytest.mark.parametrize("call_format", FORMATS)
def test_as_many_calls_as_are_asked_for(kit, call_format):
    text = TWO[call_format]
    for parallel, is_taken in ((True, True), (False, False)):
        state = kit.compiler.state_of(either(call_format, parallel=parallel))
        if is_taken:
            kit.write(state, text)
            assert state.accept(EOS)
        else:
            kit.write(state, CALL[call_format])
            assert EOS in kit.allowed(state)
            with pytest.raises(AssertionError):
                kit.write(state, text[len(CALL[call_format]) :].strip())


@pytest.mark.parametrize("call_format", FORMATS)
def test_calls_as_models_write_them(kit, call_format):
    """With white space where templates have it, of which there is no end of bytes."""
    tag = TAGS[call_format]
    text = CALL[call_format].replace(":", ": ").replace(",", ", ")
    text = text.replace(tag, tag + "\n").replace("}</", "}\n</")
    kit.write(kit.compiler.state_of(either(call_format)), text)
    if call_format != "llama3_json":
        state = kit.compiler.state_of(either(call_format))
        with pytest.raises(AssertionError):
            kit.write(state, tag + " " * 9)


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_special_token_is_a_tag(special, call_format):
    state = GrammarCompiler(special).state_of(either(call_format))
    (tag,) = (i for i, piece in enumerate(special.token_bytes) if piece.decode(errors="ignore") ==
              TAGS[call_format])  # fmt: skip
    assert tag in allowed(state, special)
    assert not state.accept(tag)
    begun = {special.token_bytes[i][:1] for i in allowed(state, special)}
    assert begun <= {b"[", b"{", b" ", b"\n", b"\r", b"\t"}


def test_a_tag_that_ends_answers_begins_no_call(special):
    (tag,) = (i for i, piece in enumerate(special.token_bytes) if piece == b"[TOOL_CALLS]")
    ends = Vocabulary(special.tokenizer, num_vocab=special.num_vocab, eos_token_ids=(EOS, tag))
    state = GrammarCompiler(ends).state_of(either("mistral"))
    assert tag not in allowed(state, ends)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (Grammar(kind="choice", value='["<tool_","<","[TOOL_"]'), ("<tool_", "<", "[TOOL_")),
        (Grammar(kind="regex", value="<[a-z]{3}"), ("<too", "<abc")),
        (Grammar(kind="json_schema", value='{"type":"array"}'), ("[]", "[1]")),
        (Grammar(kind="json_object"), ("{}", '{"name":"f","parameters":{"n":"?"}}')),
    ],
)
@pytest.mark.parametrize("call_format", FORMATS)
def test_both_may_begin_alike(kit, call_format, text, answers):
    """None keeps the other from what only it can take, nor from its end."""
    for whole in (*answers, CALL[call_format], TWO[call_format]):
        state = kit.compiler.state_of(either(call_format, text))
        kit.write(state, whole)
        assert EOS in kit.allowed(state)
        assert EOS in state.end_ids()
        assert state.accept(EOS)


def test_what_neither_can_take_is_refused(kit):
    for begun, wrong in (("", "x"), ("<", "{"), ("{", "<"), ("<tool_call>", "}")):
        state = kit.compiler.state_of(either("hermes"))
        for token_id in kit.ids(begun):
            state.accept(token_id)
        (token_id,) = kit.ids(wrong)
        with pytest.raises(RemoteProtocolError):
            state.accept(token_id)


@pytest.mark.parametrize("call_format", FORMATS)
def test_reasoning_comes_before_either(kit, call_format):
    """Also where the tag of a call begins as that of reasoning."""
    start, end = TAGS[call_format][0] + "think", "end"
    grammar = msgspec.structs.replace(either(call_format), reasoning=(start, end))
    for text in (CALL[call_format], '{"name":"f","answer":true}'):
        for before in ("", start + "some {thoughts" + end):
            state = kit.compiler.state_of(grammar)
            kit.write(state, before + text)
            assert state.accept(EOS)


def calls(schema):
    return CallGrammar(format="hermes", call_schema=json.dumps(schema))


BAD_SCHEMA = {"type": "object", "not": {}}


@pytest.mark.parametrize(
    ("text", "wrong", "param"),
    [
        (FORMAT, BAD_SCHEMA, "tools"),
        (FORMAT, {"x-guidance": {}}, "tools"),
        (FORMAT, [], "tools"),
        (FORMAT, {"properties": {"a": {"pattern": "a" * 5000}}}, "tools"),
        (FORMAT, {"$ref": "#/$defs/nobody"}, "tools"),
        (FORMAT, {"allOf": [{"const": 1}, {"const": 2}]}, "tools"),
        (Grammar(kind="json_schema", value=json.dumps(BAD_SCHEMA)), {}, "response_format"),
        (
            Grammar(kind="regex", value="(?=a)", param="structured_outputs"),
            {},
            "structured_outputs",
        ),
    ],
)
def test_a_refusal_names_the_field_at_fault(kit, text, wrong, param):
    grammar = msgspec.structs.replace(text, calls=calls(wrong))
    for _ in range(2):
        with pytest.raises(BadRequest) as error:
            kit.compiler.state_of(grammar)
        assert error.value.param == param


LOOP = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}


def test_a_dead_end_is_that_of_the_side_that_was_chosen(kit):
    grammar = Grammar(kind="json_schema", value=json.dumps(LOOP), calls=calls(LOOP))
    for begun, param in (("{", "response_format"), ("<tool_call>{", "tools")):
        state = kit.compiler.state_of(grammar)
        kit.write(state, begun + '"a')
        with pytest.raises(BadRequest, match="cannot be satisfied") as error:
            kit.write(state, '":1')
        assert error.value.param == param


def test_each_side_is_compiled_once_and_serves_others():
    kit = Kit()
    for grammar, num_compiled in (
        (either("hermes"), 2),
        (either("hermes"), 2),
        (FORMAT, 2),
        (either("hermes", Grammar(kind="json_object")), 3),
        (either("hermes", parallel=False), 4),
        (either("mistral"), 5),
    ):
        kit.compiler.state_of(grammar)
        assert kit.compiler.num_compiled == num_compiled
