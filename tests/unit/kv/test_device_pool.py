"""A GPU's pool and its mirror: what is where, and what of the mirror takes memory.

On a simulator of the CUDA runtime.
"""

import os
import threading
from contextlib import closing

import numpy as np
import pytest
from contract.fake_cuda import WHY_NOT, Steering, make_pool
from contract.numbered_blocks import bytes_of

from neuron_di.errors import BackendLost, LocalProtocolError, WorkerFailed
from neuron_di.kv import KvIdentity, KvLayout, block_digests, device_copies, head_bytes
from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# A block is two pages.
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=4, dtype="float32")
NUM_BLOCKS, SIZE, OWN = 12, LAYOUT.block_bytes, Incarnation("ab" * 16)
IDENTITY = KvIdentity(
    worker_id=WorkerId("w"),
    incarnation=OWN,
    request_id=RequestId("r"),
    attempt=0,
    layout_digest=LAYOUT.digest(),
)
IDS = [BlockId(n) for n in (7, 2, 3, 4, 9)]
NUM_TOKENS = 18
NO_MEMORY, INVALID_VALUE, LAUNCH_FAILURE = 2, 1, 719


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(device_copies, "STAGING_BYTES", 4 * SIZE)  # two blocks a half
    with closing(make_pool(LAYOUT, NUM_BLOCKS, OWN)) as pool:
        yield pool


def device_of(pool):
    return bytes_of(pool.device_memory()).reshape(NUM_BLOCKS, -1)


def mirror_of(pool):
    return bytes_of(pool.memory()).reshape(NUM_BLOCKS, -1)


def numbers(seed):
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, SIZE), np.uint8)


def taken_bytes(pool):
    pool.generations(pool.block_ids())  # their pages are there, then
    return os.fstat(pool.region().fd).st_blocks * 512 - head_bytes(NUM_BLOCKS)


def test_a_mirror_takes_no_memory_at_first(pool):
    assert taken_bytes(pool) == 0
    assert pool.view(BlockId(3)).nbytes == SIZE
    assert pool.tensor().shape == (NUM_BLOCKS, *LAYOUT.rank_shape)


def test_what_came_to_the_mirror_goes_to_the_device_and_its_pages_go(pool):
    kv = numbers(1)
    pool.begin_fill(IDS)
    mirror_of(pool)[IDS] = kv[IDS]
    assert taken_bytes(pool) == len(IDS) * SIZE
    assert not any(map(pool.is_on_device, IDS))
    pool.end_fill(IDS, NUM_TOKENS)
    assert all(map(pool.is_on_device, IDS))
    assert taken_bytes(pool) == 0
    expected = np.zeros_like(kv)
    expected[IDS] = kv[IDS]
    assert (device_of(pool) == expected).all()


def test_what_is_on_the_device_is_not_overwritten(pool):
    device_of(pool)[:] = kv = numbers(2)
    pool.begin_fill(IDS)
    pool.mark_on_device(IDS[1:])
    mirror_of(pool)[IDS[0]] = 5
    pool.end_fill(IDS, NUM_TOKENS)
    kv[IDS[0]] = 5
    assert (device_of(pool) == kv).all()


def test_digests_leave_the_mirror_alone_and_are_those_of_the_same_bytes_on_the_host(pool):
    device_of(pool)[:] = kv = numbers(3)
    pool.mark_on_device(IDS)
    found = pool.digests(IDS, IDENTITY, NUM_TOKENS, first_place=3)
    assert taken_bytes(pool) == 0
    pool.begin_fill(IDS)
    mirror_of(pool)[:] = kv
    device_of(pool)[:] = 0
    on_host = block_digests(pool.memory(), IDS, IDENTITY, LAYOUT, NUM_TOKENS, first_place=3)
    assert found == on_host
    assert pool.digests(IDS, IDENTITY, NUM_TOKENS, first_place=3) == on_host
    device_of(pool)[:] = kv
    pool.mark_on_device(IDS[1:3])  # some here, some there
    assert pool.digests(IDS, IDENTITY, NUM_TOKENS, first_place=3) == on_host


def test_digests_of_too_few_blocks_or_others_are_refused(pool):
    pool.mark_on_device(IDS)
    for ids in (IDS[1:], [*IDS[1:], BlockId(NUM_BLOCKS)], [BlockId(-1), *IDS[1:]]):
        with pytest.raises(LocalProtocolError):
            pool.digests(ids, IDENTITY, NUM_TOKENS)
    assert len(pool.digests(IDS, IDENTITY, NUM_TOKENS)) == len(IDS)  # nobody holds the staging


def test_blocks_come_to_the_host_and_go_from_there_when_they_are_given_up(pool):
    device_of(pool)[:] = kv = numbers(4)
    pool.mark_on_device(IDS)
    pool.to_host(IDS, NUM_TOKENS - 4)
    assert (mirror_of(pool)[IDS[:4]] == kv[IDS[:4]]).all()
    assert taken_bytes(pool) == 4 * SIZE
    before = pool.generations(IDS)
    assert pool.retire(IDS) is False
    assert taken_bytes(pool) == 0
    assert not any(map(pool.is_on_device, IDS))
    assert pool.generations(IDS) == [number + 1 for number in before]


def test_the_next_owners_kernels_make_what_is_left_in_the_mirror_go(pool):
    """Of a block that was given up while it was brought."""
    stream, steering, brought = pool.runtime.create_stream(), Steering.of(), []
    num_stuck = steering.waiting()
    steering.hold(stream)
    pool.runtime.fill(pool.device_address, 9, NUM_BLOCKS * SIZE, stream)
    pool.record(stream)
    pool.mark_on_device(IDS)
    bringing = threading.Thread(target=lambda: brought.extend(pool.to_host(IDS)))
    bringing.start()
    while steering.waiting() == num_stuck:
        bringing.join(0.001)
    pool.retire(IDS)
    steering.release()
    bringing.join()
    assert brought == IDS
    pool.drop_mirror(brought)
    assert taken_bytes(pool) == len(IDS) * SIZE
    pool.mark_on_device(IDS[:2])
    assert taken_bytes(pool) == (len(IDS) - 2) * SIZE
    pool.runtime.destroy_stream(stream)


def test_a_block_stays_in_the_mirror_until_all_who_asked_for_it_have_read_it(pool):
    device_of(pool)[:] = kv = numbers(6)
    pool.mark_on_device(IDS)
    first, second = pool.to_host(IDS[:3]), pool.to_host(IDS[1:])
    assert (first, second) == (IDS[:3], IDS[1:])
    pool.drop_mirror(first)
    assert (mirror_of(pool)[IDS[1:]] == kv[IDS[1:]]).all()
    assert taken_bytes(pool) == len(IDS[1:]) * SIZE
    pool.mark_on_device(IDS)  # once more, as of more tokens
    pool.drop_mirror(IDS[:1])  # nobody reads it any more
    assert (mirror_of(pool)[IDS[1:]] == kv[IDS[1:]]).all()
    pool.drop_mirror(second)
    assert taken_bytes(pool) == 0


def test_a_block_whose_bringing_failed_is_not_kept_for_who_asked(pool):
    pool.mark_on_device(IDS)
    Steering.of().fail("cudaEventRecord", NO_MEMORY)
    with pytest.raises(WorkerFailed):
        pool.to_host(IDS)
    pool.drop_mirror(pool.to_host(IDS))
    assert taken_bytes(pool) == 0


def test_what_is_being_filled_stays_whoever_drops_it(pool):
    pool.mark_on_device(IDS)
    brought = pool.to_host(IDS)
    pool.retire(IDS)
    pool.begin_fill(IDS)  # the next owner's
    mirror_of(pool)[IDS] = 5
    pool.drop_mirror(brought)
    pool.end_fill(IDS, NUM_TOKENS)
    assert (device_of(pool)[IDS] == 5).all()
    assert taken_bytes(pool) == 0


def test_what_a_begun_block_holds_stays_while_it_is_filled_further(pool, monkeypatch):
    device_of(pool)[:] = kv = numbers(7)
    pool.mark_on_device(IDS)
    begun, others, to_host = IDS[:1], pool.to_host(IDS[:1]), pool.to_host

    def to_host_while_another_send_ends(block_ids, num_tokens):
        brought = to_host(block_ids, num_tokens)
        pool.drop_mirror(others)
        return brought

    monkeypatch.setattr(pool, "to_host", to_host_while_another_send_ends)
    pool.begin_fill(begun, num_kept=1)
    assert not pool.is_on_device(begun[0])
    assert (mirror_of(pool)[begun] == kv[begun]).all()
    device_of(pool)[begun] = 0
    pool.end_fill(begun, 2)
    assert (device_of(pool)[begun] == kv[begun]).all()
    assert taken_bytes(pool) == 0


def test_a_mirror_that_is_read_without_asking_is_kept(pool):
    device_of(pool)[:] = kv = numbers(5)
    pool.keeps_mirror = True
    pool.mark_on_device(IDS)
    found = pool.digests(IDS, IDENTITY, NUM_TOKENS)
    assert (mirror_of(pool)[IDS] == kv[IDS]).all()
    assert found == block_digests(pool.memory(), IDS, IDENTITY, LAYOUT, NUM_TOKENS)
    pool.drop_mirror(IDS)
    assert (mirror_of(pool)[IDS] == kv[IDS]).all()


def test_copies_to_the_device_wait_for_the_kernels_that_were_recorded(pool):
    runtime, steering = pool.runtime, Steering.of()
    stream = runtime.create_stream()
    num_stuck = steering.waiting()
    steering.hold(stream)
    runtime.fill(pool.device_address, 9, NUM_BLOCKS * SIZE, stream)
    pool.record(stream)
    pool.begin_fill(IDS)
    mirror_of(pool)[IDS] = 1
    filling = threading.Thread(target=pool.end_fill, args=(IDS, NUM_TOKENS))
    filling.start()
    while steering.waiting() == num_stuck:
        filling.join(0.001)
    assert not any(map(pool.is_on_device, IDS))
    steering.release()
    filling.join()
    assert (device_of(pool)[IDS] == 1).all()
    assert (device_of(pool)[0] == 9).all()
    runtime.destroy_stream(stream)


@pytest.mark.parametrize("calls", ["to_host", "end_fill", "digests", "record"])
@pytest.mark.parametrize("code", [NO_MEMORY, INVALID_VALUE, LAUNCH_FAILURE])
def test_an_error_that_stays_loses_the_device_and_another_only_the_call(pool, calls, code):
    stream, told = pool.runtime.create_stream(), []
    pool.watch_loss(told.append)
    pool.begin_fill(IDS)
    if calls != "end_fill":
        pool.mark_on_device(IDS)

    def call():
        match calls:
            case "to_host":
                pool.to_host(IDS)
            case "end_fill":
                pool.end_fill(IDS, NUM_TOKENS)
            case "digests":
                pool.digests(IDS, IDENTITY, NUM_TOKENS)
            case "record":
                pool.record(stream)

    Steering.of().fail("cudaEventRecord", code)
    is_lost = code == LAUNCH_FAILURE
    with pytest.raises(BackendLost if is_lost else WorkerFailed):
        call()
    assert told == ([pool.lost] if is_lost else [])
    if is_lost:
        with pytest.raises(BackendLost):
            call()
    else:
        call()
    assert len(told) == int(is_lost)
    pool.runtime.destroy_stream(stream)


def test_a_reader_that_stops_leaves_the_pool_to_others(pool):
    pool.mark_on_device(IDS)
    blocks = pool.read_blocks(IDS)
    next(blocks)
    blocks.close()
    pool.to_host(IDS)


def test_a_closed_pool_is_neither_read_nor_filled(pool):
    pool.mark_on_device(IDS)
    pool.close()
    with pytest.raises(LocalProtocolError):
        pool.to_host(IDS)
    with pytest.raises(LocalProtocolError):
        pool.end_fill(IDS, NUM_TOKENS)
    pool.retire(IDS)


def test_a_pool_that_closes_is_not_copied_from_by_who_was_about_to(pool):
    pool.mark_on_device(IDS)
    copies = pool._copies
    about_to = copies.read(IDS)
    pool.close()
    with pytest.raises(LocalProtocolError):
        next(about_to)
    with pytest.raises(LocalProtocolError):
        copies.write(IDS, 0)


def test_a_pool_closes_after_the_copies_that_run(pool):
    pool.mark_on_device(IDS)
    blocks = pool.read_blocks(IDS)
    next(blocks)
    closing_it = threading.Thread(target=pool.close)
    closing_it.start()
    closing_it.join(0.05)
    assert closing_it.is_alive()
    assert len(list(blocks)) == len(IDS) - 1
    closing_it.join()
