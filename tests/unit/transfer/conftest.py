"""One prefill worker's connector and any number of decode workers', over loopback.

No engine computes here: the tests say what is parked.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

pytest.register_assert_rewrite("transfer_kit")

from transfer_kit import Decode, Prefill  # noqa: E402


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
