"""The path of a request through the proxy, as its benchmark runs it: what it must not cost."""

import asyncio
import gc
from contextlib import closing

import pytest

from benchmarks.proxy_load import Load
from benchmarks.proxy_path import NowhereLoop, Path

NUM_STREAMS = 60  # many more than begin, or end, in one turn of the loop


def on_a_path(use):
    """What `use(path)` returns, on a loop that connects to nobody."""
    with asyncio.Runner(loop_factory=NowhereLoop) as runner:

        async def run():
            with closing(Path(NUM_STREAMS)) as path:
                return await use(path)

        return runner.run(run())


def request_for(reply_tokens):
    return Load(80, 1, 1, reply_tokens, 10, 1.0).request()


@pytest.mark.parametrize("reply_tokens", [1, 8])
def test_a_client_is_written_to_once_for_each_token_and_once_for_the_end(reply_tokens):
    async def use(path):
        await path.round(request_for(reply_tokens), reply_tokens)
        return path.num_writes

    assert on_a_path(use) == NUM_STREAMS * (reply_tokens + 1)


def test_a_request_leaves_no_garbage_for_the_collector():
    # `settle_garbage` has it look less often, which is right as long as there is nothing to find.
    async def use(path):
        request = request_for(8)
        await path.round(request, 8)
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await path.round(request, 8)
            return gc.collect()
        finally:
            gc.enable()

    assert on_a_path(use) < 5 * NUM_STREAMS  # not one object for each request
