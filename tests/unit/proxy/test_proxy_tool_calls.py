import json

import msgspec
import pytest
from request_bodies import TRAITS, chat

from neuron_di.errors import BadRequest
from neuron_di.types import RequestId
from neuron_di.wire.sampling_rules import GRAMMAR_CHARS_MAX
from neuron_di_proxy import tool_calls
from neuron_di_proxy.model_traits import ModelTraits
from neuron_di_proxy.tool_calls import TOOLS_MAX, read_tools, tool_grammar

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NO_FORMAT = ModelTraits()


def tool(name, **fields):
    return {"type": "function", "function": {"name": name} | fields}


WEATHER = tool("weather", description="Of today.", parameters=CITY, strict=True)
NAMED = {"type": "function", "function": {"name": "weather"}}


def read(tools, choice=None, parallel=None, traits=TRAITS):
    def raw(value):
        return None if value is None else msgspec.Raw(json.dumps(value).encode())

    return read_tools(raw(tools), raw(choice), parallel, traits)


def schema(use):
    grammar = tool_grammar(use)
    assert (grammar.kind, grammar.param) == ("json_schema", "tools")
    return json.loads(grammar.value)


def test_tools_are_given_on_as_the_client_wrote_them():
    raw = msgspec.Raw(b'[ {"type":"function", "function":{"name":"f"}} ]')
    assert read_tools(raw, None, None, TRAITS).tools == raw


@pytest.mark.parametrize(
    ("choice", "expected", "chosen"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ("required", "required", None),
        (NAMED, "named", "weather"),
    ],
)
def test_what_the_model_may_do(choice, expected, chosen):
    use = read([WEATHER, tool("f")], choice)
    assert (use.choice, use.chosen, use.is_parallel) == (expected, chosen, True)
    assert tool_grammar(use).kind == ("text" if expected == "auto" else "json_schema")
    use = read([tool("f"), tool("g", strict=False)], choice if chosen is None else "auto")
    assert (tool_grammar(use) is None) == (use.choice == "auto")
    assert not read([WEATHER], choice, parallel=False).is_parallel


def test_no_tools_no_calls():
    assert read(None) is None
    assert read(None, "none") is None
    assert read([WEATHER], "none") is None
    assert read([WEATHER], "none", traits=NO_FORMAT) is None


def test_a_call_that_is_forced_needs_no_format_of_the_model():
    assert read([WEATHER], "required", traits=NO_FORMAT) is not None
    assert read([WEATHER], NAMED, traits=NO_FORMAT) is not None
    for choice in (None, "auto"):
        with pytest.raises(BadRequest) as error:
            read([WEATHER], choice, traits=NO_FORMAT)
        assert error.value.param == "tool_choice"
        assert "required" in error.value.message


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param"),
    [
        (None, "auto", None, "tool_choice"),
        (None, NAMED, None, "tool_choice"),
        (None, None, True, "parallel_tool_calls"),
        ([], None, None, "tools"),
        ({}, None, None, "tools"),
        ([WEATHER] * (TOOLS_MAX + 1), None, None, "tools"),
        ([tool("f"), tool("f")], None, None, "tools[1].function.name"),
        ([tool("a b")], None, None, "tools[0].function.name"),
        ([tool("f\n")], None, None, "tools[0].function.name"),
        ([tool("é")], None, None, "tools[0].function.name"),
        ([tool("x" * 65)], None, None, "tools[0].function.name"),
        ([tool("")], None, None, "tools[0].function.name"),
        ([{"type": "function", "function": {}}], None, None, "tools[0].function.name"),
        ([{"type": "function"}], None, None, "tools[0].function"),
        ([{"type": "custom", "custom": {"name": "f"}}], None, None, "tools[0].type"),
        ([{"type": "function", "function": {"name": "f"}, "x": 1}], None, None, "tools[0].x"),
        ([tool("f", x=1)], None, None, "tools[0].function.x"),
        ([tool("f", strict="yes")], None, None, "tools[0].function.strict"),
        ([tool("f", parameters=[])], None, None, "tools[0].function.parameters"),
        ([tool("f", parameters={"type": "array"})], None, None, "tools[0].function.parameters"),
        ([tool("f", parameters={"properties": {}})], None, None, "tools[0].function.parameters"),
        ([WEATHER], "any", None, "tool_choice"),
        ([WEATHER], 7, None, "tool_choice"),
        ([WEATHER], {"type": "function", "function": {"name": "f"}}, None, "tool_choice"),
        ([WEATHER], {"type": "function"}, None, "tool_choice.function"),
        ([WEATHER], {"type": "allowed_tools"}, None, "tool_choice.type"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(tools, choice, parallel, param):
    with pytest.raises(BadRequest) as error:
        read(tools, choice, parallel)
    assert error.value.param == param


def test_the_names_of_a_refusal_reach_the_client():
    with pytest.raises(BadRequest) as error:
        chat(tools=[tool("a b")])
    assert error.value.param == "tools[0].function.name"
    assert "a b" not in error.value.message


def test_a_tool_may_have_no_parameters():
    for parameters in ({}, None):
        use = read([tool("f", parameters=parameters)], "required")
        assert use.parameters["f"]["additionalProperties"] is False


def test_the_grammar_of_required_calls():
    written = schema(read([WEATHER, tool("f")], "required"))
    assert (written["type"], written["minItems"]) == ("array", 1)
    assert "maxItems" not in written
    calls = written["items"]["anyOf"]
    assert [call["properties"]["name"] for call in calls] == [{"const": "weather"}, {"const": "f"}]
    # The order in which a model must write them: a reader knows the name before the arguments.
    assert list(calls[0]["properties"]) == ["name", "arguments"]
    assert calls[0]["required"] == ["name", "arguments"]
    assert calls[0]["additionalProperties"] is False
    assert written["$defs"]["weather"] == CITY


def test_the_grammar_of_one_call():
    assert schema(read([WEATHER], "required", parallel=False))["maxItems"] == 1
    written = schema(read([tool("f"), WEATHER], NAMED))
    assert written["maxItems"] == 1
    assert written["items"]["properties"]["name"] == {"const": "weather"}
    assert list(written["$defs"]) == ["weather"]


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "required": ["answer"]}},
}
TEXTS = [
    {"response_format": {"type": "json_object"}},
    {"response_format": FORMAT},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "[0-9]+"}},
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    ("call_format", "key"),
    [("hermes", "arguments"), ("mistral", "arguments"), ("llama3_json", "parameters")],
)
def test_text_keeps_its_format_where_the_model_does_not_call(text, call_format, key):
    traits = ModelTraits(tool_format=call_format, reasoning=("<think>", "</think>"))
    alone = chat(traits, **text).sampling.grammar
    given = chat(traits, tools=[WEATHER, tool("f")], **text).sampling.grammar
    calls = given.calls
    assert msgspec.structs.replace(given, calls=None) == alone
    assert (calls.format, calls.is_parallel, calls.param) == (call_format, True, "tools")
    written = json.loads(calls.call_schema)
    first, second = (call["properties"] for call in written["anyOf"])
    assert list(first) == list(second) == ["name", key]
    assert (first["name"], second["name"]) == ({"const": "weather"}, {"const": "f"})
    assert written["$defs"]["weather"] == CITY
    one = chat(traits, tools=[WEATHER], parallel_tool_calls=False, **text).sampling.grammar.calls
    assert json.loads(one.call_schema)["properties"]["name"] == {"const": "weather"}
    assert not one.is_parallel


@pytest.mark.parametrize("text", TEXTS)
def test_a_format_binds_nothing_where_calls_are_forced(text):
    for choice in ("required", NAMED):
        fields = {"tools": [WEATHER], "tool_choice": choice}
        assert chat(**fields, **text).sampling.grammar == chat(**fields).sampling.grammar
    shown = chat(tools=[WEATHER], tool_choice="none", **text)
    assert shown.sampling.grammar == chat(**text).sampling.grammar


LONG = {"type": "object", "description": "x" * (64 << 10)}


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED, "none"])
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": LONG},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "x" * ((64 << 10) + 1)}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "x"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
def test_a_format_that_cannot_be_is_refused_whatever_calls_may_come(choice, text, param):
    fields = {} if choice is None else {"tool_choice": choice}
    with pytest.raises(BadRequest) as error:
        chat(tools=[WEATHER], **fields, **text)
    assert error.value.param == param


def test_tools_that_are_too_long_for_a_grammar_are_refused_by_their_name():
    tools = [tool("f", parameters=LONG)]
    assert chat(tools=tools).sampling.grammar is None
    with pytest.raises(BadRequest) as error:
        chat(tools=tools, response_format={"type": "json_object"})
    assert error.value.param == "tools"


def test_a_model_that_cannot_call_is_not_asked_for_either():
    with pytest.raises(BadRequest) as error:
        chat(NO_FORMAT, tools=[WEATHER], response_format={"type": "json_object"})
    assert error.value.param == "tool_choice"


def test_references_within_parameters_still_find_what_they_name():
    parameters = {
        "type": "object",
        "$defs": {"$ref": {"type": "string"}, "Tree": {"items": {"$ref": "#/$defs/Tree"}}},
        "properties": {
            "tree": {"$ref": "#/$defs/Tree"},
            "self": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            "$ref": {"const": {"$ref": "#/x"}},
            "enum": {"enum": [{"$ref": "#/x"}], "default": {"$ref": "#/x"}},
            "const": {"$ref": "#/$defs/$ref"},
        },
    }
    moved = schema(read([tool("f", parameters=parameters)], "required"))["$defs"]["f"]
    base = "#/$defs/f"
    assert moved == {
        "type": "object",
        "$defs": {
            "$ref": {"type": "string"},
            "Tree": {"items": {"$ref": f"{base}/$defs/Tree"}},
        },
        "properties": {
            "tree": {"$ref": f"{base}/$defs/Tree"},
            "self": {"anyOf": [{"$ref": base}, {"type": "null"}]},
            "$ref": {"const": {"$ref": "#/x"}},
            "enum": {"enum": [{"$ref": "#/x"}], "default": {"$ref": "#/x"}},
            "const": {"$ref": f"{base}/$defs/$ref"},
        },
    }


def test_anchors_and_the_own_name_of_parameters_are_found_in_their_place():
    parameters = {
        "$id": "http://tools/f",
        "type": "object",
        "properties": {
            "a": {"$ref": "#q"},
            "b": {"$ref": "http://tools/f#q"},
            "c": {"$ref": "http://tools/f"},
            "d": {"$ref": "http://tools/f#/properties/a"},
            "e": {"$ref": "#nobody"},
            "g": {"$ref": "q"},
            "$anchor": {"$anchor": "r", "const": {"$anchor": "q"}},
            "f": {"anyOf": [{"$ref": "#r"}, {"$ref": "http://tools/fq"}]},
        },
        "$defs": {"x/y": {"anyOf": [{"$anchor": "q", "type": "boolean"}]}},
    }
    other = {"type": "object", "$defs": {"x": {"$anchor": "q"}}, "properties": {"$ref": {}}}
    written = schema(
        read([tool("f", parameters=parameters), tool("fq", parameters=other)], "required")
    )
    moved, base = written["$defs"]["f"], "#/$defs/f"
    at_q = {"$ref": f"{base}/$defs/x~1y/anyOf/0"}
    assert moved == {
        "type": "object",
        "properties": {
            "a": at_q,
            "b": at_q,
            "c": {"$ref": base},
            "d": {"$ref": f"{base}/properties/a"},
            "g": {"$ref": "q"},  # another document
            "e": {"$ref": "#nobody"},  # no tool's: nothing has that name any more
            "$anchor": {"const": {"$anchor": "q"}},
            "f": {"anyOf": [{"$ref": f"{base}/properties/$anchor"}, {"$ref": "http://tools/fq"}]},
        },
        "$defs": {"x/y": {"anyOf": [{"type": "boolean"}]}},
    }
    assert written["$defs"]["fq"] == {**other, "$defs": {"x": {}}}


@pytest.mark.parametrize(("choice", "name"), [("required", "f"), (NAMED, "weather")])
def test_long_parameters_are_refused_before_a_schema_is_made_of_them(choice, name, monkeypatch):
    """Where each part of it is would be written out, which takes the square of its length."""
    monkeypatch.setattr(tool_calls, "as_part", None)
    long = {"type": "object", "x" * (GRAMMAR_CHARS_MAX // 2): [1] * (GRAMMAR_CHARS_MAX // 4)}
    use = read([tool(name, parameters=long), tool("g")], choice)
    with pytest.raises(BadRequest, match="tools is longer than") as error:
        tool_grammar(use)
    assert error.value.param == "tools"


def test_the_id_of_a_call_is_a_function_of_where_it_stands():
    use, again = read([WEATHER]), read([tool("f")], "required")
    request_id = RequestId("r1")
    first = use.call_id(request_id, 0, 0)
    assert first == again.call_id(request_id, 0, 0)
    assert first.startswith("call_")
    others = [use.call_id(request_id, 0, 1), use.call_id(request_id, 1, 0)]
    others.append(use.call_id(RequestId("r2"), 0, 0))
    assert len({first, *others}) == 4


def test_mistrals_templates_take_back_nine_letters():
    use = read([WEATHER], traits=ModelTraits(tool_format="mistral"))
    call_id = use.call_id(RequestId("r1"), 0, 0)
    assert len(call_id) == 9
    assert call_id.isalnum()
