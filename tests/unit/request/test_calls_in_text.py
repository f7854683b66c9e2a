"""Answers that are any text, in which the calls of strict tools keep their schemas."""

import json
import random

import msgspec
import numpy as np
import pytest
import tokenizers
from grammar_kit import EOS, Kit, with_special_tokens
from test_call_rules import ARGUMENTS, CALL, FORMATS, TAGS, TWO, allowed
from tokenizer_kit import byte_level_json

from neuron_di.errors import BadRequest, RemoteProtocolError
from neuron_di.request import Tokenizer
from neuron_di.request.grammar import GrammarCompiler
from neuron_di.request.vocabulary import Vocabulary
from neuron_di.wire import Grammar
from neuron_di_proxy.message_parts import MessageParts
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.tool_calls import read_tools, tool_grammar

ODD = {"type": "object", "not": {}}  # nothing makes a grammar of that
STEPS_MAX = 900


@pytest.fixture(scope="module")
def kit():
    return Kit()


@pytest.fixture(scope="module")
def special():
    return with_special_tokens(*TAGS.values(), "</tool_call>")


def use_of(call_format, parallel=None, f=ARGUMENTS, g=ODD, strict=("f",)):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in (("f", f), ("g", g))
    ]
    for tool in tools:
        tool["function"]["strict"] = tool["function"]["name"] in strict or None
    raw = msgspec.Raw(json.dumps(tools).encode())
    return read_tools(raw, None, parallel, ModelTraits(tool_format=call_format))


def strict_grammar(call_format, parallel=None, **tools):
    return tool_grammar(use_of(call_format, parallel, **tools))


def call_of(call_format, name, arguments):
    return CALL[call_format].replace('"f"', f'"{name}"').replace('{"n":7}', arguments)


def read(use, text):
    reader, parts = use.reader(), MessageParts()
    reader.feed(text, parts)
    reader.end(parts)
    return reader, [(call.name, json.loads(call.arguments)) for call in parts.calls], parts.content


@pytest.mark.parametrize("call_format", FORMATS)
def test_only_strict_tools_ask_for_a_grammar(call_format):
    assert strict_grammar(call_format, strict=()) is None
    assert strict_grammar(call_format).kind == "text"
    text = Grammar(kind="json_object")
    assert tool_grammar(use_of(call_format), text).kind == "json_object"


def random_answer(vocabulary, state, rng, begin):
    """(what a model writes that likes calls and ends when it may, whether it ended)."""
    text, wanted = b"", begin
    for _ in range(STEPS_MAX):
        ids = allowed(state, vocabulary)
        if not wanted and rng.random() < 0.03:
            wanted = begin
        fitting = [i for i in ids if wanted and wanted.startswith(vocabulary.token_bytes[i])]
        fitting = [i for i in fitting if vocabulary.token_bytes[i]]
        closing = [i for i in ids if vocabulary.token_bytes[i][:1] in (b'"', b"}", b"]", b"<")]
        if EOS in ids and not wanted and rng.random() < 0.05:
            assert state.accept(EOS)
            return text, True
        chosen = rng.choice(fitting or (closing if rng.random() < 0.4 else ()) or ids)
        if chosen == EOS:
            assert state.accept(EOS)
            return text, True
        assert not state.accept(chosen)
        text += vocabulary.token_bytes[chosen]
        wanted = wanted[len(vocabulary.token_bytes[chosen]) :] if fitting else b""
    return text, False


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("call_format", FORMATS)
@pytest.mark.parametrize("tags", ["spelled", "special"])
def test_every_call_that_is_found_keeps_its_schema(kit, special, tags, call_format, parallel, seed):
    vocabulary = special if tags == "special" else kit.vocabulary
    compiler, rng = GrammarCompiler(vocabulary), random.Random(seed)
    use = use_of(call_format, parallel)
    names = set()
    for _ in range(4):
        begin = call_of(call_format, rng.choice("fg"), "{")[:44]
        state = compiler.state_of(tool_grammar(use))
        text, is_whole = random_answer(vocabulary, state, rng, begin.encode())
        reader, calls, _ = read(use, text.decode(errors="replace")) if is_whole else (None, [], "")
        assert reader is None or reader.all_whole
        assert parallel or len(calls) <= 1
        for name, arguments in calls:
            names.add(name)
            if name == "f":
                assert {"n"} <= arguments.keys() <= {"n", "s"}
                assert 0 <= arguments["n"] <= 99
            else:
                assert isinstance(arguments, dict)
    assert names


def everything(vocabulary):
    return set(range(vocabulary.num_vocab))


def test_text_is_free(kit, special):
    """But for tokens that would bring more than a tag, of which no grammar has seen the rest."""
    for vocabulary in (kit.vocabulary, special):
        pieces = vocabulary.token_bytes
        for call_format in FORMATS:
            state = GrammarCompiler(vocabulary).state_of(strict_grammar(call_format))
            for token_id in (i for i, piece in enumerate(pieces) if piece == b"a"):
                state.accept(token_id)
            assert set(allowed(state, vocabulary)) == everything(vocabulary)
            row = np.zeros(vocabulary.num_vocab, dtype=np.float32)
            assert state.masked(row) is row, "nothing is copied"


@pytest.mark.parametrize("call_format", ["hermes", "mistral"])
def test_text_goes_on_around_calls(kit, call_format):
    state = kit.compiler.state_of(strict_grammar(call_format))
    use = use_of(call_format)
    call = CALL[call_format]
    text = f"I call <tool and [TOOL: {call}\n and {call}. So."
    kit.write(state, text)
    assert EOS in state.end_ids()
    assert state.accept(EOS)
    _, calls, content = read(use, text)
    assert calls == [("f", {"n": 7})] * 2
    assert content == "I call <tool and [TOOL: \n and . So."


@pytest.mark.parametrize("call_format", FORMATS)
def test_calls_as_models_write_them(kit, call_format):
    tag = TAGS[call_format]
    text = TWO[call_format].replace(":", ": ").replace(",", ", ")
    text = text.replace(tag, tag + "\n").replace("}</", "}\n</")
    kit.write(kit.compiler.state_of(strict_grammar(call_format)), text)


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_call_keeps_its_schema_to_the_letter(kit, call_format):
    """That of a tool that is not strict is any object."""
    for name, arguments, can_come in (
        ("f", '{"n":7,"s":"]"}', True),
        ("f", '{"n":700}', False),
        ("f", '{"m":7}', False),
        ("g", '{"n":{"x":[1,"y"]}}', True),
        ("g", "7", False),
        ("h", '{"n":7}', False),
    ):
        state = kit.compiler.state_of(strict_grammar(call_format))
        text = call_of(call_format, name, arguments)
        if can_come:
            kit.write(state, text)
            assert EOS in state.end_ids()
            continue
        with pytest.raises(AssertionError):
            kit.write(state, text)
        assert EOS not in kit.allowed(state)
        assert len(state.end_ids()) == 0


@pytest.mark.parametrize("call_format", FORMATS)
def test_without_parallel_calls_only_the_first_is_one(kit, call_format):
    state = kit.compiler.state_of(strict_grammar(call_format, False))
    kit.write(state, CALL[call_format])
    if call_format == "llama3_json":
        assert kit.allowed(state) == {EOS}
        return
    wrong = "\n" + call_of(call_format, "f", '{"no"')
    kit.write(state, wrong)
    assert kit.allowed(state) == everything(kit.vocabulary)
    _, calls, content = read(use_of(call_format, False), CALL[call_format] + wrong)
    assert calls == [("f", {"n": 7})]
    assert wrong.strip() in content


@pytest.mark.parametrize("before", ["", "\n ", "<|python_tag|>", " <|python_tag|>\n"])
def test_llama_calls_begin_an_answer(kit, before):
    grammar = strict_grammar("llama3_json")
    state = kit.compiler.state_of(grammar)
    kit.write(state, before + TWO["llama3_json"])
    assert kit.allowed(state) & {EOS, *kit.ids("x")} == {EOS}
    with pytest.raises(AssertionError):
        kit.write(kit.compiler.state_of(grammar), before + '{"x')
    for text in ("So: {x}", "<div>{", "<|py {", "<|python_tag| {", '["f"]'):
        state = kit.compiler.state_of(grammar)
        kit.write(state, before.replace("<|python_tag|>", "") + text)
        assert kit.allowed(state) == everything(kit.vocabulary)


@pytest.mark.parametrize("call_format", FORMATS)
def test_text_may_end_in_what_looks_like_a_tag(kit, call_format):
    for length in range(1, len(TAGS[call_format])):
        state = kit.compiler.state_of(strict_grammar(call_format))
        kit.write(state, TAGS[call_format][:length])
        assert EOS in kit.allowed(state)
        assert state.accept(EOS)


@pytest.mark.parametrize("call_format", FORMATS)
def test_a_special_token_is_a_tag(special, call_format):
    tag = special.token_bytes.index(TAGS[call_format].encode())
    state = GrammarCompiler(special).state_of(strict_grammar(call_format))
    assert not state.accept(tag)
    begun = {special.token_bytes[i][:1] for i in allowed(state, special)}
    assert begun <= {b"[", b"{", b" ", b"\n", b"\r", b"\t"}
    ends = Vocabulary(special.tokenizer, num_vocab=special.num_vocab, eos_token_ids=(EOS, tag))
    state = GrammarCompiler(ends).state_of(strict_grammar(call_format))
    assert tag in allowed(state, ends)
    assert state.accept(tag)


def test_no_token_brings_more_than_a_tag():
    """Of which no grammar would have seen the rest."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_tokens(["call>{", "call>\n"])
    tokenizer = Tokenizer(backend)
    words = Vocabulary(tokenizer, num_vocab=tokenizer.num_vocab, eos_token_ids=(EOS,))
    more, space = (words.token_bytes.index(piece) for piece in (b"call>{", b"call>\n"))
    state = GrammarCompiler(words).state_of(strict_grammar("hermes"))
    for token_id in (words.token_bytes.index(bytes([byte])) for byte in b"<tool_"):
        assert {more, space} <= set(allowed(state, words))
        state.accept(token_id)
    assert set(allowed(state, words)) == everything(words) - {more}
    for last in (more, space):
        state = GrammarCompiler(words).state_of(strict_grammar("hermes"))
        for byte in b"<tool_":
            state.accept(words.token_bytes.index(bytes([byte])))
        if last == space:
            assert not state.accept(space)
            assert EOS not in allowed(state, words)
            continue
        with pytest.raises(RemoteProtocolError):
            state.accept(more)


@pytest.mark.parametrize("call_format", FORMATS)
def test_what_is_in_reasoning_is_no_call(kit, call_format):
    start, end = TAGS[call_format][0] + "think", "end"
    grammar = msgspec.structs.replace(strict_grammar(call_format), reasoning=(start, end))
    for before in ("", f"{start}hm, {TAGS[call_format]}no{end}", f"{start}{end}"):
        state = kit.compiler.state_of(grammar)
        kit.write(state, before + CALL[call_format])
        assert state.accept(EOS)
        state = kit.compiler.state_of(grammar)
        kit.write(state, before + "Hi")
        assert state.accept(EOS)


def test_a_model_without_end_may_write_on():
    kit = Kit(eos=())
    state = kit.compiler.state_of(strict_grammar("hermes"))
    kit.write(state, "a" + CALL["hermes"] + "b")
    state = kit.compiler.state_of(strict_grammar("llama3_json", False))
    *ids, last = kit.ids(CALL["llama3_json"])
    assert not any(state.accept(token_id) for token_id in ids)
    assert state.accept(last)


LOOP = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}


def test_a_refusal_names_the_tools(kit):
    with pytest.raises(BadRequest) as error:
        kit.compiler.state_of(strict_grammar("hermes", f=ODD))
    assert error.value.param == "tools"
    state = kit.compiler.state_of(strict_grammar("hermes", f=LOOP))
    kit.write(state, 'Now <tool_call>{"name":"f","arguments":{"a')
    with pytest.raises(BadRequest, match="cannot be satisfied") as error:
        kit.write(state, '":1')
    assert error.value.param == "tools"
    with pytest.raises(BadRequest, match="no grammar without calls"):
        kit.compiler.state_of(Grammar(kind="text", param="tools"))


def test_what_is_compiled_serves_others():
    kit = Kit()
    for grammar, num_compiled in (
        (strict_grammar("hermes"), 1),
        (strict_grammar("hermes"), 1),
        (strict_grammar("hermes", False), 2),
        (strict_grammar("mistral"), 3),
        (strict_grammar("hermes", f=LOOP), 4),
    ):
        kit.compiler.state_of(grammar)
        assert kit.compiler.num_compiled == num_compiled
