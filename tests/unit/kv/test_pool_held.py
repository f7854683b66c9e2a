"""Who uses a pool while it is closed: addresses stay, and blocks are not given away."""

import gc
import os
import threading
from contextlib import closing, contextmanager

import pytest
from kv_kit import rank_tensors, tensors_of

from neuron_di.clock import Deadline
from neuron_di.errors import LocalProtocolError
from neuron_di.kv import (
    ArenaPool,
    DeviceKv,
    KvLayout,
    KvPool,
    NeuronPool,
    arena_pool,
    create_arena,
    ownership,
)
from neuron_di.kv.arena_pool import PoolMaker
from neuron_di.kv.holds import Holds
from neuron_di.types import BlockId, Incarnation, WorkerId

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=16, dtype="bfloat16")
OLD, NEW = Incarnation("a" * 32), Incarnation("b" * 32)
NUM_BLOCKS = 4
WAIT_S = 20.0


@pytest.fixture
def waited(monkeypatch):
    """Set when somebody begins to wait for those who hold a pool."""
    event, end = threading.Event(), Holds.end

    def end_and_tell(self, deadline):
        event.set()
        return end(self, deadline)

    monkeypatch.setattr(Holds, "end", end_and_tell)
    return event


@contextmanager
def making_in_arena():
    fd = create_arena()
    try:
        yield PoolMaker(fd, WorkerId("decode-0"))
    finally:
        os.close(fd)


def test_an_address_that_is_held_stays_the_same():
    pool = KvPool.create(LAYOUT, NUM_BLOCKS, OLD)
    memory = pool.memory()
    with pool.hold():
        pool.close()
        gc.collect()
        assert pool.memory() == memory


@pytest.mark.parametrize("is_in_arena", [False, True])
def test_a_pool_is_not_held_any_more_once_it_is_settled(is_in_arena):
    with making_in_arena() as make, closing(make(LAYOUT, NUM_BLOCKS, OLD)) as pool:
        if not is_in_arena:
            pool = KvPool.create(LAYOUT, NUM_BLOCKS, OLD)
        with pool.hold():
            assert not pool.settle(Deadline.after(0))
        assert pool.settle(Deadline.after(0))
        with pytest.raises(LocalProtocolError), pool.hold():
            pass
        pool.close()


def test_blocks_of_an_arena_stay_until_who_writes_to_them_has_ended(waited):
    with making_in_arena() as make:
        old = make(LAYOUT, NUM_BLOCKS, OLD)
        assert isinstance(old, ArenaPool)
        own, held, closed = old.block_ids()[0], threading.Event(), []

        def write():
            with old.hold():
                block = old.view(own)
                held.set()
                assert waited.wait(WAIT_S)
                closed.append(old._arena is None)
                block[:] = bytes([1]) * LAYOUT.block_bytes

        writing = threading.Thread(target=write)
        writing.start()
        assert held.wait(WAIT_S)
        old.close()
        writing.join(WAIT_S)
        with closing(make(LAYOUT, NUM_BLOCKS, NEW)) as new:
            assert own in new.block_ids()
            assert not any(new.view(own))
    assert closed == [False]


def test_blocks_of_an_arena_that_are_written_to_for_ever_are_not_given_away(monkeypatch):
    monkeypatch.setattr(arena_pool, "SETTLE_S", 0.0)
    monkeypatch.setattr(ownership, "GATE_TIMEOUT_S", 0.1)
    with making_in_arena() as make:
        old = make(LAYOUT, NUM_BLOCKS, OLD)
        own = set(old.block_ids())
        with old.hold():
            old.close()
            new = make(LAYOUT, NUM_BLOCKS, NEW)
            assert not (isinstance(new, ArenaPool) and own & set(new.block_ids()))
            new.close()


class SlowTensor:
    """A device's tensor in an array, whose first write lasts until `may_end`."""

    core, nrt = 0, None

    def __init__(self, array, is_writing, may_end):
        self._array, self._is_writing, self._may_end = array, is_writing, may_end
        self.num_bytes = array.nbytes

    def read(self, offset, into):
        into[:] = self._array[offset : offset + len(into)]

    def write(self, offset, data):
        if not self._is_writing.is_set():
            self._is_writing.set()
            assert self._may_end.wait(WAIT_S)
        self._array[offset : offset + len(data)] = data


def test_slots_of_a_device_are_the_next_pools_after_the_last_write_to_them(waited):
    is_writing = threading.Event()
    geometry = rank_tensors(
        2, keys="HSD", values="HSD", block_size=LAYOUT.block_size + 8, num_blocks=NUM_BLOCKS + 1
    )
    tensors = [SlowTensor(array, is_writing, waited) for array in tensors_of(geometry, 1)]
    device = DeviceKv(tensors=tensors, geometry=geometry, lncs=(0, 1))
    block, num_tokens = BlockId(1), LAYOUT.block_size
    old = NeuronPool.create(LAYOUT, NUM_BLOCKS, OLD, device)
    old.begin_fill([block])
    old.view(block)[:] = bytes([1]) * LAYOUT.block_bytes
    filling = threading.Thread(target=old.end_fill, args=([block], num_tokens))
    filling.start()
    assert is_writing.wait(WAIT_S)
    old.close()
    with closing(NeuronPool.create(LAYOUT, NUM_BLOCKS, NEW, device)) as new:
        new.view(block)[:] = bytes([2]) * LAYOUT.block_bytes
        new.to_device(block, num_tokens)
        filling.join(WAIT_S)
        new.view(block)[:] = bytes(LAYOUT.block_bytes)
        new.to_host(block, num_tokens)
        assert bytes(new.view(block)) == bytes([2]) * LAYOUT.block_bytes
    assert new.lost is None
