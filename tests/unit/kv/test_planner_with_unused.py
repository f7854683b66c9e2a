"""Transposed keys that move with the unused tail of their block: fewer runs, the same KV."""

import numpy as np
import pytest
from kv_kit import move, numbers, rank_tensors, tensors_of, view, write_request

from neuron_di.kv import DeviceKv, Planner, planner

USED, PAD, NUM_SLOTS = 8, 4, 4
ITEM, DIMS, LAYERS, HEADS = 2, 4, 2, 2


def slots(num_ranks, *, pad=PAD, keys="HDS", values="HSD"):
    """Whole slots, and the part of them that requests use."""
    whole = rank_tensors(
        num_ranks, block_size=USED + pad, num_blocks=NUM_SLOTS, keys=keys, values=values
    )
    return whole, DeviceKv.used_part(whole, USED)


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 8)])
@pytest.mark.parametrize("values", ["HSD", "HDS"])
@pytest.mark.parametrize("num_tokens", [1, 5, USED, 2 * USED + 3])
def test_used_tokens_arrive_in_all_replicas_and_other_slots_stay(theirs, ours, values, num_tokens):
    (all_sent, source), (all_own, destination) = (slots(n, values=values) for n in (theirs, ours))
    count = source.num_blocks_for(num_tokens)
    source_ids, ids = [2, 0, 1][:count], [1, 2, 0][:count]
    kv = numbers((LAYERS, 2, HEADS, num_tokens, DIMS), "bfloat16", 1)
    sent, own = tensors_of(all_sent, 1), tensors_of(all_own, 1000)
    write_request(source, sent, source_ids, kv)
    before = [tensor.copy() for tensor in own]
    plan = Planner(source, destination, with_unused=True).plan(source_ids, ids, num_tokens)
    move(plan.runs, sent, own)
    move(plan.fills, own, own)
    unused = sorted(set(range(NUM_SLOTS)) - set(ids))
    for rank, heads in enumerate(destination.heads):
        for layer, c in np.ndindex(LAYERS, 2):
            came = view(destination, own, rank, layer, c)
            was = view(all_own, before, rank, layer, c)
            assert (view(all_own, own, rank, layer, c)[unused] == was[unused]).all()
            for token in range(num_tokens):
                block, position = divmod(token, USED)
                expected = kv[layer, c, list(heads), token]
                assert (came[ids[block], :, position] == expected).all()
    num_replicas = max(1, ours // HEADS)
    assert plan.fills.num_bytes == (num_replicas - 1) * num_tokens * source.token_bytes


@pytest.mark.parametrize("num_tokens", [1, USED])
def test_a_head_is_one_run_with_all_that_its_slot_has(num_tokens):
    source, destination = slots(2)[1], slots(4)[1]
    plan = Planner(source, destination, with_unused=True).plan([1], [0], num_tokens)
    row_bytes = DIMS * (USED + PAD) * ITEM
    value_bytes = DIMS * num_tokens * ITEM
    assert sorted(plan.runs.lengths) == sorted([row_bytes, value_bytes] * LAYERS * HEADS)
    used = Planner(source, destination).plan([1], [0], num_tokens).runs
    assert len(used) == (DIMS + 1) * LAYERS * HEADS
    assert used.num_bytes == num_tokens * source.token_bytes


def test_slots_that_follow_each_other_are_one_run():
    same = slots(1)[1]
    runs = Planner(same, same, with_unused=True).plan([0, 1], [2, 3], 2 * USED).runs
    assert runs.lengths.max() == 2 * same.strides[0].block


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (slots(2), slots(2, pad=0)),
        (slots(2, keys="HSD"), slots(2, keys="HSD")),
        (slots(1, keys="SHD"), slots(1, keys="SHD")),
    ],
)
def test_other_blocks_move_as_without(theirs, ours):
    source, destination = theirs[1], ours[1]
    found, expected = (
        Planner(source, destination, with_unused=with_unused).plan([1], [0], 5).runs
        for with_unused in (True, False)
    )
    assert (found.lengths == expected.lengths).all()
    assert (found.destination_offsets == expected.destination_offsets).all()


def test_blocks_of_other_sizes_move_used_tokens_only():
    """Although their strides are alike, which part of a block a request has is not."""
    whole, source = slots(2)
    runs = Planner(source, whole, with_unused=True).plan([0, 1], [2, 1], 13).runs
    assert runs.num_bytes == 13 * source.token_bytes


@pytest.mark.parametrize("with_unused", [True, False])
@pytest.mark.parametrize("keys", ["HSD", "HDS", "SHD"])
@pytest.mark.parametrize("pad", [0, PAD])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 4), (4, 1)])
def test_a_block_is_no_more_runs_than_were_told(ranks, pad, keys, with_unused):
    source, destination = slots(ranks[0], keys=keys)[1], slots(ranks[1], keys=keys, pad=pad)[1]
    made = Planner(source, destination, with_unused=with_unused)
    most = len(made.plan([0], [1], USED).runs)
    assert most <= made.num_runs_below(USED) <= 2 * most  # K and V may be neighbours


def test_replicas_are_reckoned_once_and_when_somebody_fills_them(monkeypatch):
    calls = []
    real = planner._fills
    monkeypatch.setattr(planner, "_fills", lambda whose: calls.append(whose) or real(whose))
    same = slots(8)[1]
    made = Planner(same, same)
    plans = [made.plan([i], [i + 1], 3) for i in (0, 1)]
    assert len(plans[0].runs) > 0
    assert calls == []
    assert [len(plan.fills) for plan in plans] == [(4 - 1) * len(plans[0].runs)] * 2
    assert calls == [same]
