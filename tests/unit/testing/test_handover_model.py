"""Every order of two ends' steps is tried, and each protection of the rules is needed."""

import pytest

from neuron_di.testing.handoff_world import Violation
from neuron_di.testing.handover_ends import Bugs
from neuron_di.testing.handover_model import explore


def test_blocks_have_one_owner_whatever_happens() -> None:
    found = explore(crashes_max=0)
    assert found.num_states > 5_000
    assert found.num_ends > 5


def test_blocks_have_one_owner_although_one_end_dies_at_any_step() -> None:
    assert explore(crashes_max=1).num_states > 100_000


# Whose absence shows only where somebody dies.
CRASHES = {
    "joins_without_mending": 1,
    "joins_without_advancing": 1,
    "mends_given_first": 1,
    "takes_without_gate": 1,
}


@pytest.mark.parametrize("bug", Bugs._fields)
def test_a_protection_that_is_left_out_is_noticed(bug: str) -> None:
    with pytest.raises(Violation):
        explore(Bugs(**{bug: True}), crashes_max=CRASHES.get(bug, 0))
