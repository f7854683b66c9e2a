"""One prefill worker's connector and any number of decode workers', over loopback.

No engine computes here: the tests say what is parked.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from transfer_kit import BareDecode, Decode, Prefill, until

from neuron_di.types import RequestId
from neuron_di.wire import Done


class Cluster:
    """What a test makes of workers; all of it ends with the test."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    def prefill(self, **options: object) -> Prefill:
        prefill = Prefill(**options)
        self._stack.push_async_callback(prefill.close)
        return prefill

    def decode(self, **options: object) -> Decode:
        decode = Decode(**options)
        self._stack.push_async_callback(decode.close)
        return decode


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
async def served(cluster: Cluster) -> AsyncIterator[Prefill]:
    """A prefill worker that at the end of the test still serves who behaves."""
    prefill = cluster.prefill()
    yield prefill
    honest = RequestId("honest")
    prefill.park(honest, (8, 9))
    decode = cluster.decode(worker_id="honest")
    token = await decode.hand_over(prefill, [0, 1], honest)
    assert token.error() is None
    assert (decode.pool.tensor()[0] == 8.0).all()
    await until(lambda: prefill.ended and prefill.ended[-1][0] == (honest, 0))
    assert isinstance(prefill.ended[-1][1], Done)


@pytest.fixture
async def peer_of_served(served: Prefill) -> AsyncIterator[BareDecode]:
    with BareDecode(served) as peer:
        await peer.connect()
        yield peer


@pytest.fixture
async def other_of_served(served: Prefill) -> AsyncIterator[BareDecode]:
    with BareDecode(served) as peer:
        await peer.connect()
        yield peer
