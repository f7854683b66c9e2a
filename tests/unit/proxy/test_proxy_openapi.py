import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from request_bodies import MESSAGES, read_chat_body, read_completion_body
from running_proxy import ListDirectory

from neuron_di.config import ProxyOptions
from neuron_di.errors import BadRequest
from neuron_di_proxy.admin_order import AdminLine, DrainRequest, RoleRequest
from neuron_di_proxy.app import create_app
from neuron_di_proxy.openapi import openapi_document
from neuron_di_proxy.request_fields import REFUSALS, ChatFields, CompletionFields
from neuron_di_proxy.service import Service

DOCUMENT = openapi_document()
SCHEMAS = DOCUMENT["components"]["schemas"]
READERS = {
    "CompletionRequest": (read_completion_body, {"model": "m", "prompt": "hi"}),
    "ChatCompletionRequest": (read_chat_body, {"model": "m", "messages": MESSAGES}),
}


def values_of(node: Any, name: str) -> Iterator[Any]:
    if isinstance(node, dict):
        yield from ([node[name]] if name in node else [])
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from values_of(each, name)


def validator(name: str) -> jsonschema_rs.Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}
    return jsonschema_rs.validator_for(schema)


def test_the_document_is_json_and_whole():
    assert json.loads(msgspec.json.encode(DOCUMENT)) == DOCUMENT
    assert openapi_document() is DOCUMENT, "made once"
    refs = set(values_of(DOCUMENT, "$ref"))
    assert len(refs) > 10
    assert refs <= {f"#/components/schemas/{name}" for name in SCHEMAS}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_schema_is_one(name):
    jsonschema_rs.meta.validate(SCHEMAS[name])
    assert validator(name).is_valid([]) is False


async def test_every_route_is_documented_and_every_documented_route_is_there():
    app = create_app(Service(ProxyOptions(), ListDirectory([])))
    served = {
        (method.lower(), re.sub(r"<(?:path:)?(\w+)>", "{}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods or ()
        if method not in ("HEAD", "OPTIONS")
    }
    documented = {
        (method, re.sub(r"\{\w+\}", "{}", path))
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
        if method != "parameters"
    }
    assert documented == served


@pytest.mark.parametrize(
    ("name", "kind", "unread"),
    [
        ("CompletionRequest", CompletionFields, {"prompt"}),
        ("ChatCompletionRequest", ChatFields, {"messages", "documents"}),
    ],
)
def test_a_requests_fields_are_those_that_are_read(name, kind, unread):
    schema = SCHEMAS[name]
    assert set(schema["properties"]) == set(kind.__struct_fields__) | unread
    assert not set(schema["properties"]) & set(REFUSALS)
    assert schema["additionalProperties"] is False
    assert {} not in values_of(schema, "anyOf")
    untyped = [key for key, each in schema["properties"].items() if each in ({}, {"anyOf": [{}]})]
    assert untyped == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("DrainOrder", DrainRequest), ("RoleOrder", RoleRequest), ("OrderLine", AdminLine)],
)
def test_orders_and_their_lines_are_as_they_are_read_and_written(name, kind):
    schema = SCHEMAS[name]
    _, of_kinds = msgspec.json.schema_components((kind,), ref_template="{name}")
    of_kind = of_kinds[kind.__name__]
    assert set(schema["properties"]) == set(of_kind["properties"])
    assert schema["required"] == of_kind["required"]
    assert schema.get("additionalProperties") == of_kind.get("additionalProperties")
    for field in schema["required"]:
        asked, read = (each["properties"][field] for each in (schema, of_kind))
        assert set(asked.get("enum", ())) == set(read.get("enum", ()))
        # The ends of a text have other names there.
        assert asked.get("pattern", "").strip("^$") == read.get("pattern", "")[2:-2]


def test_the_refused_fields_are_named_with_their_reasons():
    assert set(DOCUMENT["x-refused-fields"]) == set(REFUSALS)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("Completion", {}),
    ("Completion", {"prompt": [1, 2]}),
    ("Completion", {"prompt": ["a", "b"], "n": 2}),
    ("Completion", {"prompt": [[1], [2, 3]]}),
    ("Completion", {"echo": True, "max_tokens": 0, "logprobs": 5}),
    ("Completion", {"best_of": None, "stop": ["a"], "logit_bias": {"1": -100}}),
    ("ChatCompletion", {}),
    ("ChatCompletion", {"logprobs": True, "top_logprobs": 20, "max_completion_tokens": 1}),
    ("ChatCompletion", {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    (
        "ChatCompletion",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
    ),
    ("ChatCompletion", {"response_format": {"type": "json_object"}}),
    ("ChatCompletion", {"reasoning_effort": "low"}),
    ("ChatCompletion", {"chat_template_kwargs": {"a": 1}, "documents": [{"text": "d"}]}),
    ("ChatCompletion", {"stream": True, "stream_options": {"include_usage": True}}),
    ("ChatCompletion", {"structured_outputs": {"json": {"type": "object"}}}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    ("Completion", {"prompt": []}),
    ("Completion", {"prompt": 5}),
    ("Completion", {"prompt": ""}),
    ("Completion", {"prompt": ["a", ""]}),
    ("Completion", {"prompt": ["a", 1]}),
    ("Completion", {"temperature": 2.5}),
    ("Completion", {"top_p": 0}),
    ("Completion", {"min_p": -0.1}),
    ("Completion", {"presence_penalty": -3}),
    ("Completion", {"frequency_penalty": 2.1}),
    ("Completion", {"repetition_penalty": 0}),
    ("Completion", {"logprobs": 21}),
    ("Completion", {"n": 0}),
    ("Completion", {"seed": 1 << 63}),
    ("Completion", {"top_k": -2}),
    ("Completion", {"logit_bias": {"a": 1}}),
    ("Completion", {"logit_bias": {"1": 101}}),
    ("Completion", {"min_tokens": -1}),
    ("Completion", {"prompt_logprobs": -1}),
    ("Completion", {"truncate_prompt_tokens": -2}),
    ("Completion", {"suffix": "x"}),
    ("Completion", {"use_beam_search": True}),
    ("Completion", {"structured_outputs": {"regex": ""}}),
    ("ChatCompletion", {"messages": []}),
    ("ChatCompletion", {"messages": "hi"}),
    ("ChatCompletion", {"max_completion_tokens": 0}),
    ("ChatCompletion", {"top_logprobs": 21, "logprobs": True}),
    ("ChatCompletion", {"tools": []}),
    ("ChatCompletion", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("ChatCompletion", {"tools": TOOLS, "tool_choice": "maybe"}),
    ("ChatCompletion", {"response_format": {"type": "xml"}}),
    ("ChatCompletion", {"modalities": ["audio"]}),
    ("ChatCompletion", {"reasoning_effort": ""}),
    ("ChatCompletion", {"stream": "yes"}),
    ("ChatCompletion", {"chat_template_kwargs": []}),
    ("ChatCompletion", {"model": ""}),
]


@pytest.mark.parametrize(("answer", "fields"), GOOD)
def test_what_the_document_allows_is_read(answer, fields):
    read, body = READERS[f"{answer}Request"]
    assert validator(f"{answer}Request").is_valid(body | fields)
    assert read(json.dumps(body | fields).encode()).model == "m"


@pytest.mark.parametrize(("answer", "fields"), BAD)
def test_what_the_document_forbids_is_refused(answer, fields):
    read, body = READERS[f"{answer}Request"]
    assert not validator(f"{answer}Request").is_valid(body | fields)
    with pytest.raises(BadRequest):
        read(json.dumps(body | fields).encode())
