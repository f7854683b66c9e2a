import asyncio

import pytest

from neuron_di.registry import EmbeddedRegistry
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import PROTOCOL_VERSION, WorkerRecord


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
    def make(port=4000, **fields):
        values = {
            "protocol_version": PROTOCOL_VERSION,
            "worker_id": WorkerId(f"prefill-{port}"),
            "incarnation": Incarnation("i"),
            "role": "prefill",
            "state": "ready",
            "pid": 1,
            "model": "tiny",
            "model_digest": "d",
            "layout_digest": "l",
            "context_tokens": 128,
            "host": "127.0.0.1",
            "api_port": port,
            "signal_host": "127.0.0.1",
            "signal_port": port + 1,
            "started_unix_s": 1.0,
        }
        return WorkerRecord(**(values | fields))

    return make


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
