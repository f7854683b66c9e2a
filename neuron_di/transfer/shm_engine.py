"""The transfer engine of one host: the decode worker copies blocks out of prefill's pool.

One copy, straight from the prefill worker's blocks into the decode worker's, on a thread of
its own that runs without the interpreter lock. Prefill's processor is not involved.
"""

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuron_di.clock import now_s
from neuron_di.errors import (
    KvChanged,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import KvPool, PeerPool
from neuron_di.obs import get_logger
from neuron_di.transfer.transfer_engine import BlockSource, TransferToken
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import Region, ShmRegion
from neuron_di_bindings import block_copy
from neuron_di_bindings.process import lower_thread_priority

_log = get_logger(__name__)


# A worker pinned to one core copies and decodes there: running streams go first, and a large
# copy is spread over several steps.
COPY_NICE = 5


@dataclass(frozen=True, slots=True)
class _Job:
    peer_pool: PeerPool
    source: BlockSource
    block_ids: Sequence[BlockId]
    token: TransferToken


class ShmEngine:
    """Owns one thread and the maps of its peers' pools; borrows this worker's pool."""

    name = "shm"
    is_one_sided = True

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._peers: dict[Incarnation, PeerPool] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    def local_region(self) -> Region:
        return self._pool.region()

    def connect(self, peer: Incarnation, region: Region) -> None:
        assert isinstance(region, ShmRegion)
        if region.incarnation != peer:
            raise StaleIncarnation(f"the pool of process {region.pid} is not the peer's")
        self._peers[peer] = PeerPool.open(region, self._pool.layout)

    def accept(self, peer: Incarnation, region: Region) -> None:
        """Nothing to do: the decode worker maps this pool by itself."""

    def post_send(self, peer: Incarnation, block_ids: Sequence[BlockId]) -> TransferToken:  # noqa: ARG002
        token = TransferToken()
        token.complete()  # the reader does all the work
        return token

    def post_receive(
        self, peer: Incarnation, source: BlockSource, block_ids: Sequence[BlockId]
    ) -> TransferToken:
        token = TransferToken()
        peer_pool = self._peers.get(peer)
        if peer_pool is None:
            token.complete(PeerGone("no connection to the prefill worker's pool"))
            return token
        # The ids come from another process: never read outside of what it registered.
        if len(source.block_ids) != len(block_ids) or len(source.generations) != len(block_ids):
            token.complete(
                RemoteProtocolError("the prefill worker offered another number of blocks")
            )
        elif not all(0 <= block_id < peer_pool.num_blocks for block_id in source.block_ids):
            token.complete(
                RemoteProtocolError("the prefill worker named a block outside of its pool")
            )
        else:
            self._jobs.put(_Job(peer_pool, source, block_ids, token))
        return token

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: this processor wrote the bytes that it will read."""

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)  # a running copy keeps its map

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        lower_thread_priority(COPY_NICE)
        while (job := self._jobs.get()) is not None:
            start_s = now_s()
            try:
                error = self._copy(job)
            except Exception as unexpected:  # the thread serves every request: it must live on
                error = LocalProtocolError(f"KV copy failed: {unexpected!r}")
            job.token.transfer_s = now_s() - start_s
            if error is None:
                job.token.kv_bytes = len(job.block_ids) * self._pool.layout.block_bytes
            try:
                job.token.complete(error)
            except Exception:
                _log.exception("transfer_callback_failed")
            del job  # it keeps the peer's pool mapped, and the next one may be long in coming

    def _copy(self, job: _Job) -> NeuronDiError | None:
        block_copy.copy_blocks(
            destination_address=self._pool.base_address,
            source_address=job.peer_pool.base_address,
            destination_ids=np.asarray(job.block_ids, np.int32),
            source_ids=np.asarray(job.source.block_ids, np.int32),
            block_bytes=self._pool.layout.block_bytes,
        )
        # After the copy: a block given up at any time before shows a newer generation.
        if job.peer_pool.generations(job.source.block_ids) != list(job.source.generations):
            return KvChanged("the prefill worker gave the blocks up while they were read")
        return None
