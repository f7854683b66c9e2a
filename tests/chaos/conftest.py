"""One cluster for all cases; its report stands at the end of the run."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from neuron_di.testing import write_random_checkpoint

from .case import Requests
from .cluster import Cluster
from .report import CaseReport, table
from .settings import QUICK

_PROPERTY = "chaos"


@pytest.fixture
def keep(record_property: Callable[[str, object], None]) -> Callable[[CaseReport], None]:
    """Takes what a case found. It travels with the test's result: another process may print it."""
    return lambda report: record_property(_PROPERTY, report.to_plain())


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("chaos")
    model = folder / "model"
    write_random_checkpoint(model, "llama")
    # One spare of each role: the next case need not wait until a killed worker is back.
    async with Cluster(model, folder / "sync", QUICK, prefill=3, decode=3) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def requests(cluster: Cluster) -> Requests:
    return await Requests.learn(cluster)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        CaseReport.from_plain(plain)
        for results in terminalreporter.stats.values()
        for result in results
        if getattr(result, "when", None) == "call"
        for name, plain in result.user_properties
        if name == _PROPERTY
    ]
    if reports:
        terminalreporter.section("chaos")
        for line in table(reports):
            terminalreporter.write_line(line)
