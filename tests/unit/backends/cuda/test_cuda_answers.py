"""Whole answers of the CUDA backend, token by token those of the CPU's: all families, drawn too.

On a GPU where there is one, else in Triton's interpreter and on a simulator of the CUDA runtime.
"""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import torch
from backend_kit import make_request, opened
from cuda_backend_kit import NUM_VOCAB, opened_cuda, pool_of, write_small

from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.engine.next_tokens import next_tokens
from neuron_di.wire import SamplingParams

# The window, of the family that has one, is shorter than the longest prompt, and than its chunks.
WINDOW = 18
CHUNK = 20
NUM_TOKENS = 5
TOLERANCE = 2e-4  # logits have a standard deviation of 3


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3"])
def small_folder(request, tmp_path):
    window = {"sliding_window": WINDOW} if request.param == "mistral" else {}
    return write_small(tmp_path, request.param, **window)


def requests_of_every_kind():
    """Three that the device draws, in two ways, and one that it leaves to the host."""
    kinds = [
        (45, [9, 3, 17, 1], {"temperature": 0.0}),
        (1, [2], {"temperature": 1.0, "seed": 5}),
        (16, [11, 6], {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "seed": 6}),
        (5, [20], {"temperature": 0.7, "presence_penalty": 0.5, "seed": 7}),
    ]
    requests = []
    for length, block_ids, sampling in kinds:
        generator = torch.Generator().manual_seed(length)
        prompt_ids = torch.randint(3, NUM_VOCAB, (length,), generator=generator).tolist()
        request = make_request(prompt_ids, block_ids, max_tokens=NUM_TOKENS)
        request.sampling = SamplingParams(**sampling)
        requests.append(request)
    return requests


def choose(backend, logits_BV, requests):
    for request, token in zip(requests, next_tokens(backend, logits_BV, requests, ()), strict=True):
        request.generated.append(token.token_id)


def answers_of(backend, requests=None):
    """Each request's tokens, and all logits in order. Requests leave the batch one by one."""
    requests, logits = requests or requests_of_every_kind(), []
    for request in requests:
        while request.num_computed < request.num_prompt:
            chunk = PrefillChunk.next_of(request, CHUNK)
            logits_V = backend.prefill(chunk)
            chunk.mark_computed()
        logits.append(logits_V.cpu().clone())
        choose(backend, logits_V[None], [request])
    running = requests
    while running:
        batch = DecodeBatch(tuple(running))
        logits_BV = backend.decode(batch)
        batch.mark_computed()
        logits += [*logits_BV.cpu().clone()]
        choose(backend, logits_BV, running)
        # So that every size from four to one was a step's, and rows change their places.
        running = [r for r in running[1:] if len(r.generated) < NUM_TOKENS]
    return [request.generated for request in requests], torch.stack(logits)


def check_answers(folder, *, is_invariant):
    with opened(folder) as cpu:
        tokens, logits = answers_of(cpu)
    with opened_cuda(folder, is_invariant=is_invariant) as cuda:
        same_tokens, close_logits = answers_of(cuda)
    assert same_tokens == tokens
    torch.testing.assert_close(close_logits, logits, rtol=0, atol=TOLERANCE)


def test_answers_are_the_cpus(small_folder):
    check_answers(small_folder, is_invariant=False)


@pytest.mark.parametrize("small_folder", ["qwen3"], indirect=True)
def test_answers_are_the_cpus_by_invariant_products_too(small_folder):
    check_answers(small_folder, is_invariant=True)


@pytest.mark.parametrize("small_folder", ["mistral"], indirect=True)
def test_a_request_that_is_cut_off_goes_on_with_the_same_tokens(small_folder):
    """Its tokens are given to another worker, which replays them and draws the next."""
    with opened_cuda(small_folder, is_invariant=True) as cuda:
        _long, other, first, another = requests_of_every_kind()
        tokens = answers_of(cuda, [other, another, first])[0][2]
    for num_given in (1, 3):
        with opened_cuda(small_folder, is_invariant=True) as cuda:
            first = requests_of_every_kind()[2]
            request = make_request(first.prompt_ids, [4, 8], given=tokens[:num_given])
            request.sampling = first.sampling
            request.generated = list(request.given)
            while request.num_computed < request.num_prefilled:
                chunk = PrefillChunk.next_of(request, CHUNK)
                logits_V = cuda.prefill(chunk)
                chunk.mark_computed()
            choose(cuda, logits_V[None], [request])
        assert request.generated == tokens[: num_given + 1]


def test_what_fills_a_bucket_may_compute_nonsense(tmp_path):
    """The row of the token that fillers have is all NaN, and so is the block their table names."""
    write_small(tmp_path)
    logits = []
    for nonsense in (0.5, float("nan")):
        with opened_cuda(tmp_path) as backend:
            pool_of(backend)[0] = nonsense
            requests = requests_of_every_kind()[:3]
            for request in requests:
                chunk = PrefillChunk(request, 0, request.num_prompt)
                backend.prefill(chunk)
                chunk.mark_computed()
                request.generated.append(7)
            with torch.inference_mode():
                backend._weights.embedding[0] = nonsense
            logits.append(backend.decode(DecodeBatch(tuple(requests))).clone())
    assert logits[1].isfinite().all()
    assert torch.equal(*logits)
