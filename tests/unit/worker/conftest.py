"""A prefill and a decode worker on one tiny checkpoint; each test ends with both at rest."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from worker_kit import is_at_rest, make_worker, until

from neuron_di.testing import write_random_checkpoint
from neuron_di.worker import Worker


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint. Do not change it."""
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    write_random_checkpoint(folder, "llama")
    return folder


class Workers:
    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def start(self, role: str, **fields: object) -> Worker:
        worker = make_worker(self._folder, role, **fields)
        self._stack.push_async_callback(worker.close)
        self._stack.push_async_callback(until, lambda: is_at_rest(worker))
        return worker


@pytest.fixture
async def workers(llama_folder: Path) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(stack, llama_folder)


@pytest.fixture
async def prefill(workers: Workers) -> Worker:
    return workers.start("prefill")


@pytest.fixture
async def decode(workers: Workers) -> Worker:
    return workers.start("decode")
