import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from neuron_di.engine.sampler import (
    RawLogprobs,
    SampledToken,
    _invert_cdf,
    _penalised,
    describe_logprobs,
    sample,
)
from neuron_di.errors import LocalProtocolError
from neuron_di.request import OutputText, Request, Tokenizer
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams, TokenLogprob, TokenLogprobs
from neuron_di.wire.sampling_rules import LOGPROB_MIN

INF = math.inf


def make_request(tokenizer, *, prompt_ids=(0,), generated=(), **fields):
    request = Request(
        RequestId("r"),
        0,
        prompt_ids=list(prompt_ids),
        sampling=SamplingParams(**fields),
        max_tokens=1000,
        output=OutputText(tokenizer, stop=(), skip_special_tokens=True, min_tokens=0),
    )
    request.generated.extend(generated)
    return request


@dataclass
class Kit:
    tokenizer: Tokenizer

    def draw(self, logits, **fields):
        """One token from one row."""
        eos = fields.pop("eos", ())
        row = torch.tensor([logits], dtype=torch.float32)
        return sample(row, [make_request(self.tokenizer, **fields)], eos)[0]

    def draws(self, logits, num=400, **fields):
        """How often each token comes, over as many seeds."""
        requests = [make_request(self.tokenizer, seed=seed, **fields) for seed in range(num)]
        rows = torch.tensor([logits] * num, dtype=torch.float32)
        return Counter(token.token_id for token in sample(rows, requests, ()))


@pytest.fixture(scope="module")
def kit():
    vocab = {"a": 0, "b": 1, "Ġc": 2, "ð": 3}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return Kit(Tokenizer(backend))


def softmax(logits):
    weights = np.exp(np.asarray(logits, dtype=np.float64) - max(logits))
    return weights / weights.sum()


def kept_by(logits, params):
    """The ids that may be drawn, and their probabilities: vLLM's rules, told naively."""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    probs = softmax(scaled)
    kept = probs >= params.min_p * probs.max()
    if params.top_k:
        kept &= scaled >= np.sort(scaled)[::-1][min(params.top_k, len(scaled)) - 1]
    probs = np.where(kept, probs, 0.0) / probs[kept].sum()
    before = 0.0
    for token_id in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
        if before >= params.top_p:
            kept[token_id] = False
        before += probs[token_id]
    probs = np.where(kept, probs, 0.0)
    return probs / probs.sum()


def assert_fits(counts, probs, num):
    """Chi-square of the counts; with `df` degrees of freedom its mean is df, variance 2 df."""
    expected = np.asarray(probs) * num
    seen = np.array([counts[token_id] for token_id in range(len(expected))])
    assert seen[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = float(((seen - expected)[likely] ** 2 / expected[likely]).sum())
    df = int(likely.sum()) - 1
    assert chi_square <= df + 5 * math.sqrt(2 * df)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(kit, fields):
    logits = [1.0, -0.5, 2.0, 0.0, 1.5, -2.0, 0.7, -INF]
    num = 4000
    counts = kit.draws(logits, num, **fields)
    assert_fits(counts, kept_by(logits, SamplingParams(**fields)), num)


def test_a_vocabulary_of_many_blocks_is_drawn_from_evenly(kit):
    num_vocab, num = 5000, 2000
    counts = kit.draws([0.0] * num_vocab, num)
    tenths = Counter()
    for token_id, count in counts.items():
        tenths[token_id * 10 // num_vocab] += count
    assert_fits(tenths, [0.1] * 10, num)


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.93, 0.61, 0.17, 1e-9]),
    min_p=st.sampled_from([0.0, 0.011, 0.37, 1.0]),
    temperature=st.sampled_from([0.31, 1.0, 1.7]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_only_what_the_naive_rules_keep_is_drawn(
    kit, logits, top_k, top_p, min_p, temperature, seed
):
    params = SamplingParams(
        top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed
    )
    row = torch.tensor([logits])
    request = make_request(
        kit.tokenizer, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed
    )
    probs = kept_by(logits, params)
    assert probs[sample(row, [request], ())[0].token_id] > 0


def test_all_that_the_rules_keep_is_drawn(kit):
    logits = [0.3, 1.0, 0.9, -1.0, 0.4, 0.1]
    for fields in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.75}):
        kept = np.flatnonzero(kept_by(logits, SamplingParams(**fields)))
        assert set(kit.draws(logits, **fields)) == set(kept)


def test_the_ends_of_the_distribution_have_mass():
    mass = np.array([0.0, 1.0, 0.0, 3.0, 0.0], dtype=np.float32)
    assert _invert_cdf(mass, 0.0) == 1
    assert _invert_cdf(mass, 0.24) == 1
    assert _invert_cdf(mass, 0.25) == 3
    assert _invert_cdf(mass, 1.0) == 3  # where rounding can carry the largest number drawn
    for num_blocks in (1, 2, 5):
        spread = np.zeros(1024 * num_blocks, dtype=np.float32)
        spread[-5] = 1.0
        assert {_invert_cdf(spread, uniform) for uniform in (0.0, 0.5, 1.0)} == {len(spread) - 5}


def test_of_equals_top_p_keeps_the_lower_ids_and_top_k_all(kit):
    assert set(kit.draws([0.0, 0.0, 0.0, 0.0], top_p=0.5)) == {0, 1}
    assert set(kit.draws([0.0, 0.0, 0.0, 0.0], top_p=1e-12)) == {0}
    assert set(kit.draws([0.0, 1.0, 0.0, 0.0], top_k=2)) == {0, 1, 2, 3}


def test_greedy_takes_the_largest_and_the_first_of_equals(kit):
    assert kit.draw([0.0, 3.0, 1.0, 3.0], temperature=0).token_id == 1
    assert kit.draw([0.0, 3.0, 1.0, 4.0], temperature=0, top_p=0.1, top_k=2).token_id == 3
    assert kit.draw([0.0, 1e-3], temperature=1e-9, seed=3).token_id == 1


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}])
def test_odd_rows(kit, fields):
    assert kit.draws([5.0], **fields) == Counter({0: 400})
    assert kit.draws([-INF, 2.0, -INF], **fields) == Counter({1: 400})
    assert kit.draws([0.0, 900.0, -900.0], **fields) == Counter({1: 400})
    lowest = torch.finfo(torch.float32).min
    assert kit.draws([lowest, 50.0, lowest], temperature=0.1, **fields) == Counter({1: 400})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[1.0, math.nan], [INF, 1.0], [-INF, -INF]])
def test_unusable_logits_are_an_error_and_no_token(kit, row, temperature):
    with pytest.raises(LocalProtocolError, match="no usable logits"):
        kit.draw(row, temperature=temperature)


def mixed_requests(tokenizer):
    return [
        make_request(tokenizer, temperature=0),
        make_request(tokenizer, seed=1),
        make_request(tokenizer, seed=2, top_p=0.8, generated=[4, 4, 1]),
        make_request(tokenizer, seed=3, top_k=5, logprobs=4),
        make_request(tokenizer, temperature=0, repetition_penalty=1.5, prompt_ids=[3, 9]),
        make_request(tokenizer, seed=-1, min_p=0.1, frequency_penalty=0.5, generated=[2, 2]),
    ]


def test_a_row_depends_on_nothing_else_in_the_batch(kit):
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * 3
    requests = mixed_requests(kit.tokenizer)
    together = sample(logits, requests, (7,))
    alone = [sample(logits[b : b + 1], [requests[b]], (7,))[0] for b in range(6)]
    assert together == alone
    order = [4, 1, 5, 0, 3, 2]
    shuffled = sample(logits[order], [requests[b] for b in order], (7,))
    assert shuffled == [together[b] for b in order]
    assert sample(logits, requests, (7,)) == together


def test_neither_logits_nor_requests_are_changed(kit):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    requests = mixed_requests(kit.tokenizer)
    generated = [list(request.generated) for request in requests]
    sample(logits, requests, (7,))
    assert torch.equal(logits, before)
    assert [request.generated for request in requests] == generated


def test_the_draw_depends_on_the_seed_and_the_token_index_alone(kit):
    logits = [0.0] * 1000
    by_seed = {kit.draw(logits, seed=seed).token_id for seed in range(20)}
    assert len(by_seed) > 15
    by_index = {kit.draw(logits, seed=1, generated=[0] * n).token_id for n in range(20)}
    assert len(by_index) > 15
    first = kit.draw(logits, seed=1, generated=[1, 2, 3], prompt_ids=[5])
    assert kit.draw(logits, seed=1, generated=[7, 8, 9], prompt_ids=[6, 6]) == first


def test_the_generator_is_the_same_everywhere_and_always(kit):
    """Two workers of different versions must draw alike: these numbers are part of the format."""
    logits = [0.0] * 10_000
    drawn = [kit.draw(logits, seed=seed).token_id for seed in (0, 1, -1, 2**63 - 1)]
    drawn.append(kit.draw(logits, seed=0, generated=[0] * 5).token_id)
    assert drawn == [115, 3035, 2349, 9258, 1648]


@given(
    logits=st.lists(st.integers(-30, 30).map(float), min_size=5, max_size=5),
    prompt_ids=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    generated=st.lists(st.integers(0, 4), max_size=6),
    repetition=st.sampled_from([1.0, 0.5, 1.25, 2.0]),
    presence=st.sampled_from([0.0, -1.5, 2.0]),
    frequency=st.sampled_from([0.0, -0.5, 1.0]),
)
def test_penalties_equal_the_naive_ones(
    kit, logits, prompt_ids, generated, repetition, presence, frequency
):
    expected = list(logits)
    for token_id in set(prompt_ids + generated):
        value = expected[token_id]
        expected[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(generated).items():
        expected[token_id] -= presence + frequency * count
    request = make_request(
        kit.tokenizer,
        prompt_ids=prompt_ids,
        generated=generated,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    penalised = _penalised(np.array(logits, dtype=np.float32), request)
    np.testing.assert_allclose(penalised, expected, atol=1e-4)


def test_each_penalty_alone_changes_the_choice(kit):
    logits = [2.0, 1.9, -2.0]
    assert kit.draw(logits, temperature=0).token_id == 0
    prompt_only = {"prompt_ids": [0], "temperature": 0}
    assert kit.draw(logits, repetition_penalty=1.5, **prompt_only).token_id == 1
    assert kit.draw(logits, presence_penalty=1, frequency_penalty=1, **prompt_only).token_id == 0
    generated = {"prompt_ids": [2], "generated": [0, 0], "temperature": 0}
    assert kit.draw(logits, presence_penalty=0.2, **generated).token_id == 1
    assert kit.draw(logits, frequency_penalty=0.06, **generated).token_id == 1
    assert kit.draw(logits, frequency_penalty=0.04, **generated).token_id == 0


def test_end_tokens_are_masked_until_min_tokens(kit):
    logits = [1.0, 9.0, 8.0, 0.0]
    fields = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (2,), "eos": (1,)}
    assert kit.draw(logits, **fields).token_id == 0
    assert kit.draw(logits, generated=[0], **fields).token_id == 0
    assert kit.draw(logits, generated=[0, 0], **fields).token_id == 1
    assert kit.draw(logits, ignore_eos=True, **fields).token_id == 1
    assert set(kit.draws(logits, min_tokens=1, stop_token_ids=(1, 2))) == {0, 3}


def test_a_mask_that_would_leave_nothing_is_not_applied(kit):
    all_ids = {"min_tokens": 1, "stop_token_ids": (0, 1), "temperature": 0}
    assert kit.draw([1.0, 2.0], **all_ids).token_id == 1
    assert kit.draw([1.0], eos=(0, 77), min_tokens=1).token_id == 0
    assert kit.draw([1.0, 2.0], min_tokens=1, temperature=0).token_id == 1


def test_logprobs_are_those_of_the_raw_logits(kit):
    logits = [1.0, 3.0, 3.0, -INF, 2.0]
    expected = torch.log_softmax(torch.tensor(logits), dim=-1)
    plain = {"logprobs": 3, "temperature": 0}
    bent = {"repetition_penalty": 2.0, "prompt_ids": [1, 2], "generated": [1], "min_tokens": 9}
    for fields in (plain, {**plain, "temperature": 0.3, "seed": 4}, {**plain, **bent}):
        token = kit.draw(logits, eos=(1,), **fields)
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in token.logprobs.top] == [1, 2, 4]
        for token_id, logprob in token.logprobs.top:
            assert logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


def test_number_of_logprobs(kit):
    assert kit.draw([1.0, 2.0]).logprobs is None
    none = kit.draw([1.0, 2.0], logprobs=0, temperature=0).logprobs
    assert none is not None
    assert none.top == []
    more = kit.draw([1.0, 2.0], logprobs=20, temperature=0).logprobs
    assert more is not None
    assert [token_id for token_id, _ in more.top] == [1, 0]


def test_logprobs_for_the_wire(kit):
    assert describe_logprobs(kit.tokenizer, SampledToken(0)) is None
    raw = RawLogprobs(-0.5, [(3, -0.25), (0, -INF)])
    assert describe_logprobs(kit.tokenizer, SampledToken(2, raw)) == TokenLogprobs(
        chosen=TokenLogprob(" c", -0.5, [32, 99], 2),
        top=[
            TokenLogprob("\\xf0", -0.25, [0xF0], 3),
            TokenLogprob("a", LOGPROB_MIN, [97], 0),
        ],
    )
