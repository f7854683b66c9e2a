"""Requests to /tokenize and /detokenize, made from the OpenAPI document, of a real worker."""

import asyncio
import copy

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openai_kit import Client
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from neuron_di_proxy.openapi import openapi_document

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

EXAMPLES = 40  # of each kind for each route


def operations() -> list[APIOperation]:
    document = copy.deepcopy(openapi_document())
    paths = document["paths"]
    document["paths"] = {path: paths[path] for path in ("/tokenize", "/detokenize")}
    schemas = document["components"]["schemas"]
    for schema in (*schemas["Tokenize"]["anyOf"], schemas["Detokenize"]):
        schema["properties"]["model"] = {"enum": [None, "tiny-tales"]}
    schema = schemathesis.openapi.from_dict(document)
    return [result.ok() for result in schema.get_all_operations()]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.path[1:])
async def test_the_server_does_what_its_document_says(
    tiny_tales_1p1d: Client, operation: APIOperation, mode: GenerationMode
) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        response = case.call_and_validate(
            base_url=tiny_tales_1p1d.url,
            session=session,
            timeout=30,
            excluded_checks=[positive_data_acceptance],  # a chat may break its template's rules
        )
        statuses.add(response.status_code)

    with requests.Session() as session:
        session.trust_env = False
        await asyncio.to_thread(send)
    if mode.is_negative:  # 404 for another model
        assert {400} <= statuses <= {400, 404}
    else:
        assert {200} <= statuses <= {200, 400}
