"""Workers come, go, die, stand still and change their role while requests run: nobody notices."""

from collections.abc import Callable
from pathlib import Path

import pytest
from etcd.etcd_kit import running_etcd

from neuron_di.clock import unix_s

from .load import Wanted
from .report import table
from .run import run_under_load, running_cluster
from .scenario import FIRST, all_at_once
from .settings import QUICK, QUICK_KEY_TIMEOUT_S, QUICK_LEAK_TIMEOUT_S

pytestmark = pytest.mark.e2e

RATE_PER_S = 6.0


async def test_changes_under_load(tmp_path: Path, keep: Callable[[list[str]], None]) -> None:
    async with (
        running_etcd() as etcd,
        running_cluster(etcd, FIRST, QUICK, tmp_path) as cluster,
    ):
        wanted = await Wanted.learn(cluster.urls[0])
        start_s = unix_s()
        found = await run_under_load(
            cluster,
            wanted,
            all_at_once,
            rate_per_s=RATE_PER_S,
            leak_timeout_s=QUICK_LEAK_TIMEOUT_S,
        )
        found.flaws += await cluster.end(QUICK_KEY_TIMEOUT_S)
    keep(table("changes", found, start_s))
    assert found.flaws == []
    assert len(found.rows) == 9
    assert found.num_equal == found.num_requests > 0
