"""The JSON Schemas of the OpenAPI document: requests from their classes, answers by hand.

An answer's schema says what every answer has; more may be there.
"""

from typing import Any, get_args

import msgspec

from neuron_di.wire.admin import WAIT_S_MAX
from neuron_di.wire.sampling_rules import (
    BAD_WORD_CHARS_MAX,
    BAD_WORDS_MAX,
    STOP_CHARS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKEN_IDS_MAX,
)
from neuron_di_proxy.admin_order import Phase
from neuron_di_proxy.request_fields import (
    EFFORT_CHARS_MAX,
    INT64_MAX,
    ChatFields,
    CompletionFields,
    RequestFields,
)

_Json = dict[str, Any]

_TEXT: _Json = {"type": "string"}
_NUMBER: _Json = {"type": "number"}
_COUNT: _Json = {"type": "integer", "minimum": 0}
_ANY_OBJECT: _Json = {"type": "object"}
_NULL: _Json = {"type": "null"}
_OBJECT_OR_NULL: _Json = {"type": ["object", "null"]}

_TOKEN_IDS: _Json = {"type": "array", "items": _COUNT, "minItems": 1}
_PROMPT_TEXT: _Json = {"type": "string", "minLength": 1}
_PROMPT: _Json = {
    "anyOf": [
        _PROMPT_TEXT,
        _TOKEN_IDS,
        {"type": "array", "items": _PROMPT_TEXT, "minItems": 1},
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    ]
}
_TEXT_PART: _Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_TOOL_CALL: _Json = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "required": ["name", "arguments"],
        },
    },
    "required": ["type", "function"],
}
_MESSAGE: _Json = {
    "type": "object",
    "properties": {
        "role": {
            "type": "string",
            "description": "Such as system, developer, user, assistant or tool: what the model's "
            "chat template knows",
        },
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}, _NULL]},
        "name": _TEXT,
        "tool_calls": {"type": "array", "items": _TOOL_CALL},
        "tool_call_id": _TEXT,
    },
    "required": ["role"],
}
_MESSAGES: _Json = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOLS: _Json = {
    "type": "array",
    "minItems": 1,
    "maxItems": 128,
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {
                        "description": "A JSON Schema of the arguments, which are an object",
                        "anyOf": [
                            {"properties": {"type": {"const": "object"}}, "required": ["type"]}
                            | _ANY_OBJECT,
                            _NULL,
                        ],
                    },
                    "strict": {
                        "type": ["boolean", "null"],
                        "description": "Where the model may call: its calls keep `parameters`",
                    },
                },
                "required": ["name"],
                "additionalProperties": False,
            },
        },
        "required": ["type", "function"],
        "additionalProperties": False,
    },
}
_TOOL_CHOICE: _Json = {
    "description": "auto: calls, or text that keeps `response_format` or `structured_outputs`. "
    "required, or a tool's name: calls only, and these bind nothing.",
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": _TEXT},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ],
}
_LOGIT_BIAS: _Json = {
    "type": "object",
    "description": "Token ids as strings, each with what is added to its logit",
    "maxProperties": 1024,
    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}
_TEMPLATE_KWARGS: _Json = {"type": "object", "description": "More variables of the chat template"}

_STOP: _Json = {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX}
_TOKEN_ID: _Json = {"type": "integer", "minimum": 0, "maximum": INT64_MAX}

# Fields whose class does not say all of what they hold: the rest is checked later, or by a worker.
_LATER: dict[str, _Json] = {
    "logit_bias": _LOGIT_BIAS,
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": STOP_STRINGS_MAX}],
    },
    "stop_token_ids": {"type": "array", "items": _TOKEN_ID, "maxItems": STOP_TOKEN_IDS_MAX},
    "allowed_token_ids": {"type": "array", "items": _TOKEN_ID, "minItems": 1},
    "bad_words": {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": BAD_WORD_CHARS_MAX},
        "maxItems": BAD_WORDS_MAX,
    },
    "truncate_prompt_tokens": {
        "description": "Use only the last tokens: so many, or -1: what the context holds.",
        "anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "maximum": INT64_MAX}],
    },
    "length_penalty": {"const": 1},
}
_CHAT_TEMPLATE_FIELDS: dict[str, _Json] = {
    "tools": _TOOLS,
    "documents": {"type": "array", "items": _ANY_OBJECT, "minItems": 1},
    "chat_template_kwargs": _TEMPLATE_KWARGS,
}
_LATER_OF: dict[type[RequestFields], dict[str, _Json]] = {
    CompletionFields: _LATER,
    ChatFields: _LATER | {"tool_choice": _TOOL_CHOICE} | _CHAT_TEMPLATE_FIELDS,
}


def schemas() -> _Json:
    """All schemas by name."""
    requests, classes = msgspec.json.schema_components(
        [CompletionFields, ChatFields], ref_template="#/components/schemas/{name}"
    )
    assert len(requests) == 2
    structured = classes["StructuredOutputs"]
    structured["properties"]["json"] = _or_null({"anyOf": [_ANY_OBJECT, _TEXT]})
    structured["properties"]["choice"] = _or_null(
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
    )
    classes["NamedSchema"]["properties"]["schema"] = _ANY_OBJECT
    completion = _request(classes.pop("CompletionFields"), CompletionFields, "prompt", _PROMPT)
    chat = _request(classes.pop("ChatFields"), ChatFields, "messages", _MESSAGES)
    return {
        **classes,
        **_ANSWERS,
        **_TOKENIZE,
        **_ORDERS,
        "CompletionRequest": completion,
        "ChatCompletionRequest": chat,
    }


def _request(schema: _Json, kind: type[RequestFields], prompt_name: str, prompt: _Json) -> _Json:
    later = {name: _or_null(each) for name, each in _LATER_OF[kind].items()}
    schema["properties"] = {prompt_name: prompt} | schema["properties"] | later
    schema["required"] = ["model", prompt_name]
    schema["title"] = schema["title"].replace("Fields", "Request")
    return schema


def _or_null(schema: _Json) -> _Json:
    return {"anyOf": [schema, _NULL], "default": None}


def _object(required: dict[str, _Json], **optional: _Json) -> _Json:
    properties = required | optional
    return {"type": "object", "properties": properties, "required": list(required)}


_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    prompt_tokens_details=_object({"cached_tokens": _COUNT}),
    completion_tokens_details=_object({"reasoning_tokens": _COUNT}),
)


def _document(
    id_prefix: str, kind: str, choice: dict[str, _Json], reasons: list[str | None]
) -> _Json:
    """A whole answer, or, where a choice need not have a reason to end, a chunk of one."""
    is_chunk = None in reasons
    ends: dict[str, _Json] = {"index": _COUNT, "finish_reason": {"enum": reasons}}
    choices = {"type": "array", "items": _object(choice | ends | {"logprobs": _OBJECT_OR_NULL})}
    head: dict[str, _Json] = {
        "id": {"type": "string", "pattern": f"^{id_prefix}-"},
        "object": {"const": kind},
        "created": _COUNT,
        "model": _TEXT,
    }
    if is_chunk:
        return _object(head | {"choices": choices}, usage={"anyOf": [_USAGE, _NULL]})
    return _object(head | {"choices": choices | {"minItems": 1}, "usage": _USAGE})


_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
    },
    max_model_len={"type": ["integer", "null"]},
)
_ANSWER_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": _NULL,
    },
    reasoning={"type": ["string", "null"]},
    tool_calls={"type": "array", "items": _TOOL_CALL},
)
_DELTA = _object(
    {},
    role={"const": "assistant"},
    content=_TEXT,
    reasoning=_TEXT,
    tool_calls={"type": "array", "items": _object({"index": _COUNT, "function": _ANY_OBJECT})},
)
_ANSWERS: dict[str, _Json] = {
    "Completion": _document("cmpl", "text_completion", {"text": _TEXT}, ["stop", "length"]),
    "CompletionChunk": _document(
        "cmpl", "text_completion", {"text": _TEXT}, ["stop", "length", None]
    ),
    "ChatCompletion": _document(
        "chatcmpl",
        "chat.completion",
        {"message": _ANSWER_MESSAGE},
        ["stop", "length", "tool_calls"],
    ),
    "ChatCompletionChunk": _document(
        "chatcmpl",
        "chat.completion.chunk",
        {"delta": _DELTA},
        ["stop", "length", "tool_calls", None],
    ),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": _TEXT,
                }
            )
        }
    ),
    "ModelList": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}}),
    "Model": _MODEL,
    "Receipt": _object({"request_id": _TEXT}),
    "Health": _object({"status": {"enum": ["ok", "degraded", "unavailable"]}}),
    "Ready": _object({"ready": {"type": "boolean"}}),
    "Live": _object({"live": {"type": "boolean"}}),
    "Load": _object({"server_load": {"type": "integer", "minimum": 0}}),
    "Version": _object({"version": _TEXT}),
    "Status": _ANY_OBJECT,
    "Document": _object({"openapi": _TEXT, "paths": _ANY_OBJECT}),
}

_WORKER_NAME: _Json = {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"}
_ORDER_FIELDS: dict[str, _Json] = {
    "timeout_s": {"type": ["number", "null"], "minimum": 0, "maximum": WAIT_S_MAX},
    "force": {"type": "boolean"},
}
_ORDERS: dict[str, _Json] = {
    "DrainOrder": _object({"worker": _WORKER_NAME}, **_ORDER_FIELDS)
    | {"additionalProperties": False},
    "RoleOrder": _object(
        {"worker": _WORKER_NAME, "role": {"enum": ["prefill", "decode", "both"]}}, **_ORDER_FIELDS
    )
    | {"additionalProperties": False},
    "OrderLine": _object(
        {"phase": {"enum": list(get_args(Phase))}},
        words=_TEXT,
        progress=_OBJECT_OR_NULL,
        failed=_OBJECT_OR_NULL,
        is_clean={"type": "boolean"},
    ),
}

_TOKENIZE_FIELDS: dict[str, _Json] = {
    "model": {"type": ["string", "null"]},
    "add_special_tokens": {"type": ["boolean", "null"]},
    "return_token_strs": {"type": ["boolean", "null"]},
}
_TOKENIZE: dict[str, _Json] = {
    "Tokenize": {
        "anyOf": [
            _object({"prompt": _TEXT}, **_TOKENIZE_FIELDS) | {"additionalProperties": False},
            _object(
                {"messages": _MESSAGES},
                **_TOKENIZE_FIELDS,
                add_generation_prompt={"type": ["boolean", "null"]},
                continue_final_message={"type": ["boolean", "null"]},
                reasoning_effort={
                    "type": ["string", "null"],
                    "minLength": 1,
                    "maxLength": EFFORT_CHARS_MAX,
                },
                **{name: _or_null(each) for name, each in _CHAT_TEMPLATE_FIELDS.items()},
            )
            | {"additionalProperties": False},
        ]
    },
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": {"type": "array", "items": _COUNT},
        },
        token_strs={"type": ["array", "null"], "items": _TEXT},
    ),
    "Detokenize": _object(
        {"tokens": {"type": "array", "items": _COUNT}}, model={"type": ["string", "null"]}
    )
    | {"additionalProperties": False},
    "Text": _object({"prompt": _TEXT}),
}
