"""A decode worker's pool in GPU memory, simulated or real, and a peer's in another process."""

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvLayout, Memory, whole_block_runs
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer import BlockSource, Receive, TransferToken
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import CudaIpcRegion
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

from .cuda_peer import NUM_SMALL, SMALL
from .fake_cuda import VERSION, Steering, fake_runtime, library_path
from .numbered_blocks import bytes_of

PEER = Incarnation("peer")
UNTOUCHED = 0xEE
WAIT_S = 30.0


class CudaPeer:
    """The other process, seen from the test's."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        region = base64.b64decode(process.stdout.readline())
        self.region = msgspec.msgpack.decode(region, type=CudaIpcRegion)

    def order(self, *orders: str, number: int = 0) -> None:
        for order in orders:
            self._process.stdin.write(f"{order} {number}\n")
            self._process.stdin.flush()
            if self._process.stdout.readline() != "done\n":
                raise EOFError("the peer process ended")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def cuda_peer(
    incarnation: Incarnation = PEER,
    layout: KvLayout = SMALL,
    num_blocks: int = NUM_SMALL,
    *,
    is_simulated: bool = True,
) -> Iterator[CudaPeer]:
    """Killed at the end, however it is."""
    program = [sys.executable, "-m", "contract.cuda_peer", incarnation, str(num_blocks)]
    program.append(msgspec.json.encode(layout).decode())
    environment = os.environ | ({PATH_VARIABLE: str(library_path())} if is_simulated else {})
    with subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    ) as process:
        try:
            yield CudaPeer(process)
        finally:
            process.kill()


class CudaDecode:
    """On a simulated GPU. Each byte of its pool is UNTOUCHED at first."""

    def __init__(self, pool: DevicePool, engine: CudaIpcEngine, steering: Steering) -> None:
        self.pool = pool
        self.engine = engine
        self.steering = steering
        self.received = bytes_of(pool.device_memory()).reshape(NUM_SMALL, -1)
        self.received[:] = UNTOUCHED
        self._num_receives = 0
        self._num_stuck = steering.waiting()  # of peers that were killed

    def connect(self, region: CudaIpcRegion) -> None:
        self.engine.connect(PEER, region, SMALL)

    def receive_of(
        self, source_ids: Sequence[int], block_ids: Sequence[int], memory: Memory | None = None
    ) -> Receive:
        self._num_receives += 1
        return Receive(
            tag=self._num_receives,
            runs=whole_block_runs(SMALL, source_ids, block_ids),
            memory=self.pool.memory() if memory is None else memory,
            source=BlockSource(source_ids, [0] * len(source_ids)),
            block_ids=[BlockId(n) for n in block_ids] if memory is None else (),
        )

    def post(self, receive: Receive) -> TransferToken:
        return self.engine.post_receive(PEER, receive)

    def move(self, source_ids: Sequence[int], block_ids: Sequence[int]) -> NeuronDiError | None:
        receive = self.receive_of(source_ids, block_ids)
        return ended(self.post(receive)).error() or self.engine.commit(PEER, receive)

    def until_waiting(self) -> None:
        """The stream of a receive stands still for an event."""
        deadline, pause = Deadline.after(WAIT_S), threading.Event()
        while self.steering.waiting() != self._num_stuck + 1:
            if deadline.has_passed():
                raise TimeoutError("no stream waits")
            pause.wait(0.001)

    def values(self) -> NDArray[np.uint8]:
        """The first byte of every block."""
        return self.received[:, 0].copy()


@contextmanager
def cuda_decode(
    *, version: int = VERSION, device: int = 0, timeout_s: float = WAIT_S
) -> Iterator[CudaDecode]:
    with ExitStack() as end:
        runtime = fake_runtime(version)
        pool = DevicePool.create(
            SMALL, NUM_SMALL, Incarnation("own"), runtime=runtime, device=device
        )
        end.enter_context(closing(pool))
        engine = end.enter_context(closing(CudaIpcEngine(pool, timeout_s=timeout_s)))
        yield CudaDecode(pool, engine, Steering.of(version))


def ended(token: TransferToken) -> TransferToken:
    is_over = threading.Event()
    token.on_done(lambda _: is_over.set())
    if not is_over.wait(WAIT_S):
        raise TimeoutError("the receive did not end")
    return token
