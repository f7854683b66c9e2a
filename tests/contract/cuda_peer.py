"""A prefill worker's pool in GPU memory, in a process of its own, moved by orders.

    python -m contract.cuda_peer INCARNATION NUM_BLOCKS LAYOUT

Its GPU is simulated where $NEURON_DI_CUDART names the simulator. A word and its number a line;
answered by a line each, the first with the region. Blocks hold their number plus one at first.
"""

import base64
import os
import sys

import msgspec

from neuron_di.kv import KvLayout
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import BlockId, Incarnation
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

from .fake_cuda import Steering

SMALL = KvLayout(num_layers=1, num_kv_heads=1, head_dim=16, block_size=4, dtype="float32")
NUM_SMALL = 16


def main() -> None:
    incarnation, num_blocks, layout_text = sys.argv[1:]
    layout = msgspec.json.decode(layout_text, type=KvLayout)
    pool = DevicePool.create(layout, int(num_blocks), Incarnation(incarnation))
    runtime = pool.runtime
    stream = runtime.create_stream()
    for n in range(pool.num_blocks):
        address = pool.device_address + n * layout.block_bytes
        runtime.fill(address, (n + 1) % 256, layout.block_bytes, stream)
    runtime.synchronize(stream)
    engine = CudaIpcEngine(pool)
    _answer(
        base64.b64encode(msgspec.msgpack.encode(engine.local_region(Incarnation("any")))).decode()
    )
    for line in sys.stdin:
        order, number = line.split()
        match order:
            case "hold":  # a kernel that does not end
                Steering(os.environ[PATH_VARIABLE]).hold(stream)
            case "release":
                Steering(os.environ[PATH_VARIABLE]).release()
                runtime.synchronize(stream)
            case "fill":  # a kernel that writes all blocks
                runtime.fill(pool.device_address, int(number), pool.memory().num_bytes, stream)
            case "record":
                pool.record(stream)
            case "retire":
                pool.retire([BlockId(int(number))])
        _answer("done")


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
