import random

import numpy as np
import pytest
from engine_of_one import answer_of_one_engine

from neuron_di.testing.fake_model import NUM_VOCAB, FakeBackend, FakeTokenizer
from neuron_di.testing.reference_run import reference_answer
from neuron_di.testing.workload import CONTEXT_TOKENS, NUM_REQUESTS, wanted
from neuron_di.wire import SamplingParams


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 17, 42, 99, 256])
def test_an_engine_gives_the_answer_of_the_reference(number):
    want = wanted(number)
    assert answer_of_one_engine(want.prompt_ids, want.sampling) == want.answer


@pytest.mark.parametrize("place", [0, 5, 8])
def test_any_damaged_position_changes_the_answer(place):
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = (5, 9, 1, 3, 3, 7, 20, 30, 11)

    def damage(backend: FakeBackend, request):
        size = backend.layout.block_size
        backend.pool.halves_N2S[request.block_ids[place // size], 0, place % size] ^= np.uint32(1)

    right = answer_of_one_engine(prompt, greedy)
    assert answer_of_one_engine(prompt, greedy, after_prefill=damage).tokens[1:] != right.tokens[1:]


def test_the_answer_depends_on_each_id_of_the_prompt():
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    answers = {
        tuple(t.token_id for t in reference_answer(prompt, greedy, context_tokens=64).tokens)
        for prompt in [(1, 2, 3), (3, 2, 1), (1, 2, 4), (1, 2), (2, 2, 3)]
    }
    assert len(answers) == 5


def test_the_workload_has_every_kind_of_request():
    wants = [wanted(number) for number in range(NUM_REQUESTS)]
    assert {want.answer.reason for want in wants} == {"stop", "length"}
    assert any(isinstance(want.answer.stop, str) for want in wants)
    assert any(isinstance(want.answer.stop, int) for want in wants)
    assert any(want.answer.text for want in wants)  # held back to the end
    assert any(want.sampling.logprobs is not None for want in wants)
    assert any(want.sampling.frequency_penalty for want in wants)
    assert {len(want.answer.tokens) for want in wants} >= {1, 2, 24}
    room = max(len(want.prompt_ids) + (want.sampling.max_tokens or 0) for want in wants)
    assert room <= CONTEXT_TOKENS


def test_tokens_are_bytes_that_join_to_text():
    tokenizer = FakeTokenizer()
    ids = random.Random(1).choices(range(NUM_VOCAB), k=200)
    pieces = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == pieces.decode("utf-8", "replace")
    assert tokenizer.decode([0, 3, 4, 0], skip_special_tokens=True) == "é"
