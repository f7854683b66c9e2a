import asyncio

import pytest
import worker_record

from neuron_di.registry import EmbeddedRegistry


class FakeClock:
    def __init__(self):
        self.s = 1000.0

    def __call__(self):
        return self.s


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def registry(clock):
    registry = EmbeddedRegistry(clock)
    yield registry
    registry.check_integrity()


@pytest.fixture
def make_record():
    return worker_record.make_record


@pytest.fixture
def wait_workers():
    """Wait until a directory satisfies a condition. The suite's timeout bounds the wait."""

    async def wait(directory, condition):
        async with asyncio.timeout(30):
            epoch = directory.epoch
            while not condition(directory.workers()):
                epoch = await directory.wait_changed(epoch)
        return directory.workers()

    return wait
