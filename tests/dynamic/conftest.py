"""Clusters for a whole file, and the tables of all runs at the end of the report."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from etcd.etcd_kit import require_etcd

from . import etcd_faults
from .cluster import Cluster
from .etcd_faults import etcd_for
from .load import Wanted
from .run import running_cluster
from .settings import QUICK

_PROPERTY = "dynamic"


@pytest.fixture
def keep(record_property: Callable[[str, object], None]) -> Callable[[list[str]], None]:
    """Takes the table of a run. It travels with the test's result: another process may print it."""
    return lambda lines: record_property(_PROPERTY, lines)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Callable[..., object]]:
    """Two proxies, two workers of each role, and an etcd of the wanted kind; made once per kind."""
    require_etcd()
    made: dict[bool, tuple[Cluster, Wanted]] = {}
    async with AsyncExitStack() as stack:

        async def get(*, has_users: bool) -> tuple[Cluster, Wanted]:
            if has_users not in made:
                etcd = await stack.enter_async_context(etcd_for(has_users=has_users))
                folder = tmp_path_factory.mktemp("dynamic")
                running = running_cluster(etcd, etcd_faults.FIRST, QUICK, folder, num_proxies=2)
                cluster = await stack.enter_async_context(running)
                made[has_users] = cluster, await Wanted.learn(cluster.urls[0])
            return made[has_users]

        yield get


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for results in terminalreporter.stats.values():
        for result in results:
            if getattr(result, "when", None) != "call":
                continue
            for name, lines in result.user_properties:
                if name == _PROPERTY:
                    terminalreporter.section(f"dynamic: {result.nodeid.rpartition('::')[2]}")
                    for line in lines:
                        terminalreporter.write_line(line)
