"""etcd fails while requests run: nobody notices, and every proxy knows again who is here."""

from collections.abc import Callable
from typing import Any

import pytest

from neuron_di.clock import unix_s

from .etcd_faults import FAULTS, befall
from .report import table
from .run import run_under_load
from .settings import QUICK_LEAK_TIMEOUT_S

pytestmark = pytest.mark.e2e

RATE_PER_S = 6.0
QUICK_FAULTS = ("F25", "F27", "F28", "F31")  # `make dynamic FAULTS=etcd` has the others


def test_every_row_of_the_matrix_is_here():
    """F29 is part of F25 and F26: both make a ghost."""
    named = " ".join(f"{fault.name} {fault.title}" for fault in FAULTS.values())
    assert [row for row in range(25, 34) if f"F{row}" not in named] == []


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", QUICK_FAULTS)
async def test_a_fault_of_etcd(
    name: str, cluster_of: Any, keep: Callable[[list[str]], None]
) -> None:
    fault = FAULTS[name]
    cluster, wanted = await cluster_of(has_users=fault.has_users)
    start_s = unix_s()
    found = await run_under_load(
        cluster,
        wanted,
        lambda stage: befall(stage, fault),
        rate_per_s=RATE_PER_S,
        leak_timeout_s=QUICK_LEAK_TIMEOUT_S,
    )
    keep(table(fault.title, found, start_s))
    assert found.flaws == []
    assert found.num_equal == found.num_requests > 0
