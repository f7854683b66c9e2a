"""cuda_ipc on a real GPU, between two processes. Skipped where there is none.

With NEURON_DI_CUDART on the simulator's library it runs on that instead.
"""

import os
from contextlib import closing

import numpy as np
import pytest
from contract.cuda_pair import PEER, cuda_peer, ended

from neuron_di.errors import ConfigError, KvChanged, NeuronDiError
from neuron_di.kv import KvLayout, Memory, whole_block_runs
from neuron_di.kv.device_pool import DevicePool, open_runtime
from neuron_di.transfer import BlockSource, Receive
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.cuda_runtime import CudaError

LAYOUT = KvLayout(num_layers=16, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 256  # of 1 MiB
NUM_LISTS = int(os.environ.get("LISTS", "200"))


def why_not():
    try:
        num_devices = open_runtime().num_devices()
    except (ConfigError, CudaError) as error:
        return f"no CUDA device: {error}"
    return None if num_devices else "no CUDA device"


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def pool():
    with closing(DevicePool.create(LAYOUT, NUM_BLOCKS, Incarnation("own"))) as pool:
        yield pool


@pytest.fixture
def engine(pool):
    stream = pool.runtime.create_stream()
    pool.runtime.fill(pool.device_address, 0, pool.memory().num_bytes, stream)
    pool.runtime.synchronize(stream)
    pool.runtime.destroy_stream(stream)
    with closing(CudaIpcEngine(pool)) as engine:
        yield engine


@pytest.fixture
def peer():
    with cuda_peer(PEER, LAYOUT, NUM_BLOCKS, is_simulated=False) as peer:
        yield peer


def receive_of(memory, source_ids, block_ids):
    return Receive(
        tag=0,
        runs=whole_block_runs(LAYOUT, source_ids, block_ids),
        memory=memory,
        source=BlockSource(source_ids, [0] * len(source_ids)),
    )


def move(engine, pool, source_ids, block_ids):
    receive = receive_of(pool.memory(), source_ids, block_ids)
    return ended(engine.post_receive(PEER, receive)).error() or engine.commit(PEER, receive)


def values_of(pool):
    """What all bytes of each block are; an error where they differ."""
    values = []
    for block in pool.read_blocks([BlockId(n) for n in range(NUM_BLOCKS)]):
        found = np.frombuffer(block, np.uint8)
        assert (found == found[0]).all()
        values.append(int(found[0]))
    return values


def test_scattered_blocks_arrive_whole_and_no_other_changes(engine, pool, peer):
    engine.connect(PEER, peer.region, LAYOUT)
    rng = np.random.default_rng(1)
    source_ids, block_ids = (rng.permutation(NUM_BLOCKS)[:100].tolist() for _ in range(2))
    assert move(engine, pool, source_ids, block_ids) is None
    expected = [0] * NUM_BLOCKS
    for source, block_id in zip(source_ids, block_ids, strict=True):
        expected[block_id] = (source + 1) % 256
    assert values_of(pool) == expected


def test_one_long_run_and_many_short_ones_arrive_whole(engine, pool, peer):
    engine.connect(PEER, peer.region, LAYOUT)
    source_ids = list(range(NUM_BLOCKS))
    block_ids = [*range(31, -1, -1), *range(32, NUM_BLOCKS)]
    assert move(engine, pool, source_ids, block_ids) is None
    expected = np.zeros(NUM_BLOCKS, np.int64)
    expected[block_ids] = (np.array(source_ids) + 1) % 256
    assert values_of(pool) == expected.tolist()


def test_bytes_are_those_that_the_last_recorded_kernels_wrote(engine, pool, peer):
    """The peer answers as soon as its kernels are launched: most are not done by then."""
    engine.connect(PEER, peer.region, LAYOUT)
    every = list(range(NUM_BLOCKS))
    for value in range(1, 33):
        for kernels in (value + 100, value + 50, value):
            peer.order("fill", number=kernels)
        peer.order("record")
        assert move(engine, pool, every, every) is None
        assert values_of(pool) == [value] * NUM_BLOCKS


@pytest.mark.parametrize("is_pinned", [True, False])
def test_landing_memory_of_the_host_is_filled(engine, pool, peer, monkeypatch, is_pinned):
    landing = np.zeros(8 * LAYOUT.block_bytes, np.uint8)
    if not is_pinned:
        monkeypatch.setattr(pool.runtime, "pin", _refuse)
    memory = Memory(landing.ctypes.data, len(landing))
    engine.register(memory)
    engine.connect(PEER, peer.region, LAYOUT)
    receive = receive_of(memory, [9, 200, 3], [0, 5, 6])
    assert ended(engine.post_receive(PEER, receive)).error() is None
    blocks = landing.reshape(8, -1)
    assert [int(block.max()) for block in blocks] == [10, 0, 0, 0, 0, 201, 4, 0]
    assert [int(block.min()) for block in blocks] == [10, 0, 0, 0, 0, 201, 4, 0]
    engine.close()


def test_blocks_that_were_given_up_are_not_taken(engine, pool, peer):
    engine.connect(PEER, peer.region, LAYOUT)
    peer.order("retire", number=4)
    assert isinstance(move(engine, pool, [3, 4], [0, 1]), KvChanged)
    assert move(engine, pool, [3, 5], [0, 1]) is None


def test_a_peer_that_is_killed_ends_its_receives_and_its_successor_is_read(engine, pool, peer):
    engine.connect(PEER, peer.region, LAYOUT)
    every = list(range(NUM_BLOCKS))
    receives = [receive_of(pool.memory(), every, every) for _ in range(8)]
    tokens = [engine.post_receive(PEER, receive) for receive in receives]
    peer.kill()
    for token in tokens:
        error = ended(token).error()
        assert error is None or isinstance(error, NeuronDiError)
    engine.disconnect(PEER)
    with cuda_peer(PEER, LAYOUT, NUM_BLOCKS, is_simulated=False) as successor:
        engine.connect(PEER, successor.region, LAYOUT)
        assert move(engine, pool, [1], [2]) is None
        assert values_of(pool)[2] == 2


def test_both_ends_in_one_process_need_no_handle(engine, pool):
    with (
        closing(DevicePool.create(LAYOUT, NUM_BLOCKS, PEER)) as other,
        closing(CudaIpcEngine(other)) as there,
    ):
        engine.connect(PEER, there.local_region(PEER), LAYOUT)
        stream = other.runtime.create_stream()
        other.runtime.fill(other.device_address, 77, other.memory().num_bytes, stream)
        other.record(stream)
        assert move(engine, pool, [0], [255]) is None
        assert values_of(pool)[255] == 77
        engine.disconnect(PEER)
        other.runtime.synchronize(stream)
        other.runtime.destroy_stream(stream)


def _refuse(*_):
    raise CudaError("cudaHostRegister", 801, "cudaErrorNotSupported")


def test_the_device_has_a_uuid(pool):
    assert any(pool.runtime.device_uuid(0))
    assert len(pool.runtime.device_uuid(0)) == 16
    assert os.getpid() == pool.region().pid


def test_random_lists_of_blocks_arrive_whole():
    """Compared with numpy: every block has its source's bytes, or keeps its own."""
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16")
    count, rng = 512, np.random.default_rng(2)
    with (
        closing(DevicePool.create(layout, count, Incarnation("own"))) as small,
        closing(CudaIpcEngine(small)) as reader,
        cuda_peer(PEER, layout, count, is_simulated=False) as peer,
    ):
        reader.connect(PEER, peer.region, layout)
        expected = np.zeros(count, np.uint8)
        every = [BlockId(n) for n in range(count)]
        small.mark_on_device(every)
        for number in range(NUM_LISTS):
            length = int(rng.integers(1, count + 1))
            source_ids, block_ids = (rng.permutation(count)[:length] for _ in range(2))
            if number % 3 == 0:  # neighbours at both ends: fewer and longer runs
                source_ids, block_ids = np.sort(source_ids), np.sort(block_ids)
            runs = whole_block_runs(layout, source_ids.tolist(), block_ids.tolist())
            source = BlockSource(source_ids.tolist(), [0] * length)
            receive = Receive(tag=number, runs=runs, memory=small.memory(), source=source)
            assert ended(reader.post_receive(PEER, receive)).error() is None
            assert reader.commit(PEER, receive) is None
            expected[block_ids] = (source_ids + 1) % 256
            found = np.stack([np.frombuffer(one, np.uint8) for one in small.read_blocks(every)])
            assert (found == expected[:, None]).all(), f"list {number} arrived wrong"
