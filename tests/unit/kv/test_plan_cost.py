"""What a plan of many blocks costs, and that what is reckoned later is of the same blocks."""

import tracemalloc

import numpy as np
from kv_kit import rank_tensors

from neuron_di.kv import Planner


def test_a_plan_is_made_in_proportion_to_its_runs():
    """Blocks that follow each other are as few runs as one, and cost no more than that."""
    source, destination = (rank_tensors(ranks, 8, num_blocks=5000) for ranks in (8, 64))
    planner = Planner(source, destination)
    ids = range(5000)
    Planner(source, source).plan([0], [0], 1)  # numpy loads some of itself when it is first used
    tracemalloc.start()
    try:
        plan = planner.plan(ids, ids, 4 * 5000)
        fills = plan.fills
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(plan.runs) == 2 * 2 * 8
    assert len(fills) == 7 * len(plan.runs)
    assert most < 2_000_000  # every block's runs and fills alone are 51 MB


def test_fills_are_of_the_blocks_that_were_planned():
    source, destination = rank_tensors(2), rank_tensors(4)
    ids = np.array([3, 5])
    planner = Planner(source, destination)
    plan, same = (planner.plan([0, 1], ids, 7) for _ in range(2))
    expected = same.fills.destination_offsets.tolist()
    ids[:] = [1, 2]
    assert plan.fills.destination_offsets.tolist() == expected
