"""Who may have a pool in an arena, what it gets, and what stays when it ends."""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from arena_kit import LAYOUT, NUM_BLOCKS, Scene, scene

from neuron_di.errors import ConfigError, PeerGone, StaleIncarnation
from neuron_di.kv import ArenaPool, KvPool, PoolMaker, create_arena, open_peer_pool, ownership
from neuron_di.kv.arena import Arena, NoArena
from neuron_di.kv.rank_pool import reopen
from neuron_di.types import BlockId, Incarnation, WorkerId
from neuron_di_bindings import owner_words
from neuron_di_bindings.block_runs import are_words

WIDE = replace(LAYOUT, head_dim=1024)  # each block has pages of its own
TABLES_BYTES = 16 * 4096  # whoever looks at a page of them, makes it


def used_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def both() -> Iterator[Scene]:
    with scene() as made:
        yield made


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_arena()
    yield fd
    os.close(fd)


def make(fd: int, name: str = "a", layout=LAYOUT, num_blocks=NUM_BLOCKS, incarnation="ab" * 16):
    maker = PoolMaker(fd, WorkerId(name))
    return maker(layout, num_blocks, Incarnation(incarnation))


def test_each_worker_has_its_own_blocks_in_one_memory(both: Scene) -> None:
    assert both.prefill.pool.block_ids() == list(range(6))
    assert both.decode.pool.block_ids() == list(range(6, 12))
    both.prefill.pool.tensor()[3] = 5.0
    assert (both.decode.pool.tensor()[3] == 5.0).all()
    assert both.decode.pool.tensor().data_ptr() == both.decode.pool.base_address
    assert both.decode.pool.memory().address == both.decode.pool.base_address
    assert both.decode.pool.num_blocks == NUM_BLOCKS < both.decode.pool.num_ids


def test_an_arena_that_grows_moves_nothing(both: Scene) -> None:
    before, address = both.prefill.pool.tensor(), both.prefill.pool.base_address
    before[0] = 4.0
    third = both.join("decode-1", 1000)
    third.pool.tensor()[1011] = 6.0
    assert both.prefill.pool.base_address == address
    assert (both.prefill.pool.tensor()[1011] == 6.0).all()
    assert (before[0] == 4.0).all()
    third.pool.close()


def test_a_pool_has_as_many_blocks_as_it_was_asked_for(both: Scene) -> None:
    for wanted in (3, 8, 1, 8):
        both.prefill.die()
        both.prefill = both.join("prefill", wanted)
        assert both.prefill.pool.num_blocks == len(both.prefill.pool.block_ids()) == wanted
        assert not both.prefill.owned & both.decode.owned
    assert both.prefill.pool.arena.num_granted == 14


def test_blocks_that_a_smaller_pool_does_not_use_keep_no_memory(fd: int) -> None:
    PoolMaker(fd, WorkerId("other"))(WIDE, 1, Incarnation("01" * 16))
    before = used_bytes(fd)
    make(fd, layout=WIDE).close()
    pool = make(fd, layout=WIDE)
    pool.arena.close()  # as if it was killed
    smaller = make(fd, layout=WIDE, num_blocks=2)
    assert used_bytes(fd) - before <= 2 * WIDE.block_bytes + TABLES_BYTES
    assert not smaller.retire([BlockId(1), BlockId(2)])
    smaller.close()
    again = make(fd, layout=WIDE)
    assert again.block_ids() == list(range(1, 1 + NUM_BLOCKS))
    again.close()


def test_a_worker_that_comes_back_finds_what_it_held(fd: int) -> None:
    maker = PoolMaker(fd, WorkerId("a"))
    assert maker.held_bytes(replace(LAYOUT, head_dim=8)) == 0  # only a question
    pool = make(fd, layout=WIDE)
    assert maker.held_bytes(WIDE) == 0  # it lives, and gives nothing
    pool.arena.close()  # as if it was killed
    assert maker.held_bytes(WIDE) == NUM_BLOCKS * WIDE.block_bytes
    assert PoolMaker(fd, WorkerId("b")).held_bytes(WIDE) == 0
    make(fd, layout=WIDE).close()
    assert maker.held_bytes(WIDE) == 0  # it gave the memory back


def test_a_pool_whose_memory_is_not_there_leaves_none_behind(fd: int, monkeypatch) -> None:
    populate = owner_words.populate

    def populate_half(view, offset, num_bytes):
        populate(view, offset, num_bytes // 2)
        raise OSError("no memory")

    monkeypatch.setattr(owner_words, "populate", populate_half)
    pool = make(fd, layout=WIDE)
    assert type(pool) is KvPool
    assert used_bytes(fd) <= TABLES_BYTES
    other = Arena.open(fd, WIDE, 1 << 30)
    assert not other.slot_of(Incarnation("ab" * 16))
    other.close()
    pool.close()


@contextmanager
def held_gate(fd: int, kind: int) -> Iterator[None]:
    """Another process holds the gate, and does not run."""
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    fcntl.flock(other, kind)
    yield
    os.close(other)


@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_one_that_leaves_gives_its_memory_back_whoever_holds_the_gate(
    fd: int, kind: int, monkeypatch
) -> None:
    monkeypatch.setattr(ownership, "LEAVE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(ownership, "GATE_TIMEOUT_S", 0.0)
    pool = make(fd, layout=WIDE)
    with held_gate(fd, kind):
        pool.close()
        assert used_bytes(fd) <= TABLES_BYTES
    again = make(fd, layout=WIDE)
    assert again.block_ids() == list(range(NUM_BLOCKS))
    assert again.generations([BlockId(0)]) == [3]
    again.close()


def test_a_rank_that_outlives_its_worker_does_not_keep_the_gate(fd: int) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        pool = make(fd)
        rank_fd = reopen(pool)
        rank = subprocess.Popen(["sleep", "60"], pass_fds=(rank_fd,))
        with pool.arena.gate(alone=False, timeout_s=5.0):
            os.write(writing, b"%d" % rank.pid)
            signal.pause()
    rank_pid = int(os.read(reading, 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pool = make(fd, "b")
    is_in = isinstance(pool, ArenaPool)
    os.kill(rank_pid, signal.SIGKILL)
    pool.close()
    os.close(reading)
    os.close(writing)
    assert is_in


def test_a_closed_pool_keeps_no_memory_and_comes_back_zeroed(fd: int) -> None:
    layout = WIDE
    pool = make(fd, layout=layout)
    pool.tensor()[:NUM_BLOCKS] = 3.0
    before = used_bytes(fd)
    pool.close()
    pool.close()
    assert used_bytes(fd) <= before - NUM_BLOCKS * layout.block_bytes + TABLES_BYTES
    assert not pool.retire([])
    again = make(fd, layout=layout)
    assert isinstance(again, ArenaPool)
    assert not again.tensor()[:NUM_BLOCKS].any()
    again.close()


def mapped_bytes(arena: Arena, blocks_address: int) -> int:
    """How much of an arena, whose blocks lie there, this process has page table entries for."""
    wanted = blocks_address - arena.data_offset
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith(f"{wanted:x}-"):
                return next(int(each.split()[1]) << 10 for each in file if each.startswith("Rss:"))
    raise AssertionError("the arena is not mapped")


def test_a_peers_blocks_are_mapped_before_they_are_wanted(fd: int, monkeypatch) -> None:
    own, peer = make(fd, layout=WIDE), make(fd, "b", layout=WIDE)
    assert isinstance(own, ArenaPool)
    assert isinstance(peer, ArenaPool)
    peer.tensor()[peer.block_ids()] = 3.0
    slot, peer_bytes = peer.ownership.slot, NUM_BLOCKS * WIDE.block_bytes
    before = mapped_bytes(own.arena, own.base_address)
    own.arena.map_blocks_of(slot, Incarnation("another"))
    monkeypatch.setattr("neuron_di.kv.arena.MAPPING_S", 0.0)
    own.arena.map_blocks_of(slot, peer.incarnation)
    assert mapped_bytes(own.arena, own.base_address) == before
    monkeypatch.undo()
    own.arena.map_blocks_of(slot, peer.incarnation)
    assert mapped_bytes(own.arena, own.base_address) == before + peer_bytes
    # Read-only, too, and what has left is not brought back.
    region = peer.region()
    reader = open_peer_pool(region, WIDE)
    assert mapped_bytes(own.arena, reader.base_address) >= peer_bytes
    peer.close()
    used = used_bytes(fd)
    own.arena.map_blocks_of(slot, region.incarnation)
    assert used_bytes(fd) == used
    own.close()


@pytest.mark.parametrize("change", [{"head_dim": 8}, {"num_layers": 2, "head_dim": 2}])
def test_blocks_of_another_layout_get_a_pool_of_their_own(fd: int, change) -> None:
    pool = make(fd)
    other = make(fd, "b", layout=replace(LAYOUT, **change))
    assert isinstance(pool, ArenaPool)
    assert type(other) is KvPool
    pool.close()
    other.close()


def test_a_worker_whose_blocks_do_not_fit_gets_a_pool_of_its_own(fd: int, monkeypatch) -> None:
    monkeypatch.setattr("neuron_di.kv.arena_pool._machine_bytes", lambda: 8 * LAYOUT.block_bytes)
    first, second = make(fd), make(fd, "b")
    assert isinstance(first, ArenaPool)
    assert type(second) is KvPool
    with pytest.raises(ConfigError):
        make(fd, "c", num_blocks=1 << 58)
    first.close()
    second.close()


def test_without_the_compiled_part_each_has_a_pool_of_its_own(fd: int, monkeypatch) -> None:
    monkeypatch.setattr(owner_words, "_owner_words", None)
    pool = make(fd)
    assert type(pool) is KvPool
    pool.close()


def test_the_slots_of_a_living_worker_are_not_taken_over(fd: int, monkeypatch) -> None:
    monkeypatch.setattr(ownership, "SLOT_TIMEOUT_S", 0.0)
    first = make(fd)
    second = make(fd)
    assert type(second) is KvPool
    first.close()
    third = make(fd)
    assert isinstance(third, ArenaPool)
    for pool in (second, third):
        pool.close()


def test_the_slot_is_free_once_its_process_was_killed(fd: int) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        make(fd, incarnation="cd" * 16)
        os.write(writing, b"joined")
        signal.pause()
    assert os.read(reading, 6) == b"joined"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pool = make(fd)
    assert isinstance(pool, ArenaPool)
    assert pool.block_ids() == list(range(NUM_BLOCKS))
    assert pool.generations([BlockId(0)]) == [2]
    pool.close()
    os.close(reading)
    os.close(writing)


def test_every_slot_can_be_taken_and_one_more_gets_a_pool_of_its_own(fd: int) -> None:
    pools = [make(fd, f"w{number}", num_blocks=1) for number in range(256)]
    assert [type(pool) for pool in pools] == [ArenaPool] * 255 + [KvPool]
    slots = {pool.ownership.slot for pool in pools[:255]}
    assert slots == set(range(1, 256))
    for pool in pools:
        pool.close()


def test_what_is_no_arena_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    for content in (b"", b"x" * 4096, bytes(4096)):
        path.write_bytes(content)
        with path.open("rb+") as file, pytest.raises(NoArena):
            Arena.open(file.fileno(), LAYOUT, 1 << 20)
    with pytest.raises(NoArena):
        Arena.open(1_000_000, LAYOUT, 1 << 20)


def test_nobody_can_cut_an_arena_off(fd: int) -> None:
    make(fd).close()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)


def test_one_without_a_share_reads_a_workers_blocks(both: Scene) -> None:
    pool = both.prefill.pool
    pool.tensor()[2] = 9.0
    peer = open_peer_pool(pool.region(), LAYOUT)
    assert pool.generations([BlockId(0), BlockId(2)]) == [1, 1]
    assert are_words(peer.words, [0, 2], [1, 1])
    assert not any(are_words(peer.words, [6], [generation]) for generation in range(3))
    pool.retire([BlockId(2)])
    assert are_words(peer.words, [0, 2], [1, 2])
    flat = np.frombuffer(peer._arena.view, np.float32, 16, peer._arena.data_offset)
    assert not flat.flags.writeable
    assert peer.num_blocks == 12
    both.join("decode-1").pool.close()
    assert peer.num_blocks == 18


def test_a_share_that_is_not_there_cannot_be_read(both: Scene) -> None:
    region = both.prefill.pool.region()
    with pytest.raises(StaleIncarnation):
        open_peer_pool(msgspec.structs.replace(region, incarnation="ee" * 16), LAYOUT)
    with pytest.raises(StaleIncarnation):
        open_peer_pool(msgspec.structs.replace(region, incarnation=""), LAYOUT)
    with pytest.raises(PeerGone):
        open_peer_pool(region, replace(LAYOUT, block_size=8))
    for change in ({"fd": 1_000_000}, {"pid": -1}, {"pid": 2**22 + 1}, {"fd": 0}):
        with pytest.raises(PeerGone):
            open_peer_pool(msgspec.structs.replace(region, **change), LAYOUT)
    own_fd, header = both.prefill.pool.arena.fd, os.pread(both.fd, 96, 0)
    # A block's bytes, how many there can be, how many were granted.
    for place, number in ((72, 2**62), (80, 4), (88, 1000)):
        os.pwrite(own_fd, number.to_bytes(8, "little"), place)
        with pytest.raises(PeerGone):
            open_peer_pool(region, LAYOUT)
        os.pwrite(own_fd, header, 0)
    own = KvPool.create(LAYOUT, 3, Incarnation("ab" * 16))
    with pytest.raises(PeerGone):
        open_peer_pool(msgspec.structs.replace(own.region(), is_arena=True), LAYOUT)
    own.close()


def test_a_reader_outlives_a_worker_that_says_it_has_more_than_there_is(both: Scene) -> None:
    pool = both.prefill.pool
    pid = os.fork()
    if pid == 0:
        peer = open_peer_pool(pool.region(), LAYOUT)
        pool.arena._granted[0] = 100_000  # the file did not grow
        last = peer._arena.data_offset + peer.num_blocks * LAYOUT.block_bytes - 1
        os._exit(peer._arena.view[last] + peer.num_blocks)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 12
    assert pool.arena.num_granted == both.decode.pool.arena.num_granted == 12
    third = both.join("decode-1")  # and what is granted next is there
    assert third.pool.block_ids() == list(range(12, 18))
    third.pool.close()


def test_a_share_that_nobody_reads_any_more_keeps_no_descriptor(both: Scene) -> None:
    before = os.listdir("/proc/self/fd")
    peer = open_peer_pool(both.prefill.pool.region(), LAYOUT)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del peer
    assert os.listdir("/proc/self/fd") == before


def test_mapping_a_peers_blocks_survives_the_close_of_the_own_pool(
    both: Scene, monkeypatch
) -> None:
    third, peer = both.join("decode-1"), both.prefill.pool
    arena = third.pool.arena
    slot, incarnation_of = peer.ownership.slot, Arena.incarnation_of

    def close_then_ask(self: Arena, *args):
        monkeypatch.undo()
        third.pool.close()
        return incarnation_of(self, *args)

    monkeypatch.setattr(Arena, "incarnation_of", close_then_ask)
    arena.map_blocks_of(slot, peer.incarnation)
    assert arena.map_blocks_of(slot, peer.incarnation) is None


def test_generations_of_a_share_are_those_of_the_words(both: Scene) -> None:
    pool = both.prefill.pool
    assert pool.generations([BlockId(0), BlockId(5)]) == [1, 1]
    assert not pool.retire([BlockId(5)])
    assert pool.generations([BlockId(0), BlockId(5)]) == [1, 2]
    assert torch.equal(pool.tensor()[5], both.decode.pool.tensor()[5])
