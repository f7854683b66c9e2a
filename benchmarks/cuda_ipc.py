"""cuda_ipc between two processes on one GPU, beside a device-to-device copy of the same bytes.

    python -m benchmarks.cuda_ipc

One table: gigabytes per second of both, and their ratio, the median of interleaved rounds. The copy
moves the same runs between two pools of one process, in as many calls. Needs an NVIDIA GPU with
5 GiB free. A row's bytes are verified once, on the host.
"""

import statistics
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import dataclass

import msgspec
import numpy as np

from neuron_di.clock import now_s
from neuron_di.kv import KvLayout, Runs, whole_block_runs
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer import BlockSource, Receive
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import CudaIpcRegion

_GIB, _MIB, _KIB = 1 << 30, 1 << 20, 1 << 10
_POOL_BYTES = _GIB
_ROUNDS = 15
_PEER = Incarnation("peer")
# Runs and the bytes of each; several runs are scattered blocks.
_CASES = (
    (1, 64 * _KIB),
    (1, _MIB),
    (1, 16 * _MIB),
    (1, 256 * _MIB),
    (1, _GIB),
    (256, 64 * _KIB),
    (4096, 16 * _KIB),
    (4096, 64 * _KIB),
    (16384, 4 * _KIB),
)
_region_decoder = msgspec.msgpack.Decoder(CudaIpcRegion)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: medians in seconds, and the median of the rounds' ratios of speeds."""

    num_blocks: int
    block_bytes: int
    copy_s: float
    ipc_s: float
    ratio: float

    @property
    def size(self) -> str:
        return f"{self.num_blocks} x {self.block_bytes // _KIB} KiB"

    @property
    def gigabytes(self) -> float:
        return self.num_blocks * self.block_bytes / 1e9


def _pool(incarnation: Incarnation, block_bytes: int, pool_bytes: int) -> DevicePool:
    layout = KvLayout(
        num_layers=1, num_kv_heads=1, head_dim=block_bytes // 4, block_size=1, dtype="bfloat16"
    )
    return DevicePool.create(layout, pool_bytes // block_bytes, incarnation)


def _fill(pool: DevicePool) -> None:
    """Each block with a byte of its own number."""
    stream, size = pool.runtime.create_stream(), pool.layout.block_bytes
    for n in range(pool.num_blocks):
        value = (n * 7 + 1) % 256
        pool.runtime.fill(pool.device_address + n * size, value, size, stream)
    pool.runtime.synchronize(stream)
    pool.runtime.destroy_stream(stream)
    pool.mark_on_device([BlockId(n) for n in range(pool.num_blocks)])


def _serve(block_bytes: int, pool_bytes: int) -> None:
    with (
        closing(_pool(_PEER, block_bytes, pool_bytes)) as pool,
        closing(CudaIpcEngine(pool)) as engine,
    ):
        _fill(pool)
        sys.stdout.write(msgspec.msgpack.encode(engine.local_region(_PEER)).hex() + "\n")
        sys.stdout.flush()
        sys.stdin.read()


def _plain_copy_s(pool: DevicePool, source: DevicePool, runs: Runs, stream: int) -> float:
    """The same runs within this process."""
    runtime = pool.runtime
    rows = (
        (runs.destination_offsets + pool.device_address).astype(np.uint64),
        (runs.source_offsets + source.device_address).astype(np.uint64),
        runs.lengths.astype(np.uint64),
    )
    start_s = now_s()
    runtime.copy_runs(*rows, stream)
    runtime.synchronize(stream)
    return now_s() - start_s


def _transfer_s(engine: CudaIpcEngine, receive: Receive) -> float:
    is_over, start_s = threading.Event(), now_s()
    token = engine.post_receive(_PEER, receive)
    token.on_done(lambda _: is_over.set())
    is_over.wait()
    error = token.error()
    if error is not None:
        raise error
    return now_s() - start_s


def measure_case(
    num_blocks: int, block_bytes: int, *, pool_bytes: int = _POOL_BYTES, num_rounds: int = _ROUNDS
) -> Row:
    """With a second process of its own. Raises where a transfer fails or brings other bytes."""
    command = [sys.executable, "-m", "benchmarks.cuda_ipc", str(block_bytes), str(pool_bytes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None, "it was asked for"
        try:
            region = _region_decoder.decode(bytes.fromhex(process.stdout.readline()))
            return _measure(region, num_blocks, block_bytes, pool_bytes, num_rounds)
        finally:
            process.communicate("")


def _measure(
    region: CudaIpcRegion, num_blocks: int, block_bytes: int, pool_bytes: int, num_rounds: int
) -> Row:
    rng = np.random.default_rng(1)
    with (
        closing(_pool(Incarnation("own"), block_bytes, pool_bytes)) as pool,
        closing(_pool(Incarnation("plain"), block_bytes, pool_bytes)) as source,
        closing(CudaIpcEngine(pool)) as engine,
    ):
        engine.connect(_PEER, region, pool.layout)
        ids = [rng.permutation(pool.num_blocks)[:num_blocks].tolist() for _ in range(2)]
        runs = whole_block_runs(pool.layout, *ids)
        receive = Receive(
            tag=0, runs=runs, memory=pool.memory(), source=BlockSource(ids[0], [0] * num_blocks)
        )
        stream = pool.runtime.create_stream()
        times = [
            (_plain_copy_s(pool, source, runs, stream), _transfer_s(engine, receive))
            for _ in range(num_rounds)
        ]
        found = pool.read_blocks([BlockId(n) for n in ids[1]])
        for block_id, block in zip(ids[0], found, strict=True):
            if bytes(block[:64]) != bytes([(block_id * 7 + 1) % 256]) * 64:
                raise AssertionError(f"block {block_id} arrived wrong")
        pool.runtime.destroy_stream(stream)
    plain, ours = (statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(plain / ours for plain, ours in times)
    return Row(num_blocks, block_bytes, plain, ours, ratio)


def main() -> None:
    if len(sys.argv) > 1:
        _serve(*map(int, sys.argv[1:]))
        return
    print(f"{'bytes':>20} {'copy GB/s':>9} {'ipc GB/s':>9} {'ratio':>6}")
    for num_blocks, block_bytes in _CASES:
        row = measure_case(num_blocks, block_bytes)
        copy, ipc = row.gigabytes / row.copy_s, row.gigabytes / row.ipc_s
        print(f"{row.size:>20} {copy:9.1f} {ipc:9.1f} {row.ratio:6.2f}")


if __name__ == "__main__":
    main()
