"""Receives that must not start: ids and sizes come from other processes, and may be anything."""

from dataclasses import replace

import numpy as np
import pytest

from neuron_di.errors import KvError, PeerError, RemoteProtocolError
from neuron_di.kv import Memory, Runs
from neuron_di.transfer import BlockSource

from .engine_kinds import KINDS
from .transfer_pair import LAYOUT, NUM_BLOCKS, UNTOUCHED, WAIT_S, connected_pair, runs_of

BLOCK = LAYOUT.block_bytes
POOL = NUM_BLOCKS * BLOCK
MAX = 2**63 - 1

BAD_RUNS = {
    "from before the pool": runs_of([0, -1], [0, BLOCK], [BLOCK, BLOCK]),
    "from far before the pool": runs_of([-(2**63)], [0], [BLOCK]),
    "from behind the pool": runs_of([POOL], [0], [BLOCK]),
    "from the pool's end on": runs_of([POOL - BLOCK + 1], [0], [BLOCK]),
    "from 2**63 - 1": runs_of([MAX], [0], [BLOCK]),
    "to before the pool": runs_of([0, 0], [0, -BLOCK], [BLOCK, BLOCK]),
    "to behind the pool": runs_of([0], [POOL], [1]),
    "over the pool's end": runs_of([0], [POOL - 1], [2]),
    "to 2**63 - 1": runs_of([0], [MAX], [1]),
    "2**63 - 1 bytes": runs_of([0], [0], [MAX]),
    "an end beyond 63 bits": runs_of([MAX - 1], [0], [MAX - 1]),
    "an end beyond 63 bits, of the destination": runs_of([0], [MAX - 1], [MAX - 1]),
    "a negative length": runs_of([0, BLOCK], [0, BLOCK], [BLOCK, -1]),
    "the most negative length": runs_of([0], [0], [-(2**63)]),
    "no bytes": runs_of([0], [0], [0]),
    "nothing": runs_of([], [], []),
    "the same bytes twice": runs_of([0, BLOCK], [0, 0], [BLOCK, BLOCK]),
    "overlapping by a byte": runs_of([0, BLOCK], [BLOCK, 1], [BLOCK, BLOCK]),
    "overlapping, far apart in the list": runs_of(
        [0, 1, 2], [3 * BLOCK, 0, 2 * BLOCK], [1, 1, BLOCK + 1]
    ),
    "one inside of the other": runs_of([0, 0], [0, 10], [BLOCK, 10]),
    "fewer sources": runs_of([0], [0, BLOCK], [BLOCK, BLOCK]),
    "fewer destinations": runs_of([0, BLOCK], [0], [BLOCK, BLOCK]),
    "fewer lengths": runs_of([0, BLOCK], [0, BLOCK], [BLOCK]),
    "other numbers": Runs(
        source_offsets=np.zeros(1),
        destination_offsets=np.zeros(1, np.int64),
        lengths=np.full(1, 8, np.int64),
    ),
    "unsigned numbers": Runs(
        source_offsets=np.full(1, 2**64 - 1, np.uint64),
        destination_offsets=np.zeros(1, np.int64),
        lengths=np.full(1, 8, np.int64),
    ),
    "several tensors": replace(runs_of([0], [0], [BLOCK]), source_tensors=np.ones(1, np.int64)),
}


@pytest.fixture(scope="module", params=[one.name for one in KINDS.values() if not one.is_variant])
def connected(request):
    if KINDS[request.param].why_not is not None:
        pytest.skip(KINDS[request.param].why_not)
    with connected_pair(request.param) as pair:
        yield pair


@pytest.fixture
def pair(connected):
    """One pair serves all of these tests: a refusal changes nothing."""
    connected.received[:] = UNTOUCHED
    return connected


def check_refused(pair, receive):
    """Without a send, nothing is touched, and the engine goes on."""
    outcome = pair.post(receive)
    assert outcome.has_ended(WAIT_S if pair.kind.hands_over else 0.0)
    assert isinstance(outcome.error(), RemoteProtocolError)
    assert outcome.token.kv_bytes == 0
    assert (pair.received == UNTOUCHED).all()
    outcome = pair.move([3], [4])
    assert outcome.error() is None
    assert (pair.received[4] == pair.sent[3]).all()


@pytest.mark.parametrize("runs", BAD_RUNS.values(), ids=BAD_RUNS)
def test_runs_outside_of_what_was_registered_are_refused(pair, runs):
    receive = replace(pair.receive_of([0], [0]), runs=runs)
    if not pair.kind.lands:  # it goes by the blocks: without them no run is taken
        receive = replace(receive, block_ids=())
    check_refused(pair, receive)


@pytest.mark.parametrize(
    "block_id", [-1, "next", 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), None]
)
def test_a_source_outside_of_the_peers_pool_is_refused(pair, block_id):
    promised = pair.sent.promise([0, 1])
    if block_id == "next":
        block_id = 2 * NUM_BLOCKS if pair.kind.hands_over else NUM_BLOCKS
    source = replace(promised, block_ids=[promised.block_ids[0], block_id])
    check_refused(pair, pair.receive_of(source, [0, 1]))


@pytest.mark.parametrize(("block_ids", "generations"), [([0, 1], [0]), ([0], [0, 0]), ([0], [])])
def test_another_number_of_generations_is_refused(pair, block_ids, generations):
    source = BlockSource(pair.sent.ids_of(block_ids), generations)
    check_refused(pair, pair.receive_of(source, block_ids))


def test_memory_that_was_not_registered_is_refused(pair):
    receive, pool = pair.receive_of([0], [0]), pair.decode_pool.memory()
    other = np.full(BLOCK, UNTOUCHED, np.uint8)
    for memory in (
        Memory(other.ctypes.data, BLOCK),
        Memory(pool.address - 1, BLOCK),
        Memory(pool.address, pool.num_bytes + 1),
        Memory(pool.address + pool.num_bytes, BLOCK),
        Memory(pool.address, 0),
        Memory(0, 2**63 - 1),
        Memory(pool.address, -1),
    ):
        check_refused(pair, replace(receive, memory=memory))
        pair.received[:] = UNTOUCHED
    assert (other == UNTOUCHED).all()


def test_a_part_of_registered_memory_is_the_limit_of_its_receive(pair):
    """Two transfers have a room each in one landing memory."""
    pool = pair.decode_pool.memory()
    room = Memory(pool.address + BLOCK, BLOCK)
    receive = replace(pair.receive_of([0], [0]), memory=room)
    if not pair.kind.lands:
        check_refused(pair, receive)
        return
    outcome = pair.transfer(receive)
    assert outcome.error() is None
    assert (pair.received[1] == pair.sent[0]).all()
    pair.received[1] = UNTOUCHED
    check_refused(pair, replace(receive, runs=runs_of([0], [1], [BLOCK]), tag=receive.tag + 1000))


def test_a_region_of_another_engine_is_no_connection(pair):
    region = object()
    for connect in (pair.decode.connect, pair.prefill.connect):
        with pytest.raises((PeerError, KvError)):
            connect("e0" * 16, region, LAYOUT)
    assert pair.move([0], [0]).error() is None
