"""The OpenAPI document of the proxy: what GET /openapi.json says of every route.

The requests' schemas come from the classes that read them, so that they cannot differ.

Next: proxy/neuron_di_proxy/openapi_schemas.py
"""

from functools import cache
from typing import Any

from neuron_di.version import __version__
from neuron_di_proxy.openapi_schemas import schemas
from neuron_di_proxy.request_fields import REFUSALS

_Json = dict[str, Any]

_BEARER: list[_Json] = [{"bearer": []}, {}]  # a server without keys asks for none
_OPEN: list[_Json] = [{}]


@cache
def openapi_document() -> _Json:
    """The document, OpenAPI 3.1. Shared: not to be changed."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "neuron-di",
            "version": __version__,
            "summary": "OpenAI's API for models whose prefill and decode run on different workers",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": _BEARER,
        "paths": {
            "/v1/completions": {"post": _tokens("Continue a text", "Completion")},
            "/v1/chat/completions": {"post": _tokens("Answer a chat", "ChatCompletion")},
            "/v1/models": {"get": _get("The models that can be asked for", "ModelList")},
            "/v1/models/{model}": {
                "get": _get("One model", "Model") | {"parameters": [_in_path("model")]}
            },
            "/v1/receipts/{id}": {
                "get": _get("What became of a request: its workers, attempts and times", "Receipt")
                | {"parameters": [_in_path("id")]}
            },
            "/tokenize": {"post": _post("The token ids of a prompt", "Tokenize", "Tokens")},
            "/detokenize": {"post": _post("The text of token ids", "Detokenize", "Text")},
            "/health": {"get": _probe("Whether requests can be served, and why not", "Health")},
            "/ready": {"get": _probe("Whether to send requests here", "Ready")},
            "/live": {"get": _get("That the process answers, workers or not", "Live")},
            "/ping": {"get": _probe("As /health", "Health")},
            "/load": {"get": _get("How many requests are being answered", "Load")},
            "/version": {"get": _get("The server's version", "Version")},
            "/status": {"get": _get("The proxy, its workers and their load", "Status")},
            "/metrics": {"get": _operation("Metrics for Prometheus", {"text/plain": _STRING})},
            "/admin/drain": {
                "post": _order("End a worker once nothing is left there", "DrainOrder")
            },
            "/admin/role": {"post": _order("Give a worker another role", "RoleOrder")},
            "/openapi.json": {"get": _get("This document", "Document")},
        },
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key"}
            },
        },
        "x-refused-fields": {name: f"`{name}` {reason}" for name, reason in REFUSALS.items()},
    }


_STRING: _Json = {"schema": {"type": "string"}}

_REQUEST_ID: _Json = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "description": "Echoed in the response; never used inside",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
}
_TRACEPARENT: _Json = {
    "name": "traceparent",
    "in": "header",
    "required": False,
    "description": "W3C Trace Context; one that is malformed is ignored",
    "schema": {"type": "string"},
}


def _schema(name: str) -> _Json:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


_FAILURE: _Json = {"description": "Why not", "content": {"application/json": _schema("Error")}}
_NOT_JSON = _FAILURE | {"description": "Not said to be JSON, or compressed"}


def _operation(summary: str, content: _Json) -> _Json:
    retry_after = {"headers": {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": summary, "content": content},
            "400": _FAILURE,
            "401": _FAILURE,
            "404": _FAILURE,
            "429": _FAILURE | retry_after,
            "503": _FAILURE | retry_after,
            "default": _FAILURE,
        },
    }


def _get(summary: str, answer: str) -> _Json:
    return _operation(summary, {"application/json": _schema(answer)})


def _probe(summary: str, answer: str) -> _Json:
    """A route that says with its status what its body says, and needs no key."""
    operation = _get(summary, answer)
    content = {"application/json": _schema(answer)}
    operation["responses"]["503"] = {"description": "Not now", "content": content}
    return operation | {"security": _OPEN}


def _order(summary: str, body: str) -> _Json:
    """What only an operator may ask for. Answered by lines of JSON, as things are reached."""
    lines = _STRING["schema"] | {
        "description": "One JSON object a line; the last one's phase is done or failed",
        "contentMediaType": "application/x-ndjson",
        "contentSchema": {"$ref": "#/components/schemas/OrderLine"},
    }
    operation = _operation(summary, {"application/x-ndjson": {"schema": lines}})
    operation["responses"] |= {
        "403": _FAILURE | {"description": "An operator's key is needed"},
        "404": _FAILURE | {"description": "No worker, or more than one, has this name"},
        "409": _FAILURE | {"description": "It is the last of its role, or is told otherwise"},
        "413": _FAILURE,
        "415": _NOT_JSON,
        "502": _FAILURE | {"description": "The worker cannot be reached"},
    }
    return operation | {
        "requestBody": {"required": True, "content": {"application/json": _schema(body)}}
    }


def _post(summary: str, body: str, answer: str) -> _Json:
    operation = _get(summary, answer)
    operation["responses"]["415"] = _NOT_JSON
    return operation | {
        "requestBody": {"required": True, "content": {"application/json": _schema(body)}}
    }


def _tokens(summary: str, answer: str) -> _Json:
    operation = _post(summary, f"{answer}Request", answer)
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _event(answer)}
    return operation | {"parameters": [_REQUEST_ID, _TRACEPARENT]}


def _event(answer: str) -> _Json:
    """One event of a stream."""
    documents = [{"$ref": f"#/components/schemas/{name}"} for name in (f"{answer}Chunk", "Error")]
    return {
        "type": "object",
        "description": "With `stream`. The last event's data is [DONE]. A failure after the first "
        "event is an event with `error`, and no [DONE] follows.",
        "properties": {
            "data": {
                "type": "string",
                "anyOf": [
                    {"const": "[DONE]"},
                    {
                        "contentMediaType": "application/json",
                        "contentSchema": {"anyOf": documents},
                    },
                ],
            }
        },
        "required": ["data"],
    }


def _in_path(name: str) -> _Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
