"""Grammars over two small tokenizers; what a random model makes of them is in tests/unit/engine."""

import json

import numpy as np
import pytest
from grammar_kit import EOS, Kit
from tokenizer_kit import KINDS

from neuron_di.errors import BadRequest, RemoteProtocolError
from neuron_di.request import grammar_source
from neuron_di.request.grammar import COMPILED_MAX
from neuron_di.wire import Grammar

TAGS = ("<think>", "</think>")
kinds = pytest.mark.parametrize("kind", KINDS)
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def kit():
    return Kit()


@kinds
@pytest.mark.parametrize("eos", [(EOS,), (EOS, 1)])
def test_only_what_the_grammar_says_may_follow(kind, eos):
    kit = Kit(kind, eos)
    state = kit.schema(OBJECT)
    kit.write(state, '{"name": "é{", "n":\n  12')
    assert not kit.allowed(state) & {*kit.ids("a\"'{"), *eos}
    kit.write(state, "}")
    assert kit.allowed(state) == set(eos)
    assert state.accept(eos[-1])


@kinds
def test_a_choice_is_one_of_the_strings_letter_by_letter(kind):
    choices = ["yes", "yes sir", 'say "no"\\', "你好\n", "a.b|c"]
    kit = Kit(kind)
    for choice in choices:
        state = kit.choice(*choices)
        kit.write(state, choice)
        assert EOS in kit.allowed(state)
    state = kit.choice(*choices)
    kit.write(state, "yes")
    assert {piece[:1] for piece in pieces_of(kit, state)} == {b"", b" "}


def pieces_of(kit, state):
    return {
        b"" if token_id == EOS else kit.vocabulary.token_bytes[token_id]
        for token_id in kit.allowed(state)
    }


def test_any_json_object(kit):
    state = kit.compiler.state_of(Grammar(kind="json_object"))
    kit.write(state, '{"a": [1, {"b": null}], "c": "\\n"}')
    assert kit.allowed(state) == {EOS}


def test_white_space_between_parts_is_bounded(kit):
    """And none comes before or after the document."""
    state = kit.schema(OBJECT)
    kit.write(state, "{\n" + " " * 32)
    assert kit.allowed(state) <= {i for i in range(402) if b'"' in kit.tokenizer.token_bytes(i)}


def test_a_key_is_not_hidden_behind_an_escape(kit):
    schema = {"properties": {"b": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    state = kit.schema({"type": "object", **schema})
    kit.write(state, '{"\\')
    assert kit.ids("u")[0] not in kit.allowed(state)
    assert kit.ids("n")[0] in kit.allowed(state)


def test_a_stop_token_may_end_a_complete_answer_only(kit):
    (stop,) = kit.ids("!")
    state = kit.schema({"type": "integer"}, stop_token_ids=(stop, 10_000))
    assert stop not in kit.allowed(state)
    kit.write(state, "-")
    assert stop not in kit.allowed(state)
    kit.write(state, "7")
    assert {stop, EOS, *kit.ids("0")} <= kit.allowed(state)
    assert state.accept(stop)


def test_a_stop_token_that_is_part_of_the_text_is_text(kit):
    (nine,) = kit.ids("9")
    state = kit.schema({"type": "integer"}, stop_token_ids=(nine,))
    kit.write(state, "19")
    assert EOS in kit.allowed(state)


def test_without_eos_a_complete_answer_has_ended():
    kit = Kit(eos=())
    state = kit.schema(OBJECT)
    kit.write(state, '{"name":"","n":0')
    (end,) = kit.ids("}")
    assert end in kit.allowed(state)
    assert state.accept(end)


def test_ids_that_break_the_grammar_are_the_peers_fault(kit):
    for start, wrong in (("", "x"), ('{"na', "N"), ('{"name":"","n":1', '"')):
        state = kit.schema(OBJECT)
        for token_id in kit.ids(start):
            state.accept(token_id)
        with pytest.raises(RemoteProtocolError):
            state.accept(*kit.ids(wrong))
    with pytest.raises(RemoteProtocolError):
        kit.schema(OBJECT).accept(EOS)


@kinds
def test_the_state_is_a_function_of_the_ids(kind):
    """Whether it was asked after each token, or never: as on two workers."""
    kit = Kit(kind)
    text = '{"name": "quick brown \\t", "n": -40}'
    asked = kit.schema(OBJECT)
    for num_given, token_id in enumerate(kit.ids(text)):
        fed = kit.schema(OBJECT)
        for given_id in kit.ids(text)[:num_given]:
            fed.accept(given_id)
        assert kit.allowed(fed) == kit.allowed(asked)
        asked.accept(token_id)


def test_states_of_one_grammar_are_apart_and_it_is_compiled_once(kit):
    before = kit.compiler.num_compiled
    schema = {"type": "object", "properties": {"apart": {}}, "required": ["apart"]}
    one, other = kit.schema(schema), kit.schema(schema, reasoning=TAGS)
    kit.write(one, '{"apart": [')
    third = kit.schema(schema)
    assert kit.allowed(third) == set(kit.ids("{"))
    other.begin((), in_reasoning=True)
    assert len(kit.allowed(other)) > 300
    assert kit.compiler.num_compiled == before + 1


def test_what_was_compiled_long_ago_is_forgotten():
    kit = Kit()
    for length in range(COMPILED_MAX + 3):
        kit.schema({"type": "string", "maxLength": length})
    assert len(kit.compiler._compiled) == COMPILED_MAX
    kit.schema({"type": "string", "maxLength": 5})
    assert kit.compiler.num_compiled == COMPILED_MAX + 3
    kit.schema({"type": "string", "maxLength": 0})
    assert kit.compiler.num_compiled == COMPILED_MAX + 4


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "not": {"type": "string"}}, "not supported: not$"),
        ({"if": {}, "then": {"minLength": 3}}, "not supported: if, then$"),
        ({"type": "array", "uniqueItems": True, "contains": {}}, "contains"),
        ({"propertyNames": {"pattern": "a"}}, "not supported: propertyNames$"),
        ({"dependentRequired": {"secret": ["secret"]}}, "not supported: dependentRequired$"),
        ({"type": "string", "format": "secret"}, "`format`"),
        ({"type": "string", "pattern": "(?=secret)"}, "`pattern`"),
        ({"type": "string", "pattern": "\\bsecret"}, "look-around"),
        ({"type": "string", "pattern": "[s[ecret]]"}, "`pattern` has .* backslash before"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf`"),
        ({"patternProperties": {"secret": {"type": "string"}, "s": {}}}, "`patternProperties`"),
        ({"minProperties": 2, "properties": {"secret": {}}}, "`minProperties`"),
        ({"properties": {"a": [{"anyOf": [{"minProperties": 2}]}]}}, "`minProperties`"),
        ({"$ref": "#/$defs/secret"}, r"`\$ref` leads nowhere"),
        ({"$ref": "https://secret/x"}, "another document"),
        ({"enum": []}, "nothing can satisfy"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "nothing can satisfy"),
        ({"enum": ["secret", "0\x1f"]}, "control character"),
        ({"anyOf": [{"const": {"a": ["\\\x00"]}}]}, "control character"),
        ({"properties": {"secret\x01": {}}}, "control character"),
        ({"patternProperties": {"secret\x01": {}}}, "control character"),
        ({"type": "string", "pattern": "secret\x02"}, "control character"),
        ({"const": "secret\x7f"}, "control character"),
        ({"const": 1234567890123456789}, "beyond 2\\*\\*53"),
        ({"enum": ["x", {"a": [-12345678901234567890123]}]}, "beyond 2\\*\\*53"),
        ({"type": "integer", "minimum": 9007199254740993}, "`minimum` is beyond"),
        ({"type": "integer", "minimum": 10**400}, "`minimum` is beyond"),
        ({"type": "integer", "exclusiveMaximum": -(10**400)}, "`exclusiveMaximum` is beyond"),
        ({"type": "integer", "maximum": 9007199254740995}, "`maximum` is beyond"),
        ({"type": "integer", "minimum": -(1 << 63)}, "range of a number"),
        ({"type": "number", "minimum": 0, "maximum": 1e30}, "range of a number"),
        ({"$ref": "#"}, "nothing can satisfy"),
        ({"type": "secret"}, "`type`"),
        ({"pattern": 5}, "wrong type: pattern"),
        ({"patternProperties": 5}, "cannot be followed"),
        ({"properties": {"secret": 5}}, "not well-formed"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ([], "JSON object"),
        (True, "JSON object"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(kit, schema, words):
    with pytest.raises(BadRequest, match=words) as caught:
        kit.schema(schema)
    assert caught.value.param == "response_format"
    assert "secret" not in str(caught.value)


def test_texts_that_only_look_like_control_characters(kit):
    """And those that have a short escape."""
    for text in ("\\u0001", "\n\t\x80", "\\\n"):
        state = kit.schema({"enum": [text]})
        kit.write(state, json.dumps(text, ensure_ascii=False))
        assert kit.allowed(state) == {EOS}


def test_numbers_that_doubles_hold_and_the_ranges_of_64_bits_are_fine(kit):
    kit.schema({"enum": [1 << 53, -(1 << 53), 0.1, True, None, {"a": 1.5}]})
    for least, most in ((0, (1 << 63) - 1), (0, (1 << 64) - 1), (-(1 << 31), 1 << 53)):
        kit.schema({"type": "integer", "minimum": least, "maximum": most})
    kit.write(kit.schema({"const": (1 << 53) - 1}), str((1 << 53) - 1))


def test_many_expressions_that_need_not_hold_together_are_fine(kit):
    dates = {f"d{i}": {"type": "string", "format": "date", "title": "x"} for i in range(30)}
    optional = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}], "default": None}
    wrapped = {"allOf": [{"$ref": "#/$defs/d1"}], "description": "x"}
    schema = {"$defs": dates, "properties": {"a": optional, "b": wrapped}, "type": "object"}
    kit.write(kit.schema(schema), '{"a": "2026-11-22", "b": "2026-01-01"}')


def test_a_schema_that_calls_for_too_much_work_is_refused(kit):
    branches = [
        {"anyOf": [{"properties": {f"p{i}{j}": {"minLength": j}}} for j in range(3)]}
        for i in range(8)
    ]
    deep = json.loads('{"items":' * 400 + "{}" + "}" * 400)
    patterns = [{"type": "string", "pattern": f"a{{{i}}}.*b{i}"} for i in range(1, 65)]
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "pattern": f"{i}+.*"} for i in range(30)}
    for schema in (
        {"allOf": branches},
        deep,
        {"allOf": patterns},
        {"$defs": {**chain, "d30": {"type": "string"}}, "$ref": "#/$defs/d0"},
        {"prefixItems": [*patterns, {"multipleOf": 997}]},
        {"patternProperties": {f"^p{i}$": {} for i in range(65)}},
    ):
        with pytest.raises(BadRequest, match="cannot be followed"):
            kit.schema(schema)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="json_schema", value="{"),
        Grammar(kind="json_schema", value=""),
        Grammar(kind="json_schema", value='{"minimum": NaN}'),
        Grammar(kind="json_schema", value='{"minimum": 1e999}'),
        Grammar(kind="json_schema", value="[" * 50_000),
        Grammar(kind="choice", value="{}"),
        Grammar(kind="choice", value="[]"),
        Grammar(kind="choice", value='["a", 1]'),
        Grammar(kind="choice", value='["a", ""]'),
    ],
)
def test_a_value_that_is_no_grammar_is_refused(kit, grammar):
    with pytest.raises(BadRequest) as caught:
        kit.compiler.state_of(grammar)
    assert caught.value.param == "response_format"


def test_a_refusal_names_the_field_that_asked(kit):
    schema = '{"type": "object", "not": {}}'
    for param in ("tools", "structured_outputs", "response_format"):
        for value in (schema, "[]", "{"):
            with pytest.raises(BadRequest) as caught:
                kit.compiler.state_of(Grammar(kind="json_schema", value=value, param=param))
            assert caught.value.param == param
        with pytest.raises(BadRequest) as caught:
            kit.compiler.state_of(Grammar(kind="choice", value="[]", param=param))
        assert caught.value.param == param


def test_a_bug_that_a_schema_leads_to_is_the_requests_and_told_without_its_words(
    kit, monkeypatch, caplog
):
    def fail(schema, *, param):
        raise OverflowError("secret")

    monkeypatch.setattr(grammar_source, "check_schema", fail)
    with pytest.raises(BadRequest, match="too complex") as caught:
        kit.schema({"const": "a bug"})
    assert "secret" not in caught.value.message
    (record,) = caplog.records
    assert "secret" not in str(vars(record))
    assert "OverflowError" in str(vars(record))


def test_one_compiled_schema_serves_several_fields(kit):
    loop = '{"properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"], "type": "object"}'
    before = kit.compiler.num_compiled
    for param in ("tools", "response_format"):
        state = kit.compiler.state_of(Grammar(kind="json_schema", value=loop, param=param))
        kit.write(state, '{"a":')
        with pytest.raises(BadRequest) as caught:
            kit.allowed(state)
        assert caught.value.param == param
    assert kit.compiler.num_compiled == before + 1


def test_a_dead_end_is_the_requests_and_no_token(kit):
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/properties/a"}},
        "required": ["a"],
    }
    state = kit.schema(schema)
    kit.write(state, '{"a":')
    with pytest.raises(BadRequest, match="cannot be satisfied"):
        kit.allowed(state)


def test_what_the_vocabulary_cannot_spell_is_the_requests_fault():
    kit = Kit()
    pieces = kit.vocabulary.token_bytes
    pieces[:] = [b"" if b"}" in piece else piece for piece in pieces]
    state = kit.schema({"type": "object", "additionalProperties": False})
    kit.write(state, "{ ")
    with pytest.raises(BadRequest, match=r"no tokens|cannot be satisfied"):
        state.accept(min(kit.allowed(state)))


def test_masking_copies_nothing_but_the_bitmask(kit):
    """Rows are written into one place, which the next call overwrites."""
    one, other = kit.schema(OBJECT), kit.choice("yes", "no", reasoning=TAGS)
    rows = [state.masked(kit.raw_V) for state in (one, one, other)]
    assert rows[0] is rows[1] is rows[2]
    assert not np.isneginf(kit.raw_V).any()
