"""What a client forbids and favours, in the order of vLLM's sampler; logprobs stay raw."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.engine import sampler
from neuron_di.engine.logit_masks import restricted
from neuron_di.engine.sampler import sample
from neuron_di.errors import BadRequest, LocalProtocolError
from neuron_di.request import OutputText, Request, Tokenizer, TokenRuleMaker
from neuron_di.types import RequestId
from neuron_di.wire import Grammar, SamplingParams

INF = math.inf
EOS = 2


class Kit:
    def __init__(self, folder):
        self.tokenizer = Tokenizer.load(folder)
        self.num_vocab = self.tokenizer.num_vocab
        self.rules = TokenRuleMaker(
            self.tokenizer, num_vocab=self.num_vocab, eos_token_ids=(EOS, 0)
        )

    def request(self, generated=(), prompt_ids=(300,), **fields):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 10_000, **fields})
        request = Request(
            RequestId("r"),
            0,
            prompt_ids=list(prompt_ids),
            sampling=params,
            max_tokens=10_000,
            output=OutputText(self.tokenizer, stop=(), skip_special_tokens=True, min_tokens=0),
            rules=self.rules.rules_of(params),
        )
        request.generated.extend(generated)
        return request

    def row(self, logits, low=-5.0):
        """One row: `logits` by id, `low` for all others."""
        row = torch.full((1, self.num_vocab), low)
        for token_id, logit in logits.items():
            row[0, token_id] = logit
        return row

    def choose(self, logits, **fields):
        (token,) = sample(self.row(logits), [self.request(**fields)], (EOS, 0))
        return token.token_id


@pytest.fixture(scope="module")
def kit(llama_folder):
    return Kit(llama_folder)


def test_a_bias_is_added_to_its_tokens(kit):
    logits = {400: 1.0, 401: 0.5}
    assert kit.choose(logits) == 400
    assert kit.choose(logits, logit_bias=((401, 1.0),)) == 401
    assert kit.choose(logits, logit_bias=((400, -1.0),)) == 401
    assert kit.choose(logits, logit_bias=((400, -100.0), (401, -100.0), (7, 4.0))) == 7


def test_only_allowed_ids_are_chosen(kit):
    logits = {400: 9.0, 401: 0.5, 402: 0.7}
    assert kit.choose(logits, allowed_token_ids=(401, 402)) == 402
    assert kit.choose(logits, allowed_token_ids=(17,)) == 17
    drawn = {
        kit.choose(logits, allowed_token_ids=(401, 402), temperature=2.0, seed=seed)
        for seed in range(30)
    }
    assert drawn == {401, 402}


def test_an_answer_that_is_complete_may_end_whatever_is_allowed(kit):
    grammar = Grammar(kind="choice", value='["ab"]')
    request = kit.request(grammar=grammar, allowed_token_ids=(17,), stop_token_ids=(401,))
    for token_id in kit.tokenizer.encode("ab", add_special_tokens=False):
        with pytest.raises(BadRequest):
            restricted(kit.row({}).numpy()[0], request.rules, request)
        assert not request.rules.grammar.accept(token_id)
    row_V = restricted(kit.row({}).numpy()[0], request.rules, request)
    assert set(np.flatnonzero(np.isfinite(row_V)).tolist()) == {EOS, 0, 401}


def test_a_bad_word_is_not_completed(kit):
    ids = kit.tokenizer.encode("nonsense", add_special_tokens=False)
    assert len(ids) > 1
    fields = {"bad_words": ("nonsense",), "generated": [400, *ids[:-1]]}
    logits = {ids[-1]: 3.0, 401: 1.0}
    assert kit.choose(logits, **fields) == 401
    assert kit.choose(logits, **{**fields, "generated": [400, *ids[1:-1]]}) == ids[-1]
    # What a prompt says does not begin a word of the answer.
    assert kit.choose(logits, bad_words=("nonsense",), prompt_ids=ids[:-1]) == ids[-1]


def test_the_order_of_the_steps(kit):
    """Masks before the bias, the bias before the penalties, and nothing brings a token back."""
    logits = {400: 4.0, 401: 1.0}
    assert kit.choose(logits, allowed_token_ids=(401,), logit_bias=((400, 100.0),)) == 401
    seen = {"repetition_penalty": 2.0, "prompt_ids": [400]}
    # (4 - 1) / 2 is more than 1; 4 / 2 - 1.5 would be less.
    assert kit.choose(logits, logit_bias=((400, -1.0),), **seen) == 400
    assert kit.choose(logits, logit_bias=((400, -2.5),), **seen) == 401
    held = {"min_tokens": 1, "stop_token_ids": (400,), "logit_bias": ((400, 100.0),)}
    assert kit.choose(logits, **held) == 401


def test_logprobs_are_those_of_the_raw_logits(kit):
    row = kit.row({400: 4.0, 401: 1.0})
    fields = {
        "logprobs": 2,
        "logit_bias": ((401, 50.0),),
        "allowed_token_ids": (401, 402),
        "bad_words": ("x",),
    }
    (token,) = sample(row, [kit.request(**fields)], ())
    expected = torch.log_softmax(row[0], dim=-1)
    assert token.token_id == 401
    assert token.logprobs.chosen == pytest.approx(float(expected[401]), abs=1e-5)
    assert [token_id for token_id, _ in token.logprobs.top] == [400, 401]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ("x",)}, "allowed_token_ids"),
        ({"grammar": Grammar(kind="choice", value='["yes"]')}, "allowed_token_ids"),
    ],
)
def test_rules_that_leave_no_token_are_the_clients_fault(kit, fields, param):
    (x,) = kit.tokenizer.encode("x", add_special_tokens=False)
    with pytest.raises(BadRequest, match="leaves no token") as caught:
        kit.choose({400: 1.0}, allowed_token_ids=(x,), **fields)
    assert caught.value.param == param
    # A model that gives no logits is not.
    with pytest.raises(LocalProtocolError):
        sample(torch.full((1, kit.num_vocab), math.nan), [kit.request(bad_words=("x",))], ())


def test_end_tokens_that_are_all_that_is_allowed_may_come_before_min_tokens(kit):
    assert kit.choose({400: 1.0}, min_tokens=5, allowed_token_ids=(EOS,)) == EOS


@given(
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    allowed=st.sets(st.integers(0, 2000), min_size=3, max_size=20),
    bias=st.dictionaries(st.integers(0, 2000), st.floats(-100, 100), max_size=20),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5]),
    penalty=st.sampled_from([1.0, 0.1, 2.0]),
)
def test_what_is_forbidden_is_never_chosen(
    kit, seed, temperature, allowed, bias, top_k, top_p, penalty
):
    row = torch.randn(1, kit.num_vocab, generator=torch.Generator().manual_seed(seed)) * 5
    before = row.clone()
    request = kit.request(
        seed=seed,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        allowed_token_ids=tuple(allowed),
        logit_bias=tuple(bias.items()),
        repetition_penalty=penalty,
        frequency_penalty=-2.0,
        prompt_ids=[1, 5, 1500],
        generated=[7, 7, 1999],
    )
    (token,) = sample(row, [request], (EOS, 0))
    assert token.token_id in allowed
    assert torch.equal(row, before)


def test_a_request_without_rules_costs_what_it_did(kit, monkeypatch):
    """Its row is neither copied nor looked at by anything of the rules."""

    def refuse(*_):
        raise AssertionError("nothing is ruled here")

    monkeypatch.setattr(sampler, "restricted", refuse)
    monkeypatch.setattr(sampler, "biased", refuse)
    seen = []
    argmax = np.argmax
    monkeypatch.setattr(sampler.np, "argmax", lambda row: seen.append(row) or argmax(row))
    logits = kit.row({400: 1.0})
    request = kit.request()
    assert request.rules is None
    sample(logits, [request], (EOS, 0))
    sample(logits, [kit.request(temperature=1.0, ignore_eos=True)], (EOS, 0))
    assert len(seen) == 2
    assert all(np.shares_memory(row, logits.numpy()) for row in seen)
    with pytest.raises(AssertionError, match="nothing is ruled"):
        sample(logits, [kit.request(logit_bias=((1, 1.0),))], (EOS, 0))
