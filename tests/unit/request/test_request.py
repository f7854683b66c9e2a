"""Which positions of a request a prefill computes, and which ids stand there."""

from typing import Any, cast

import pytest

from neuron_di.request import Request
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams


def make_request(**fields: Any) -> Request:
    return Request(
        RequestId("r"),
        0,
        prompt_ids=[10, 11, 12],
        sampling=SamplingParams(),
        max_tokens=9,
        output=cast("Any", None),
        **fields,
    )


def test_a_new_request_computes_its_prompt():
    request = make_request()
    assert (request.given, request.generated, request.num_prefilled) == ((), [], 3)


def test_what_is_given_is_computed_too_but_is_not_generated_yet():
    request = make_request(given=[20, 21])
    assert (request.given, request.generated, request.num_prefilled) == ((20, 21), [], 5)


def test_a_decode_worker_says_what_it_receives():
    request = make_request(given=[20, 21], num_prefilled=4)
    assert (request.given, request.num_prefilled) == ((20, 21), 4)


def test_generating_changes_nothing_of_it():
    request = make_request(given=[20])
    request.generated += [20, 21, 22]
    assert request.num_prefilled == 4
    assert request.num_kv_at_most == 11


@pytest.mark.parametrize("start", range(7))
@pytest.mark.parametrize("end", range(7))
def test_token_ids_across_the_end_of_the_prompt(start, end):
    request = make_request()
    request.generated += [20, 21, 22]
    assert request.token_ids(start, end) == [10, 11, 12, 20, 21, 22][start:end]
