import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from kernel_kit import DEVICE
from reference_kernels import choose_reference

from neuron_di.backends.cuda_kernels import (
    DrawRules,
    choose,
    choose_greedy,
    draw_kernel,
)
from neuron_di.engine.sampler import _draw
from neuron_di.request import uniform
from neuron_di.wire import SamplingParams

# On a GPU exp is another function than NumPy's: there a draw may be the next one over.
NUDGES = (0.0,) if DEVICE == "cpu" else (0.0, -1e-6, 1e-6)


TILE = 64


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(draw_kernel, "_TILE", TILE)


def rules_of(params, uniforms):
    rules = DrawRules.allocate(len(params), DEVICE)
    for row, one in enumerate(params):
        rules.temperature_B[row] = one.temperature
        rules.top_k_B[row] = one.top_k
        rules.top_p_B[row] = one.top_p
        rules.log_min_p_B[row] = math.log(one.min_p) if one.min_p else -math.inf
        rules.uniform_B[row] = uniforms[row]
    return rules


def choose_rows(rows, params, uniforms=None):
    """What the device chooses, after the reference in torch has agreed."""
    uniforms = uniforms or [uniform(one.seed or 0, 0) for one in params]
    logits = torch.tensor(np.asarray(rows, np.float32), device=DEVICE)
    rules = rules_of(params, uniforms)
    tokens, is_usable = choose(logits, rules)
    assert is_usable.all()
    if DEVICE == "cpu":
        assert choose_reference(logits, rules)[0].tolist() == tokens.tolist()
    return tokens.tolist()


def hosts_tokens(row, params, uniform):
    """What the engine's sampler draws of the same logits."""
    best = int(np.argmax(row))
    if not params.temperature:
        return {best}
    nudged = [min(max(uniform + nudge, 0.0), 1 - 2.0**-53) for nudge in NUDGES]
    return {_draw(row, best, params, number) for number in nudged}


def some_logits(rng, num_vocab):
    """Rows flat and steep, with and without equal numbers and masked tokens."""
    row = rng.normal(size=num_vocab) * rng.choice([0.05, 1.0, 5.0])
    if rng.random() < 0.4:
        row = np.round(row * 2) / 2
    if rng.random() < 0.3:
        row[rng.random(num_vocab) < 0.5] = -np.inf
        row[rng.integers(num_vocab)] = 0.0
    return row.astype(np.float32)


@pytest.mark.parametrize("num_vocab", [5, 64, 150])
def test_tokens_are_those_of_the_engines_sampler(num_vocab):
    rng = np.random.default_rng(num_vocab)
    rows = [some_logits(rng, num_vocab) for _ in range(16)]
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 3, 20, 70])),
            top_p=float(rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.999])),
            min_p=float(rng.choice([0.0, 0.0, 0.05, 0.5, 1.0])),
            seed=int(rng.integers(1 << 40)),
        )
        for _ in rows
    ]
    assert len({one.temperature > 0 for one in params}) == 2
    tokens = choose_rows(rows, params)
    for row, one, token in zip(rows, params, tokens, strict=True):
        assert token in hosts_tokens(row, one, uniform(one.seed or 0, 0)), one


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_both_ends_of_the_random_number_give_a_token_that_can_be(uniform):
    row = np.full(130, -np.inf, np.float32)
    row[[70, 100, 129]] = [1.0, 2.0, 1.0]
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.7),
    ]
    tokens = choose_rows([row] * 3, params, [uniform] * 3)
    for one, token in zip(params, tokens, strict=True):
        assert token in hosts_tokens(row, one, uniform)


def test_a_number_on_the_border_of_two_tokens_is_the_second_ones():
    row = np.full(100, -np.inf, np.float32)
    row[[20, 90]] = 0.0
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)]
    assert choose_rows([row] * 2, params, [0.5] * 2) == [90, 90]


def test_the_kth_is_found_where_the_largest_are_in_one_lane():
    row = np.linspace(-1.0, 1.0, 150, dtype=np.float32)
    row[[5, 69, 133]] = [5.0, 4.9, 4.8]
    params = [SamplingParams(temperature=1.0, top_k=k) for k in (1, 2, 3, 4)]
    assert choose_rows([row] * 4, params, [0.9999] * 4) == [5, 69, 133, 149]


def test_top_p_ends_with_the_token_that_reaches_it():
    row = np.log(np.array([1.0, 4.0, 2.0, 3.0], np.float32))
    shares = [0.395, 0.405, 0.695, 0.705, 0.895, 0.905]
    params = [SamplingParams(temperature=1.0, top_p=share) for share in shares]
    # By weight 1, 3, 2, 0; drawn in the order of their ids, the least that is kept last.
    assert choose_rows([row] * 6, params, [0.9999] * 6) == [1, 3, 3, 2, 2, 0]


def sum_of_lanes(weights, floor):
    """As the kernel sums what weighs more: the k-th of each tile in one lane."""
    kept = weights[weights > floor]
    tiles = np.zeros((-(-len(kept) // TILE), TILE))
    tiles.flat[: len(kept)] = kept
    return tiles.sum(0).sum()


def test_a_top_p_that_leaves_out_less_than_sums_are_rounded_by():
    rng, top_p, rows = np.random.default_rng(0), 1 - 2.0**-53, []
    while len(rows) < 4:
        row = (rng.normal(size=150) * rng.choice([1, 3, 8])).astype(np.float32)
        weights = np.exp(row - row.max())
        total = sum_of_lanes(weights, -1.0)
        if sum_of_lanes(weights, np.float32(0.5 * (1 - top_p) * total / 150)) < top_p * total:
            rows.append(row)
    one = SamplingParams(temperature=1.0, top_p=top_p)
    tokens = choose_rows(rows, [one] * 4, [0.1, 0.3, 0.6, 0.9])
    for row, token, number in zip(rows, tokens, [0.1, 0.3, 0.6, 0.9], strict=True):
        assert token in hosts_tokens(row, one, number)


def test_of_equal_logits_the_lowest_id_is_the_best():
    rows = np.zeros((3, 200), np.float32)
    rows[1, [77, 150]] = 2.0
    rows[2, [199, 128]] = 3.0
    assert choose_rows(rows, [SamplingParams(temperature=0.0)] * 3) == [0, 77, 128]
    assert choose_greedy(torch.tensor(rows, device=DEVICE))[0].tolist() == [0, 77, 128]


def test_all_equals_of_the_kth_are_kept_but_of_top_p_the_lower_ids():
    row = np.zeros(100, np.float32)
    row[40] = 1.0
    uniforms = [0.01, 0.14, 0.2, 0.5, 0.8, 0.99]
    by_k = choose_rows([row] * 6, [SamplingParams(temperature=1.0, top_k=2)] * 6, uniforms)
    assert max(by_k) > 90
    by_p = choose_rows([row] * 6, [SamplingParams(temperature=1.0, top_p=0.2)] * 6, uniforms)
    assert 0 in by_p
    assert 40 in by_p
    assert max(set(by_p) - {40}) < 20


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_without_a_largest_finite_logit_is_told_and_harms_nobody(value):
    logits = torch.zeros(3, 100, device=DEVICE)
    logits[1, 70] = value
    params = [SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=seed) for seed in range(3)]
    rules = rules_of(params, [0.3, 0.3, 0.3])
    assert choose(logits, rules)[1].tolist() == [True, False, True]
    assert choose_greedy(logits)[1].tolist() == [True, False, True]
    logits[1] = -math.inf
    assert choose(logits, rules)[1].tolist() == [True, False, True]
    assert choose_greedy(logits)[1].tolist() == [True, False, True]


def test_rules_are_greedy_until_they_are_filled_and_a_row_does_not_see_the_others():
    rng = np.random.default_rng(7)
    logits = torch.tensor(np.stack([some_logits(rng, 100) for _ in range(3)]), device=DEVICE)
    rules = DrawRules.allocate(3, DEVICE)
    best = choose(logits, rules)[0].tolist()
    assert best == logits.argmax(-1).tolist()
    rules.temperature_B[1], rules.top_p_B[1], rules.uniform_B[1] = 1.5, 0.95, 0.6
    mixed = choose(logits, rules)[0].tolist()
    alone = rules_of([SamplingParams(temperature=1.5, top_p=0.95)], [0.6])
    assert mixed == [best[0], choose(logits[1:2], alone)[0].item(), best[2]]
