"""The transfer engine of two processes on one NVIDIA host: from GPU memory to GPU memory.

The decode worker opens prefill's pool by its CUDA IPC handle and copies out of it, with its
device's copy engines or a kernel, in the order that interprocess events give. Neither processor
touches a byte, and prefill's does nothing at all but `DevicePool.record`. Receives into host memory
that was registered (KV of another layout) cross the bus, straight into it.

Run on one GPU so far (docs/cuda.md); tests/device does it again.

Next: neuron_di/transfer/cuda_reader.py, neuron_di/kv/device_pool.py
"""

import contextlib
import threading

from neuron_di.errors import ConfigError, KvChanged, NeuronDiError, PeerGone, PeerRefused
from neuron_di.kv import KvLayout, KvPool, Memory
from neuron_di.kv.device_memory import MARK_BYTES
from neuron_di.kv.device_pool import DevicePool
from neuron_di.obs import get_logger
from neuron_di.transfer.cuda_reader import CudaReader
from neuron_di.transfer.cuda_run_copier import CudaRunCopiers
from neuron_di.transfer.domain import this_machine
from neuron_di.transfer.peer_readers import Readers
from neuron_di.transfer.run_bounds import OwnMemories
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import CudaIpcRegion, Region
from neuron_di_bindings.cuda_runtime import CudaError

_log = get_logger(__name__)

TRANSFER_TIMEOUT_S = 30.0  # for a peer's kernels; copies have no limit, and wait for nobody


class CudaIpcEngine:
    """Owns a reader per peer and what it pinned; borrows this worker's pool.

    ConfigError where the pool is not in GPU memory that others can open. To be closed before the
    memory that was registered, and before the pool.
    """

    name = "cuda_ipc"
    is_one_sided = True

    def __init__(self, pool: KvPool, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        if not isinstance(pool, DevicePool):
            raise ConfigError("--transfer cuda_ipc is for KV in the memory of an NVIDIA GPU")
        if pool.not_shared:
            raise ConfigError(f"--transfer cuda_ipc: {pool.not_shared}")
        self._pool = pool
        self._runtime = pool.runtime
        self._timeout_s = timeout_s
        self._copiers = CudaRunCopiers(pool.runtime, pool.device)
        self._memories = OwnMemories(pool.memory())
        self._pinned: list[int] = []
        self._unpinned: list[Memory] = []
        self._lock = threading.Lock()
        self._readers: Readers[CudaReader] = Readers()
        self._is_closed = False
        self._region = CudaIpcRegion(
            memory_handle=pool.memory_handle,
            event_handle=pool.event_handle,
            device_uuid=_uuid_of(pool),
            host=this_machine(),
            offset=MARK_BYTES,
            num_bytes=pool.memory().num_bytes,
            head=pool.region(),
            nonce=pool.nonce,
        )

    def local_region(self, peer: Incarnation) -> Region:  # noqa: ARG002
        return self._region

    def register(self, memory: Memory) -> None:
        runtime = self._runtime
        with self._lock, runtime.on_device(self._pool.device):
            if self._is_closed:
                return  # nobody would unpin it
            if runtime.memory_kind(memory.address) == "unregistered":
                try:
                    runtime.pin(memory.address, memory.num_bytes)
                    self._pinned.append(memory.address)
                except CudaError as error:  # copies go by way of the driver's own buffers
                    self._unpinned.append(memory)
                    _log.warning("landing_not_pinned", num_bytes=memory.num_bytes, error=str(error))
        self._memories.add(memory)

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        if not isinstance(region, CudaIpcRegion):
            raise PeerRefused("the peer's pool is not in GPU memory of this host")
        with self._readers.connecting():
            reader = CudaReader(
                self._pool, peer, region, layout, copiers=self._copiers, timeout_s=self._timeout_s
            )
            try:
                reader.connect()
            except BaseException:
                self._readers.end(reader)
                raise
            self._readers.put(peer, reader)

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Nothing to do: the pool is exported."""

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:  # noqa: ARG002
        return TransferToken.over()  # the reader does all the work

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        reader = self._readers.get(peer)
        if reader is None:
            return TransferToken.over(PeerGone("no connection to the prefill worker's pool"))
        refusal = self._memories.refusal(
            receive, peer_bytes=reader.num_bytes, peer_blocks=reader.num_blocks
        )
        if refusal is not None:
            return TransferToken.over(refusal)
        token = TransferToken()
        start = receive.memory.address
        is_batched = all(not 0 <= start - one.address < one.num_bytes for one in self._unpinned)
        reader.post(receive, token, is_batched=is_batched)
        return token

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """Nothing to do: a copy waits for the peer's kernels, and no longer than its deadline."""

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: the copies' event has ended, so what is launched from now on sees them."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        reader = self._readers.get(peer)
        if reader is None:
            return PeerGone("the prefill worker was disconnected before its blocks were taken")
        # After the copy: a block given up at any time before shows a newer generation.
        if not reader.has_kept(receive.source):
            return KvChanged("the prefill worker gave the blocks up while they were read")
        return None

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        return self.commit(peer, receive)  # which only looks

    def disconnect(self, peer: Incarnation) -> None:
        self._readers.drop(peer)

    def close(self) -> None:
        self._readers.close()
        with self._lock:
            self._is_closed = True
            pinned, self._pinned = self._pinned, []
        with contextlib.suppress(CudaError), self._runtime.on_device(self._pool.device):
            self._copiers.close()
        for address in pinned:
            with contextlib.suppress(CudaError), self._runtime.on_device(self._pool.device):
                self._runtime.unpin(address)  # fails where the device has failed


def _uuid_of(pool: DevicePool) -> bytes:
    try:
        return pool.runtime.device_uuid(pool.device)
    except CudaError as error:
        raise ConfigError(f"--transfer cuda_ipc: {error}") from None
