"""What reads one prefill worker's pool through NIXL: an agent and a thread of its own.

Of its own, because a transfer may block its thread (UCX copies within the call that posts it),
and because only the end of its agent ends a transfer that came to a halt: no other peer's
transfers are touched by that.

    offset 0 of the peer's segment    header         read once, proves whose memory it is
    4096                              generations    read after each transfer, and compared
    `head_bytes`                      block 0 …      what transfers read
"""

import hashlib
import threading
from functools import partial

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.errors import KvChanged, NeuronDiError, PeerError, PeerGone, PeerRefused
from neuron_di.kv import GENERATIONS_OFFSET, KvLayout, Memory, as_ids, check_header, head_bytes
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.nixl_agent import NixlAgent, rows_of
from neuron_di.transfer.transfer_engine import Receive, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import NixlRegion

_GENERATION_BYTES = 8
# NIXL does not say how far a transfer has come, only whether it is over: it has this long beside
# the time that a peer may be silent. As over tcp, where each piece has.
BYTES_PER_S_MIN = 1e6
MOVING_S_MAX = 600.0
ENDING_S = 20.0  # for all that is posted, once the peer is forgotten; a CopyThread waits longer


def deadline_of(num_bytes: int, timeout_s: float) -> Deadline:
    """When a read of so many bytes must be through."""
    return Deadline.after(min(timeout_s + num_bytes / BYTES_PER_S_MIN, MOVING_S_MAX))


class NixlReader:
    """Owns the agent, from now on. PeerError where the peer cannot be reached or is another."""

    def __init__(
        self,
        agent: NixlAgent,
        peer: Incarnation,
        region: NixlRegion,
        layout: KvLayout,
        *,
        timeout_s: float,
    ) -> None:
        self._agent = agent
        self._region = region
        self._timeout_s = timeout_s
        self._broken: PeerError | None = None
        self._pool: Memory | None = None  # whose blocks were prepared
        self._block_bytes = layout.block_bytes
        self._lock = threading.Lock()
        self._registered: set[Memory] = set()
        self._arrays: list[NDArray[np.uint8]] = []  # kept until the agent is closed
        self.num_bytes = region.num_bytes
        self.num_blocks, rest = divmod(region.num_bytes, layout.block_bytes)
        if region.kind != "DRAM" or rest or not self.num_blocks:
            raise PeerRefused("the prefill worker's pool is none that this engine can read")
        if hashlib.sha256(region.metadata).digest() != region.digest:
            raise PeerRefused("NIXL's metadata came damaged")  # it would end this process
        self._head_address = region.address - head_bytes(self.num_blocks)
        if self._head_address < 0:
            raise PeerRefused("the prefill worker's pool lies nowhere")
        agent.connect(region.agent, region.metadata, timeout_s)
        # The first bytes of the peer's segment, as they were last read.
        self._head = self._registered_bytes(GENERATIONS_OFFSET)
        self._read_head(0, GENERATIONS_OFFSET)
        check_header(self._head.data, peer, self.num_blocks)
        self._head = self._registered_bytes(head_bytes(self.num_blocks))

    def start(self) -> None:
        """Last: until then the agent is its caller's to close."""
        self._thread = CopyThread("kv-transfer-nixl")

    def register(self, memories: tuple[Memory, ...]) -> None:
        """Receives may go there, too. Blocks while a transfer does."""
        with self._lock:
            for memory in memories:
                if memory not in self._registered:
                    self._agent.register(memory)
                    self._registered.add(memory)

    def prepare(self, pool: Memory) -> None:
        """Single blocks of the own pool, whose layout is the peer's, cost less to post then."""
        self._pool = pool
        peers = Memory(self._region.address, self._region.num_bytes)
        self._agent.prepare(pool, peers, self._block_bytes)

    def post(self, receive: Receive, token: TransferToken) -> None:
        """The caller checked the bounds, and that the memory is registered."""
        self._thread.post(partial(self._receive, receive), receive.runs.num_bytes, token)

    def end(self) -> None:
        """Read what was posted, within ENDING_S, then forget the peer. Returns at once."""
        self._agent.end_by(Deadline.after(ENDING_S))
        self._thread.end(self._agent.close)

    def join(self) -> None:
        self._thread.join()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _receive(self, receive: Receive) -> NeuronDiError | None:
        if self._broken is not None:
            return self._broken
        try:
            self._read(receive)
        except PeerError as error:
            self._agent.close()
            self._broken = PeerGone("the connection to the prefill worker's pool has failed")
            return error
        # After the bytes: a block given up at any time before shows a newer generation.
        if self._generations(receive) != list(receive.source.generations):
            return KvChanged("the prefill worker gave the blocks up while they were read")
        return None

    def _read(self, receive: Receive) -> None:
        runs = receive.runs
        deadline = deadline_of(runs.num_bytes, self._timeout_s)
        own, peers, lengths = runs.destination_offsets, runs.source_offsets, runs.lengths
        if self._is_prepared(receive):
            size = self._block_bytes
            self._agent.read_blocks(own // size, peers // size, deadline)
        else:
            self._agent.read(
                rows_of(receive.memory.address, own, lengths),
                rows_of(self._region.address, peers, lengths),
                deadline,
            )
        if len(receive.source.block_ids):
            block_ids = as_ids(receive.source.block_ids)
            first, last = int(block_ids.min()), int(block_ids.max())
            start = GENERATIONS_OFFSET + first * _GENERATION_BYTES
            self._read_head(start, (last + 1 - first) * _GENERATION_BYTES)

    def _is_prepared(self, receive: Receive) -> bool:
        """Whether each run is one block, of the own pool. Longer runs are cheaper as they are."""
        size, runs = self._block_bytes, receive.runs
        return (
            receive.memory == self._pool
            and bool((runs.lengths == size).all())
            and not (runs.source_offsets % size).any()
            and not (runs.destination_offsets % size).any()
        )

    def _registered_bytes(self, num_bytes: int) -> NDArray[np.uint8]:
        array = np.zeros(num_bytes, np.uint8)
        self._arrays.append(array)
        self._agent.register(Memory(array.ctypes.data, num_bytes))
        return array

    def _read_head(self, start: int, num_bytes: int) -> None:
        offsets, lengths = np.array([start], np.int64), np.array([num_bytes], np.int64)
        self._agent.read(
            rows_of(self._head.ctypes.data, offsets, lengths),
            rows_of(self._head_address, offsets, lengths),
            Deadline.after(self._timeout_s),
        )

    def _generations(self, receive: Receive) -> list[int]:
        generations = self._head[GENERATIONS_OFFSET:].view(np.uint64)
        found: list[int] = generations[as_ids(receive.source.block_ids)].tolist()
        return found
