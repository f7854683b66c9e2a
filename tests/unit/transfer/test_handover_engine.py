"""Blocks that change owner instead of being copied."""

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
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
from neuron_di.kv import ArenaPool, KvLayout, create_arena, whole_block_runs
from neuron_di.transfer import BlockSource, Receive, TransferToken
from neuron_di.transfer.handover_engine import HandoverEngine, Job
from neuron_di.types import BlockId, Incarnation, WorkerId

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
PREFILL, DECODE = Incarnation("f0" * 16), Incarnation("d0" * 16)
WAIT_S = 30.0
Look = Callable[[Job], NeuronDiError | None]


@dataclass
class Pair:
    prefill: ArenaPool
    decode: ArenaPool
    engine: HandoverEngine  # decode's
    peer: HandoverEngine
    tags: Iterator[int] = field(default_factory=itertools.count)

    def receive(self, source: BlockSource, own: Sequence[int]) -> Receive:
        return Receive(
            tag=next(self.tags),
            runs=whole_block_runs(LAYOUT, list(own), list(own)),
            memory=self.decode.memory(),
            source=source,
            block_ids=[BlockId(n) for n in own],
        )

    def promised(self, block_ids: Sequence[int]) -> BlockSource:
        return BlockSource(block_ids, self.prefill.generations(block_ids))

    def look(self, receive: Receive) -> TransferToken:
        """The first half: after it the blocks are verified where they lie."""
        token, ended = self.engine.post_receive(PREFILL, receive), threading.Event()
        token.on_done(lambda _: ended.set())
        if not ended.wait(WAIT_S):
            raise TimeoutError("the receive did not end")
        return token

    def error_of(self, source: BlockSource, own: Sequence[int]) -> NeuronDiError | None:
        return self.look(self.receive(source, own)).error()


@pytest.fixture
def pair() -> Iterator[Pair]:
    fd = create_arena()
    pools = [
        ArenaPool.join(fd, WorkerId(name), LAYOUT, 8, incarnation)
        for name, incarnation in (("prefill", PREFILL), ("decode", DECODE))
    ]
    engines = [HandoverEngine(pool) for pool in pools]
    engines[1].connect(PREFILL, engines[0].local_region(DECODE), LAYOUT)
    yield Pair(pools[0], pools[1], engines[1], engines[0])
    for closing in (*engines, *pools):
        closing.close()
    os.close(fd)


def held(look: Look, may_look: threading.Event) -> Look:
    """So that nothing ends before whoever posted it listens."""

    def late(job: Job) -> NeuronDiError | None:
        may_look.wait(WAIT_S)
        return look(job)

    return late


def test_blocks_are_the_decode_workers_after_the_commit_and_not_before(pair: Pair) -> None:
    pair.prefill.tensor()[[1, 2]] = 5.0
    receive = pair.receive(pair.promised([1, 2]), [8, 9])
    token = pair.look(receive)
    assert (token.error(), token.kv_bytes, token.adopted_ids) == (None, 0, [1, 2])
    assert pair.decode.block_ids() == list(range(8, 16))
    assert (pair.decode.tensor()[token.adopted_ids] == 5.0).all()
    pair.engine.fence(PREFILL)
    assert pair.engine.commit(PREFILL, receive) is None
    assert pair.decode.block_ids() == [1, 2, *range(10, 16)]
    assert pair.decode.exchanges() == [(8, 1), (9, 2)]
    assert pair.prefill.retire([BlockId(1), BlockId(2)])
    assert pair.prefill.exchanges() == [(1, 8), (2, 9)]


def test_blocks_given_up_between_look_and_commit_are_not_taken(pair: Pair) -> None:
    receive = pair.receive(pair.promised([1, 2]), [8, 9])
    assert pair.look(receive).error() is None
    assert not pair.prefill.retire([BlockId(1), BlockId(2)])
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)
    assert pair.decode.block_ids() == list(range(8, 16))


def test_what_the_decode_worker_gave_up_itself_is_not_given(pair: Pair) -> None:
    receive = pair.receive(pair.promised([1, 2]), [8, 9])
    assert pair.look(receive).error() is None
    assert not pair.decode.retire([BlockId(8), BlockId(9)])
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)
    assert not pair.prefill.retire([BlockId(1), BlockId(2)])


def test_what_was_given_up_before_the_thread_looked_is_not_given(pair: Pair) -> None:
    may_look = threading.Event()
    pair.engine._look = held(pair.engine._look, may_look)
    receive, ended = pair.receive(pair.promised([1, 2]), [8, 9]), threading.Event()
    token = pair.engine.post_receive(PREFILL, receive)
    token.on_done(lambda _: ended.set())
    assert not pair.decode.retire([BlockId(8), BlockId(9)])  # the request was cancelled
    may_look.set()
    assert ended.wait(WAIT_S)
    assert isinstance(token.error() or pair.engine.commit(PREFILL, receive), KvChanged)
    assert pair.decode.block_ids() == list(range(8, 16))
    assert not pair.prefill.retire([BlockId(1), BlockId(2)])


@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_is_abandoned_is_not_taken_and_may_be_promised_again(
    pair: Pair, is_given_up: bool
) -> None:
    receive = pair.receive(pair.promised([1, 2]), [8, 9])
    assert pair.look(receive).error() is None
    if is_given_up:
        assert not pair.prefill.retire([BlockId(1), BlockId(2)])
    error = pair.engine.abandon(PREFILL, receive)
    assert isinstance(error, KvChanged) if is_given_up else error is None
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)
    assert pair.decode.block_ids() == list(range(8, 16))
    assert pair.error_of(pair.promised([1, 2]), [8, 9]) is None


def test_a_thread_that_does_not_end_keeps_its_memory_mapped(pair: Pair, monkeypatch) -> None:
    monkeypatch.setattr("neuron_di.transfer.handover_engine.JOIN_S", 0.0)
    looking, may_end, read = threading.Event(), threading.Event(), []
    memory, pair.engine._look = pair.decode.memory(), lambda job: None
    pair.prefill.tensor()[1] = 5.0
    token = pair.engine.post_receive(PREFILL, pair.receive(pair.promised([1]), [8]))

    def verify(_):
        looking.set()
        may_end.wait(WAIT_S)
        read.append(ctypes.string_at(memory.address + LAYOUT.block_bytes, 4))

    pair.look(pair.receive(pair.promised([1]), [8]))
    pair.engine._look = lambda job: verify(job)
    token = pair.engine.post_receive(PREFILL, pair.receive(pair.promised([1]), [8]))
    ended = threading.Event()
    token.on_done(lambda _: ended.set())
    assert looking.wait(WAIT_S)
    pair.engine.close()
    pair.decode.close()
    may_end.set()
    assert ended.wait(WAIT_S)
    assert read == [struct.pack("f", 5.0)]


def test_a_receive_is_committed_once(pair: Pair) -> None:
    receive = pair.receive(pair.promised([1]), [8])
    assert pair.look(receive).error() is None
    assert pair.engine.commit(PREFILL, receive) is None
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)


def test_a_promise_is_looked_at_by_one_receive(pair: Pair) -> None:
    source = pair.promised([1])
    assert pair.error_of(source, [8]) is None
    assert isinstance(pair.error_of(source, [9]), RemoteProtocolError)


def test_a_promise_whose_verifier_failed_may_be_looked_at_again(pair: Pair) -> None:
    def fail(_: TransferToken) -> None:
        raise ValueError("neither taken nor abandoned")

    source, may_look = pair.promised([1]), threading.Event()
    pair.engine._look = held(pair.engine._look, may_look)
    pair.engine.post_receive(PREFILL, pair.receive(source, [8])).on_done(fail)
    may_look.set()
    assert pair.error_of(source, [9]) is None
    assert len(pair.engine._open) == 1


@pytest.mark.parametrize("offered", [2**31, -1, 2**63, "x"])
def test_what_is_no_block_of_the_arena_is_not_offered(pair: Pair, offered) -> None:
    receive = replace(pair.receive(pair.promised([2]), [9]), block_ids=[offered])
    assert isinstance(pair.look(receive).error(), LocalProtocolError)


@pytest.mark.parametrize("block_id", [-1, 16, 2**31, 2**62, 2**64])
def test_a_block_that_was_not_granted_is_not_touched(pair: Pair, block_id: int) -> None:
    assert isinstance(pair.error_of(BlockSource([1, block_id], [1, 1]), [8, 9]), NeuronDiError)


@pytest.mark.parametrize(
    ("source", "own", "kind"),
    [
        (BlockSource([1], [1]), [8, 9], RemoteProtocolError),
        (BlockSource([1, 2], [1]), [8, 9], RemoteProtocolError),
        (BlockSource([], []), [], RemoteProtocolError),
        (BlockSource([1, 1], [1, 1]), [8, 9], RemoteProtocolError),
        (BlockSource([1, 2], [1, 1]), [8, 8], RemoteProtocolError),
        (BlockSource([1], [1]), [3], LocalProtocolError),  # the peer's own block in exchange
        (BlockSource([9], [1]), [8], KvChanged),  # our own block as the peer's
        (BlockSource([1], [2]), [8], KvChanged),
        (BlockSource([1], [-1]), [8], KvChanged),
        (BlockSource([1], [2**56]), [8], KvChanged),
        (BlockSource([1], [2**64]), [8], KvChanged),
    ],
)
def test_what_cannot_be_is_refused(
    pair: Pair, source: BlockSource, own: list[int], kind: type
) -> None:
    assert isinstance(pair.error_of(source, own), kind)
    assert pair.decode.block_ids() == list(range(8, 16))


def test_connecting_needs_the_same_arena_and_the_right_worker(pair: Pair) -> None:
    region = pair.peer.local_region(DECODE)
    for change, kind in (
        ({"arena": "0" * 32}, PeerRefused),
        ({"slot": 2}, StaleIncarnation),
        ({"slot": 255}, StaleIncarnation),
        ({"slot": 0}, StaleIncarnation),
        ({"incarnation": Incarnation("ee" * 16)}, StaleIncarnation),
    ):
        with pytest.raises(kind):
            pair.engine.connect(PREFILL, msgspec.structs.replace(region, **change), LAYOUT)
    with pytest.raises(PeerRefused):
        pair.engine.connect(PREFILL, region, replace(LAYOUT, num_ranks=2))
    with pytest.raises(PeerRefused):
        pair.engine.connect(PREFILL, pair.prefill.region(), LAYOUT)
    for nobody in (Incarnation(""), Incarnation("ee" * 16)):
        with pytest.raises(StaleIncarnation):
            pair.engine.connect(
                nobody, msgspec.structs.replace(region, incarnation=nobody, slot=9), LAYOUT
            )


def test_a_peer_that_left_cannot_be_connected_to_nor_taken_from(pair: Pair) -> None:
    receive = pair.receive(pair.promised([1]), [8])
    assert pair.look(receive).error() is None
    region = pair.peer.local_region(DECODE)
    pair.prefill.close()
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)
    with pytest.raises(StaleIncarnation):
        pair.engine.connect(PREFILL, region, LAYOUT)


def test_a_disconnected_peer_gives_nothing(pair: Pair) -> None:
    receive = pair.receive(pair.promised([1]), [8])
    assert pair.look(receive).error() is None
    pair.engine.disconnect(PREFILL)
    assert isinstance(pair.engine.commit(PREFILL, receive), KvChanged)
    assert isinstance(pair.error_of(pair.promised([1]), [8]), PeerGone)


def test_of_a_peer_that_was_disconnected_before_the_thread_looked_nothing_is_taken(
    pair: Pair,
) -> None:
    may_look = threading.Event()
    pair.engine._look = held(pair.engine._look, may_look)
    receive, ended = pair.receive(pair.promised([1]), [8]), threading.Event()
    pair.engine.post_receive(PREFILL, receive).on_done(lambda _: ended.set())
    pair.engine.disconnect(PREFILL)
    may_look.set()
    assert ended.wait(WAIT_S)
    assert isinstance(pair.engine.commit(PREFILL, receive), PeerGone)
    assert pair.decode.block_ids() == list(range(8, 16))


def test_whose_process_has_ended_is_not_connected_to(pair: Pair) -> None:
    region = pair.peer.local_region(DECODE)
    # As the kernel does: its lock is gone, what it wrote is not.
    pair.prefill.arena.close()
    pair.prefill._arena = None
    with pytest.raises(PeerGone):
        pair.engine.connect(PREFILL, region, LAYOUT)


def test_blocks_with_replicas_of_a_head_do_not_change_owner() -> None:
    layout, fd = replace(LAYOUT, num_ranks=2), create_arena()
    pools = [
        ArenaPool.join(fd, WorkerId(name), layout, 2, incarnation)
        for name, incarnation in (("prefill", PREFILL), ("decode", DECODE))
    ]
    engines = [HandoverEngine(pool) for pool in pools]
    with pytest.raises(PeerRefused, match="replicas"):
        engines[1].connect(PREFILL, engines[0].local_region(DECODE), layout)
    for closing in (*engines, *pools):
        closing.close()
    os.close(fd)


def test_a_closed_engine_takes_no_receive(pair: Pair) -> None:
    pair.engine.close()
    assert isinstance(pair.error_of(pair.promised([1]), [8]), LocalProtocolError)
    pair.engine = HandoverEngine(pair.decode)


def test_many_exchanges_between_two_ends(pair: Pair) -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        count = int(rng.integers(1, 8))
        theirs = [int(n) for n in rng.permutation(pair.prefill.block_ids())[:count]]
        own = [int(n) for n in rng.permutation(pair.decode.block_ids())[:count]]
        receive = pair.receive(pair.promised(theirs), own)
        assert pair.look(receive).error() is None
        assert pair.engine.commit(PREFILL, receive) is None
        assert pair.decode.exchanges() == list(zip(own, theirs, strict=True))
        assert pair.prefill.retire([BlockId(n) for n in theirs])
        assert pair.prefill.exchanges() == list(zip(theirs, own, strict=True))
        assert not pair.prefill.retire([BlockId(n) for n in own])
        assert not pair.decode.retire([BlockId(n) for n in theirs])
    assert sorted(pair.prefill.block_ids() + pair.decode.block_ids()) == list(range(16))
