"""What the engine of one host keeps mapped, and for how long."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from neuron_di.kv import KvLayout, KvPool
from neuron_di.transfer import BlockSource, ShmEngine
from neuron_di.types import BlockId, Incarnation

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


@contextmanager
def pool_of(name: str) -> Iterator[KvPool]:
    with closing(KvPool.create(LAYOUT, 4, Incarnation(name))) as pool:
        yield pool


def num_peer_maps() -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("neuron-di-kv" in line and " r--s " in line for line in lines)


@pytest.mark.parametrize("num_copies", [0, 1, 3])
def test_a_peers_pool_is_not_mapped_once_it_is_disconnected(num_copies: int) -> None:
    """Also while the engine's thread has nothing else to do."""
    before = num_peer_maps()
    with pool_of("own") as own, pool_of("peer") as peer, closing(ShmEngine(own)) as engine:
        engine.connect(peer.incarnation, peer.region())
        assert num_peer_maps() == before + 1
        for _ in range(num_copies):
            arrived = threading.Event()
            source = BlockSource([0], peer.generations([BlockId(0)]))
            token = engine.post_receive(peer.incarnation, source, [BlockId(1)])
            token.on_done(lambda _, arrived=arrived: arrived.set())
            assert arrived.wait(30.0)
        engine.disconnect(peer.incarnation)
        # Whoever waits in vain for the thread to look for its next job would wait for ever.
        for _ in range(10_000):
            if num_peer_maps() == before:
                break
        assert num_peer_maps() == before
