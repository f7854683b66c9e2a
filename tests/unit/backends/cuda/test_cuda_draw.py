"""Tokens that the device chooses are those that the host would, and it knows which to leave."""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import make_request
from cuda_backend_kit import IS_GPU

from neuron_di.backends.cuda_draw import draw
from neuron_di.engine.sampler import sample
from neuron_di.wire import SamplingParams

NUM_VOCAB = 300
DEVICE = "cuda" if IS_GPU else "cpu"


def request_with(index=0, **fields):
    request = make_request([1, 2, 3], [0])
    request.sampling = SamplingParams(**fields)
    request.generated = list(range(5, 5 + index))
    return request


def rows(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, NUM_VOCAB, generator=generator)


def on_host(logits, requests):
    return [token.token_id for token in sample(logits, requests, ())]


def test_greedy_rows():
    requests = [request_with(temperature=0.0) for _ in range(5)]
    logits = rows(5)
    logits[1, 7] = logits[1, 250] = 99.0  # of equals the lowest
    assert draw(logits.to(DEVICE), requests) == on_host(logits, requests)


def test_seeded_rows_of_every_kind_at_once():
    names = ("temperature", "top_k", "top_p", "min_p")
    requests = [
        request_with(index, seed=seed, **dict(zip(names, values, strict=True)))
        for seed, (index, *values) in enumerate(
            [(0, 1.0, 0, 1.0, 0.0), (3, 0.7, 5, 1.0, 0.0), (1, 1.3, 0, 0.8, 0.0),
             (9, 1.0, 0, 1.0, 0.1), (2, 0.9, 20, 0.9, 0.05), (0, 0.0, 0, 1.0, 0.0),
             (0, 1e-6, 3, 0.5, 0.0), (4, 1.0, 10_000, 1.0, 0.0), (4, 1.0, 5_000_000_000, 1.0, 0.0)]
        )
    ]  # fmt: skip
    logits = rows(len(requests), seed=4)
    assert draw(logits.to(DEVICE), requests) == on_host(logits, requests)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 0},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 3},
    ],
)
def test_what_the_host_has_to_see_is_left_to_it(fields):
    """Between rows that are not."""
    requests = [
        request_with(2, temperature=0.0),
        request_with(2, temperature=0.0, **fields),
        request_with(2, temperature=1.0, seed=3),
    ]
    logits = rows(3)
    tokens = draw(logits.to(DEVICE), requests)
    assert tokens[1] is None
    assert [tokens[0], tokens[2]] == on_host(logits[[0, 2]], [requests[0], requests[2]])


def test_min_tokens_that_were_reached_are_no_rule():
    (token,) = draw(rows(1).to(DEVICE), [request_with(3, temperature=0.0, min_tokens=3)])
    assert token is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_of_no_use_are_left_for_the_host_to_refuse(temperature, value):
    logits = rows(2)
    logits[1] = value
    requests = [request_with(temperature=temperature, seed=1) for _ in range(2)]
    tokens = draw(logits.to(DEVICE), requests)
    assert tokens[0] is not None
    assert tokens[1] is None
