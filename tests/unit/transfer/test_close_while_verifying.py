"""A worker closes while received KV is verified: what is read stays mapped, or is not read."""

import gc
from dataclasses import replace

import pytest
from transfer_kit import LAYOUT, end_of, until

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import KvPool, block_digests
from neuron_di.kv import pool as kv_pool
from neuron_di.transfer import ShmEngine
from neuron_di.types import BlockId

LARGE = replace(LAYOUT, block_size=4096)  # the mapping of a small pool may be another's at once


def is_mapped(address):
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [line.split()[0].split("-") for line in maps]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


@pytest.fixture
async def pair(cluster):
    return cluster.prefill(layout=LARGE), cluster.decode(layout=LARGE)


async def pull(prefill, decode):
    ready = prefill.park()
    await decode.lookup(prefill)
    token = decode.buffer(prefill).pull(ready, [BlockId(0), BlockId(1)])
    return await end_of(token)


async def test_a_pool_that_closes_meanwhile_stays_mapped(pair, monkeypatch):
    prefill, decode = pair
    seen, digests, own_memory = [], kv_pool.block_digests, decode.pool.memory()

    def close_then_read(memory, *args, **kwargs):
        if memory == own_memory:
            decode.pool.close()
            gc.collect()
            seen.append(is_mapped(memory.address))
        return digests(memory, *args, **kwargs)

    monkeypatch.setattr(kv_pool, "block_digests", close_then_read)
    assert (await pull(prefill, decode)).error() is not None  # what was there is gone
    assert seen == [True]


async def test_a_pool_that_was_closed_is_not_read(cluster, monkeypatch):
    class Closing(ShmEngine):
        def fence(self, peer):
            decode.pool.close()

    prefill, decode = (
        cluster.prefill(layout=LARGE),
        cluster.decode(layout=LARGE, make_transfer=Closing),
    )
    reads, own_memory = [], decode.pool.memory()

    def digests(memory, *rest, **fields):
        if memory == own_memory:
            reads.append(1)
        return block_digests(memory, *rest, **fields)

    monkeypatch.setattr(kv_pool, "block_digests", digests)
    assert isinstance((await pull(prefill, decode)).error(), LocalProtocolError)
    assert reads == []
    await until(lambda: prefill.ended)


def test_a_pool_is_unmapped_when_it_is_held_no_longer():
    pool = KvPool.create(LARGE, 16, "x")
    address = pool.memory().address
    with pool.hold():
        pool.close()
        gc.collect()
        assert is_mapped(address)
    gc.collect()
    assert not is_mapped(address)
    with pytest.raises(LocalProtocolError), pool.hold():
        pass
