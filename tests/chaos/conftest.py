"""One cluster for all cases; its report stands at the end of the run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from neuron_di.testing import write_random_checkpoint

from .case import Requests
from .cluster import Cluster
from .report import CaseReport, table
from .settings import QUICK

_reports: list[CaseReport] = []


@pytest.fixture(scope="session")
def reports() -> list[CaseReport]:
    """Where every case puts what it found."""
    return _reports


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
    if _reports:
        terminalreporter.section("chaos")
        for line in table(_reports):
            terminalreporter.write_line(line)
