"""Requests made from the OpenAPI document, good and bad, against a proxy with scripted workers.

The requests follow from the document and a fixed seed: each run sends the same.
"""

import asyncio
import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from running_proxy import RunningProxy
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from scripted_worker import MODEL, ScriptedWorker, play_decode, play_prefill

from neuron_di.config import LimitOptions, ProxyOptions
from neuron_di_proxy.openapi import openapi_document

EXAMPLES = 40  # of each kind for each route that takes a body
PROBES = 5  # for each other route
ORDER_PATHS = ("/admin/drain", "/admin/role")  # of workers by names that nobody has
TOKENIZER_PATHS = ("/tokenize", "/detokenize")  # scripted workers have no tokenizer
# How the refusals begin or go on that no schema of one field can say.
ACROSS_FIELDS = re.compile(
    "may only equal|needs|cannot be combined|cannot both|differ|must equal|exactly one of|"
    "say different things|more than the|more than `max_tokens`|at most 8|the same name|"
    "not in `tools`|max_tokens must be at least 1|must be a JSON Schema"
)


def document_for_the_model() -> dict:
    """The document, with the only name for which there are workers."""
    document = copy.deepcopy(openapi_document())
    for name in TOKENIZER_PATHS:
        del document["paths"][name]
    for name in ("CompletionRequest", "ChatCompletionRequest"):
        fields = document["components"]["schemas"][name]["properties"]
        fields["model"] = {"const": MODEL}
        fields["min_tokens"] = {"enum": [None, 0, 1]}  # or most are more than `max_tokens`
    # What messages and documents hold is for workers to read.
    chat = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    chat["messages"] = {"enum": [[{"role": "user", "content": "hi"}]]}
    chat["documents"] = {"enum": [None, [{"text": "d"}]]}
    return document


SCHEMA = schemathesis.openapi.from_dict(document_for_the_model())
SCHEMA.config.max_stream_events = 1000  # streams are read to their end
OPERATIONS = [result.ok() for result in SCHEMA.get_all_operations()]
CASES = [
    pytest.param(operation, mode, id=f"{operation.label}-{mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    # A route without a body and without headers cannot be asked wrongly.
    if mode.is_positive or operation.body or operation.headers
]


def with_integers(body: Any) -> Any:
    """`body` with 1 for 1.0: to JSON Schema that is an integer, too."""
    if isinstance(body, dict):
        return {name: with_integers(each) for name, each in body.items()}
    if isinstance(body, list):
        return [with_integers(each) for each in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


async def serve(ready: "threading.Event", address: list[str], stop: asyncio.Event) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(ScriptedWorker("p1", "prefill", play_prefill))
        decode = await stack.enter_async_context(ScriptedWorker("d1", "decode", play_decode(5)))
        for worker in (prefill, decode):
            worker.record = msgspec.structs.replace(worker.record, tool_format="hermes")
        config = ProxyOptions(limits=LimitOptions(drain_timeout_s=2))
        proxy = RunningProxy(config, [prefill.record, decode.record])
        async with proxy:
            address.append(proxy.url)
            ready.set()
            await stop.wait()


def check_stream(operation: APIOperation, stream: bytes) -> None:
    *events, done = stream.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    name = "ChatCompletionChunk" if "chat" in operation.path else "CompletionChunk"
    schema = {"$ref": f"#/components/schemas/{name}", "components": SCHEMA.raw_schema["components"]}
    for event in events:
        jsonschema_rs.validate(schema, json.loads(event.removeprefix("data: ")))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A proxy on a loop of its own: the client of these tests blocks its thread."""
    ready, address, stop = threading.Event(), [], asyncio.Event()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(ready, address, stop))
    thread = threading.Thread(target=loop.run_until_complete, args=(task,))
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_the_server_does_what_its_document_says(
    url: str, session: requests.Session, operation: APIOperation, mode: GenerationMode
) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES if operation.body else PROBES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        case.body = with_integers(case.body)
        response = case.call_and_validate(
            base_url=url, session=session, timeout=30, excluded_checks=[positive_data_acceptance]
        )
        if mode.is_negative and response.status_code == 404:  # two faults, and one is told
            assert response.json()["error"]["code"] == "model_not_found"
            return
        statuses.add(response.status_code)
        if "event-stream" in response.headers["content-type"][0]:
            check_stream(operation, response.content)
        if response.status_code == 400 and mode.is_positive:
            message = response.json()["error"]["message"]
            assert ACROSS_FIELDS.search(message), message

    send()
    if operation.body:
        answered = {404} if operation.path in ORDER_PATHS else {200}
        assert statuses == {400} if mode.is_negative else statuses >= answered
