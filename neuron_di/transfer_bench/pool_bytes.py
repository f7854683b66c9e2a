"""What lies in the blocks of any pool: filled, cleared, digested, wherever its memory is."""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from xxhash import xxh3_128

from neuron_di.errors import BackendLost
from neuron_di.kv import KvPool
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer_bench import block_bytes
from neuron_di.types import BlockId
from neuron_di_bindings.cuda_runtime import CudaError

_PIECE_BYTES = 8 << 20


def fill_pool(pool: KvPool) -> None:
    """Random bytes in all blocks, no two places alike. BackendLost where a device fails."""
    if not isinstance(pool, DevicePool):
        block_bytes.fill(pool.memory(), pool.block_ids(), pool.layout.block_bytes)
        return
    memory = pool.device_memory()
    random = np.random.default_rng()
    with stream_of(pool) as stream:
        for start in range(0, memory.num_bytes, _PIECE_BYTES):
            piece = random.bytes(min(_PIECE_BYTES, memory.num_bytes - start))
            source = np.frombuffer(piece, np.uint8)
            pool.runtime.copy(memory.address + start, source.ctypes.data, len(piece), stream)
            pool.runtime.synchronize(stream)


def clear_blocks(pool: KvPool, block_ids: Sequence[int]) -> None:
    """Zeros: what is right afterwards was moved there. BackendLost where a device fails."""
    size = pool.layout.block_bytes
    if not isinstance(pool, DevicePool):
        block_bytes.clear(pool.memory(), block_ids, size)
        return
    with stream_of(pool) as stream:
        for block_id in block_ids:
            pool.runtime.fill(pool.device_address + block_id * size, 0, size, stream)


def digest_blocks(pool: KvPool, block_ids: Sequence[int]) -> bytes:
    """Of all these blocks' bytes, in this order. BackendLost where a device fails."""
    if not isinstance(pool, DevicePool):
        return block_bytes.digest(pool.memory(), block_ids, pool.layout.block_bytes)
    state = xxh3_128()
    with device_errors():
        for block in pool.read_blocks([BlockId(block_id) for block_id in block_ids]):
            state.update(block)
    return state.digest()


@contextlib.contextmanager
def stream_of(pool: DevicePool) -> Iterator[int]:
    """A stream on the pool's device. All that was launched on it is over behind the block."""
    runtime = pool.runtime
    with device_errors(), runtime.on_device(pool.device):
        stream = runtime.create_stream()
        try:
            yield stream
            runtime.synchronize(stream)
        finally:
            runtime.destroy_stream(stream)


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """A device that fails, as an error of ours."""
    try:
        yield
    except CudaError as error:
        raise BackendLost(f"the GPU failed: {error}") from None
