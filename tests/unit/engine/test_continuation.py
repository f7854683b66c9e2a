"""An answer that was interrupted anywhere goes on as if nothing had happened: tokens, texts,
logprobs and its end, on one worker or on two, alone or in company.
"""

from itertools import pairwise

import pytest
from engine_kit import Rig

from neuron_di.engine import Emitted, Ended

PROMPT = list(range(90, 101))
NUM_TOKENS = 24
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 7}

CASES = {
    "greedy": {},
    "greedy with penalties": {**PENALTIES, "logprobs": 2},
    "sampled": {**SAMPLED, "logprobs": 3},
    "sampled with all": {**SAMPLED, **PENALTIES, "top_k": 40, "min_p": 0.01, "logprobs": 0},
}


def said(events):
    """The tokens and how it ended, without timings."""
    tokens = [event.token for event in events if isinstance(event, Emitted)]
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert all(b.index == a.index + 1 for a, b in pairwise(tokens))
    end = ended.reason, ended.stop, ended.text, ended.num_prompt, ended.num_generated
    return tokens, end


def run(rig: Rig, **fields):
    rig.engine.submit(rig.request("a", PROMPT, **{"max_tokens": NUM_TOKENS, **fields}))
    return said(rig.turn_until_idle())


def run_split(prefill: Rig, decode: Rig, **fields):
    """As two workers do it: KV is copied to other blocks, the decode worker knows all ids."""
    fields = {"max_tokens": NUM_TOKENS, **fields}
    request = prefill.request("a", PROMPT, **fields)
    prefill.engine.submit(request)
    first = prefill.turn(times=12)
    if request.finish_reason is not None:
        return said(first)
    del fields["given"]
    received = decode.received("a", *request.generated, prompt_ids=PROMPT, **fields)
    decode.engine.submit(received)
    decode.turn()
    block_ids, token = decode.transfers.pop("a")
    num_pulled = len(request.block_ids)
    source = prefill.backend.pool.tensor()[request.block_ids]
    decode.backend.pool.tensor()[block_ids[:num_pulled]] = source
    token.complete()
    prefill.engine.release(request.key)
    assert prefill.turn_until_idle() == []
    return said(first[:1] + decode.turn_until_idle())


def check_every_split(make_rig, fields):
    whole = make_rig("both")
    tokens, end = run(whole, **fields)
    ids = [token.token_id for token in tokens]
    both, prefill, decode = make_rig("both"), make_rig("prefill"), make_rig("decode")
    for num_given in range(len(ids) + 1):
        fields["given"] = ids[:num_given]
        assert run(both, **fields) == (tokens[num_given:], end), num_given
        assert run_split(prefill, decode, **fields) == (tokens[num_given:], end), num_given
    return tokens, end


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_with_the_same_tokens(make_rig, case):
    tokens, end = check_every_split(make_rig, dict(CASES[case]))
    assert len(tokens) == NUM_TOKENS
    assert end[0] == "length"
    assert all((token.logprobs is None) == ("logprobs" not in CASES[case]) for token in tokens)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_stop_string_across_the_interruption_is_found(make_rig, sampling):
    tokens, _ = run(make_rig("both"), **sampling)
    text = "".join(token.text for token in tokens[:16])
    stop = text[len(text) // 2 : len(text) // 2 + 16]  # of several tokens
    tokens, (reason, found, *_) = check_every_split(make_rig, {**sampling, "stop": (stop,)})
    assert (reason, found) == ("stop", stop)
    assert 3 < len(tokens) < NUM_TOKENS
    assert sum(token.text == "" for token in tokens) >= 2  # they were held back


def test_a_stop_string_that_almost_came_is_said_at_the_end(make_rig):
    tokens, (_, _, flushed, *_) = run(make_rig("both"))
    text = "".join(token.text for token in tokens) + flushed
    stop = text[-5:] + "and more"
    _, (reason, _, flushed, *_) = check_every_split(make_rig, {"stop": (stop,)})
    assert reason == "length"
    assert flushed.endswith(stop[:5])


def test_a_stop_token_ends_it_after_min_tokens_only(make_rig):
    """A continued request knows how many tokens came before, and so what is masked."""
    rig = make_rig("both")
    free, _ = run(rig)
    early = free[3].token_id
    masked, _ = run(rig, stop_token_ids=(early,), min_tokens=9)
    assert masked[3].token_id != early
    fields = {"stop_token_ids": (early, masked[12].token_id), "min_tokens": 9}
    tokens, (reason, found, *_) = check_every_split(make_rig, fields)
    assert (reason, found) == ("stop", tokens[-1].token_id)
    assert 9 < len(tokens) < NUM_TOKENS


def test_in_company_of_others_it_goes_on_with_the_same_tokens(make_rig):
    tokens, end = run(make_rig("both"), **SAMPLED)
    ids = [token.token_id for token in tokens]
    rig = make_rig("both", chunk=5, batch_size=3)
    undisturbed = run(make_rig("both", chunk=5), **SAMPLED)
    assert [token.token_id for token in undisturbed[0]] == ids
    splits = (0, 1, 7, 16, 23)
    for num_given in splits:
        name = f"r{num_given}"
        rig.engine.submit(
            rig.request(name, PROMPT, max_tokens=NUM_TOKENS, given=ids[:num_given], **SAMPLED)
        )
    events = rig.turn_until_idle()
    for num_given in splits:
        mine = [event for event in events if event.key[0] == f"r{num_given}"]
        assert said(mine) == (undisturbed[0][num_given:], end)
