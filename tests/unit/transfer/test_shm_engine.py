"""What the engine of one host keeps mapped, and for how long."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from neuron_di.errors import (
    KvChanged,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import ArenaPool, KvLayout, KvPool, create_arena, whole_block_runs
from neuron_di.transfer import BlockSource, Receive, ShmEngine
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di.wire import TcpRegion
from neuron_di_bindings import owner_words

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")


@contextmanager
def pool_of(name: str) -> Iterator[KvPool]:
    with closing(KvPool.create(LAYOUT, 4, Incarnation(name))) as pool:
        yield pool


def num_peer_maps() -> int:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("neuron-di-kv" in line and " r--s " in line for line in lines)


def receive_of(own: KvPool, peer: KvPool) -> Receive:
    """Block 0 of the peer's pool into block 1 of the own."""
    return Receive(
        tag=0,
        runs=whole_block_runs(LAYOUT, [0], [1]),
        memory=own.memory(),
        source=BlockSource([0], peer.generations([BlockId(0)])),
        block_ids=[BlockId(1)],
    )


@pytest.mark.parametrize("num_copies", [0, 1, 3])
@pytest.mark.parametrize("small_bytes_max", [0, 1 << 20])
def test_a_peers_pool_is_not_mapped_once_it_is_disconnected(
    num_copies: int, small_bytes_max: int
) -> None:
    """Also while the engine's thread has nothing else to do."""
    before = num_peer_maps()
    with (
        pool_of("own") as own,
        pool_of("peer") as peer,
        closing(ShmEngine(own, small_bytes_max=small_bytes_max)) as engine,
    ):
        engine.connect(peer.incarnation, peer.region(), LAYOUT)
        assert num_peer_maps() == before + 1
        for _ in range(num_copies):
            arrived = threading.Event()
            token = engine.post_receive(peer.incarnation, receive_of(own, peer))
            token.on_done(lambda _, arrived=arrived: arrived.set())
            assert arrived.wait(30.0)
        engine.disconnect(peer.incarnation)
        # Whoever waits in vain for the thread to look for its next job would wait for ever.
        for _ in range(10_000):
            if num_peer_maps() == before:
                break
        assert num_peer_maps() == before


def test_the_pool_of_a_peer_with_another_block_size_can_be_read() -> None:
    """Its layout says how large it is: the own one does not."""
    large = replace(LAYOUT, block_size=16)
    with pool_of("own") as own, closing(KvPool.create(large, 3, Incarnation("peer"))) as peer:
        peer.view(BlockId(2))[:] = bytes(range(256)) * (large.block_bytes // 256)
        with closing(ShmEngine(own)) as engine:
            with pytest.raises(PeerGone):
                engine.connect(peer.incarnation, peer.region(), LAYOUT)
            engine.connect(peer.incarnation, peer.region(), large)
            ended = threading.Event()
            receive = Receive(
                tag=0,
                runs=whole_block_runs(LAYOUT, [8 + 3], [1]),  # the last quarter of its block 2
                memory=own.memory(),
                source=BlockSource([2], peer.generations([BlockId(2)])),
            )
            token = engine.post_receive(peer.incarnation, receive)
            token.on_done(lambda _: ended.set())
            assert ended.wait(30.0)
            assert token.error() is None
            assert own.view(BlockId(1)) == peer.view(BlockId(2))[3 * LAYOUT.block_bytes :]


@pytest.mark.skipif(not owner_words.is_available(), reason="owner_words was not compiled")
def test_blocks_that_an_arena_got_after_the_connection_can_be_read() -> None:
    arena_fd = create_arena()
    names = [WorkerId("one"), WorkerId("other")]
    with pool_of("own") as own, closing(ShmEngine(own)) as engine, ExitStack() as stack:
        stack.callback(os.close, arena_fd)

        def join(name: WorkerId) -> ArenaPool:
            pool = ArenaPool.join(arena_fd, name, LAYOUT, 2, Incarnation(name))
            stack.callback(pool.close)
            return pool

        peer = join(names[0])
        engine.connect(peer.incarnation, peer.region(), LAYOUT)

        def read(block_id: int) -> NeuronDiError | None:
            """Whosever it is: as runs say, and no promise."""
            receive = Receive(
                tag=0,
                runs=whole_block_runs(LAYOUT, [block_id], [1]),
                memory=own.memory(),
                source=BlockSource([], []),
            )
            token = engine.post_receive(peer.incarnation, receive)
            ended = threading.Event()
            token.on_done(lambda _: ended.set())
            assert ended.wait(30.0)
            return token.error()

        assert read(1) is None
        assert isinstance(read(3), RemoteProtocolError)
        other = join(names[1])
        assert other.block_ids() == [2, 3]
        other.view(BlockId(3))[:] = b"z" * LAYOUT.block_bytes
        assert read(3) is None
        assert own.view(BlockId(1)) == b"z" * LAYOUT.block_bytes
        assert isinstance(read(4), RemoteProtocolError)


def test_a_header_that_names_another_worker_or_size_is_no_connection() -> None:
    with pool_of("own") as own, pool_of("peer") as peer, closing(ShmEngine(own)) as engine:
        region = peer.region()
        with pytest.raises(StaleIncarnation):
            engine.connect(Incarnation("x"), region, LAYOUT)
        elsewhere = msgspec.structs.replace(region, host="another")
        with pytest.raises(PeerRefused, match="on another machine"):
            engine.connect(peer.incarnation, elsewhere, LAYOUT)
        other = msgspec.structs.replace(region, incarnation="x")
        with pytest.raises(StaleIncarnation):
            engine.connect(Incarnation("x"), other, LAYOUT)
        with pytest.raises(PeerGone):
            engine.connect(peer.incarnation, msgspec.structs.replace(region, num_blocks=3), LAYOUT)
        with pytest.raises(PeerRefused):
            engine.connect(
                peer.incarnation,
                TcpRegion(host="h", port=1, secret=b"s" * 32, num_streams=1),
                LAYOUT,
            )
        token = engine.post_receive(peer.incarnation, receive_of(own, peer))
        assert isinstance(token.error(), PeerGone)


def test_a_small_receive_is_done_when_it_was_posted_and_a_large_one_is_the_threads() -> None:
    limit = 2 * LAYOUT.block_bytes
    with pool_of("own") as own, pool_of("peer") as peer:
        with closing(ShmEngine(own, small_bytes_max=limit)) as engine:
            engine.connect(peer.incarnation, peer.region(), LAYOUT)
            by: dict[int, str] = {}
            for count in (2, 3):
                ids = list(range(count))
                receive = Receive(
                    tag=count,
                    runs=whole_block_runs(LAYOUT, ids, ids),
                    memory=own.memory(),
                    source=BlockSource(ids, peer.generations(ids)),
                    block_ids=list(map(BlockId, ids)),
                )
                ended = threading.Event()
                token = engine.post_receive(peer.incarnation, receive)
                assert token.is_done() or count == 3

                def note(_: object, count: int = count, ended: threading.Event = ended) -> None:
                    by[count] = threading.current_thread().name
                    ended.set()

                token.on_done(note)
                assert ended.wait(30.0)
                assert token.error() is None
                assert engine.commit(peer.incarnation, receive) is None
            assert by[2] == threading.current_thread().name
        # What the receive ended with is final: nothing writes to its blocks any more.
        own.view(BlockId(0))[:] = b"x" * LAYOUT.block_bytes
        peer.view(BlockId(0))[:] = b"y" * LAYOUT.block_bytes
        assert own.view(BlockId(0)) == b"x" * LAYOUT.block_bytes


def test_what_lands_is_small_up_to_a_limit_of_its_own(monkeypatch) -> None:
    """Whoever copied it places it, too."""
    monkeypatch.setattr("neuron_di.transfer.shm_engine.LANDED_BYTES_MAX", LAYOUT.block_bytes)
    monkeypatch.setattr("neuron_di.transfer.copy_thread.REST", 0.0)
    with pool_of("own") as own, pool_of("peer") as peer, closing(ShmEngine(own)) as engine:
        engine.connect(peer.incarnation, peer.region(), LAYOUT)
        post, shorts = engine._thread.post, []

        def note(*args, is_short):
            shorts.append(is_short)
            post(*args, is_short=is_short)

        engine._thread.post = note  # type: ignore[method-assign]
        for ids, own_ids in (([0], []), ([0, 1], []), ([0, 1], [2, 3])):
            receive = Receive(
                tag=0,
                runs=whole_block_runs(LAYOUT, ids, ids),
                memory=own.memory(),
                source=BlockSource(ids, peer.generations(ids)),
                block_ids=list(map(BlockId, own_ids)),
            )
            token, ended = engine.post_receive(peer.incarnation, receive), threading.Event()
            token.on_done(lambda _, ended=ended: ended.set())
            assert ended.wait(30.0)
        assert shorts == [True, False, True]


def test_a_block_given_up_before_a_small_receive_is_committed_is_not_taken() -> None:
    with pool_of("own") as own, pool_of("peer") as peer, closing(ShmEngine(own)) as engine:
        engine.connect(peer.incarnation, peer.region(), LAYOUT)
        receive = receive_of(own, peer)
        token = engine.post_receive(peer.incarnation, receive)
        assert token.is_done()
        assert token.error() is None
        peer.retire([BlockId(0)])
        assert isinstance(engine.commit(peer.incarnation, receive), KvChanged)


def test_nothing_small_is_copied_behind_the_close() -> None:
    with pool_of("own") as own, pool_of("peer") as peer:
        peer.view(BlockId(0))[:] = b"y" * LAYOUT.block_bytes
        engine = ShmEngine(own)
        engine.connect(peer.incarnation, peer.region(), LAYOUT)
        engine.close()
        token = engine.post_receive(peer.incarnation, receive_of(own, peer))
        assert isinstance(token.error(), LocalProtocolError)
        assert own.view(BlockId(1)) == bytes(LAYOUT.block_bytes)
