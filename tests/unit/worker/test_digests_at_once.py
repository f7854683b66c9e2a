"""Where digests of parked KV are made: of little at once, of more beside the event loop."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from worker_kit import PROMPT, collect, decode_leg, prefill_leg, token_ids

from neuron_di.kv import KvPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.kv.neuron_pool import NeuronPool


@pytest.fixture
def threads(monkeypatch):
    """Those on which digests of parked KV were made."""
    seen, digests = [], KvPool.digests

    def noting(pool, *arguments, **fields):
        seen.append(threading.current_thread())
        return digests(pool, *arguments, **fields)

    monkeypatch.setattr(KvPool, "digests", noting)
    return seen


@pytest.mark.parametrize("more", [0, -1], ids=["as much", "one byte less"])
async def test_only_what_takes_no_time_is_digested_on_the_event_loop(
    prefill, decode, monkeypatch, threads, more
):
    layout = prefill.prefill._pool.layout
    num_bytes = layout.num_blocks_for(len(PROMPT)) * layout.block_bytes
    monkeypatch.setattr(KvPool, "digested_at_once_bytes", num_bytes + more)
    first = asyncio.create_task(collect(prefill.prefill.run(prefill_leg("r"))))
    rest = await collect(decode.decode.run(decode_leg("r", prefill)))
    assert len(token_ids(await first) + token_ids(rest)) == 12
    assert (threads[0] is threading.current_thread()) == (more == 0)


async def test_token_0_and_that_it_is_parked_are_said_together(prefill, decode, monkeypatch):
    """Else a client that leaves with its first token has computed a prompt that nobody counts."""
    slept = []
    first = prefill.prefill.run(prefill_leg("r"))
    token = await anext(first)
    loop = asyncio.get_running_loop()
    loop.call_soon(slept.append, "a turn of the loop")
    parked = await anext(first)
    assert (token.index, parked.num_prompt) == (0, len(PROMPT))
    assert slept == []
    rest = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill))))
    await collect(first)
    await rest


async def test_what_is_computed_does_not_wait_for_prompts_that_are_tokenised(
    prefill, decode, monkeypatch
):
    monkeypatch.setattr(KvPool, "digested_at_once_bytes", 0)
    loop, are_read = asyncio.get_running_loop(), threading.Event()
    first = prefill.prefill.run(prefill_leg("r"))
    await anext(first)
    loop.set_default_executor(ThreadPoolExecutor(1))
    reading = loop.run_in_executor(None, are_read.wait, 20)
    await anext(first)
    assert not reading.done()
    are_read.set()
    assert await reading
    rest = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill))))
    await collect(first)
    await rest


def test_a_device_is_not_waited_for_on_the_event_loop():
    assert DevicePool.digested_at_once_bytes == NeuronPool.digested_at_once_bytes == 0
