"""What reads one prefill worker's pool through NIXL: an agent and a thread of its own.

Of its own, because a transfer may block its thread (UCX copies within the call that posts it),
and because only the end of its agent ends a transfer that came to a halt: no other peer's
transfers are touched by that.
"""

import hashlib
import threading
from collections.abc import Callable
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.errors import KvChanged, NeuronDiError, PeerError, PeerGone, PeerRefused
from neuron_di.kv import KvLayout, Memory, head_bytes
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.nixl_agent import NixlAgent, rows_of
from neuron_di.transfer.nixl_head import PeerHead
from neuron_di.transfer.transfer_engine import BlockSource, Receive, TransferToken, deadline_of
from neuron_di.types import Incarnation
from neuron_di.wire import NixlRegion

ENDING_S = 20.0  # for all that is posted, once the peer is forgotten; a CopyThread waits longer


class PeerReader:
    """An agent that reads one peer, and its thread. Owns the agent, from now on."""

    _head: PeerHead  # of who was connected

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._broken: PeerError | None = None

    def start(self) -> None:
        """Last: until then the agent is its caller's to close."""
        self._thread = CopyThread("kv-transfer-nixl")

    def end(self) -> CopyThread:
        """Read what was posted, within ENDING_S, then forget the peer: what remains is the thread.
        Returns at once."""
        self._agent.end_by(Deadline.after(ENDING_S))
        self._thread.end(self._agent.close)
        return self._thread

    def _receive(self, read: Callable[[], object], source: BlockSource) -> NeuronDiError | None:
        """Read the bytes of these blocks, then whether they were kept. On the thread."""
        if self._broken is not None:
            return self._broken
        try:
            read()
            self._head.read_generations(source)
        except BaseException as error:
            self._agent.close()  # else the bytes might still come
            self._broken = PeerGone("the connection to the prefill worker's pool has failed")
            if not isinstance(error, PeerError):
                raise
            return error
        if not self._head.has_kept(source):
            return KvChanged("the prefill worker gave the blocks up while they were read")
        return None


class NixlReader(PeerReader):
    """Of a pool in the host's memory. PeerError where the peer cannot be reached or is another."""

    def __init__(
        self,
        agent: NixlAgent,
        peer: Incarnation,
        region: NixlRegion,
        layout: KvLayout,
        *,
        timeout_s: float,
    ) -> None:
        super().__init__(agent)
        self._region = region
        self._timeout_s = timeout_s
        self._pool: Memory | None = None  # whose blocks were prepared
        self._block_bytes = layout.block_bytes
        self._lock = threading.Lock()
        self._registered: set[Memory] = set()
        self.num_bytes = region.num_bytes
        self.num_blocks, rest = divmod(region.num_bytes, layout.block_bytes)
        if region.kind != "DRAM" or rest or not self.num_blocks:
            raise PeerRefused("the prefill worker's pool is none that this engine can read")
        if hashlib.sha256(region.metadata).digest() != region.digest:
            raise PeerRefused("NIXL's metadata came damaged")  # it would end this process
        head_address = region.address - head_bytes(self.num_blocks)
        if head_address < 0:
            raise PeerRefused("the prefill worker's pool lies nowhere")
        deadline = Deadline.after(timeout_s)
        agent.connect(region.agent, [region.metadata], timeout_s)
        self._head = PeerHead(
            agent, head_address, peer, self.num_blocks, deadline, timeout_s=timeout_s
        )

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
        copy = partial(self._receive, partial(self._read, receive), receive.source)
        self._thread.post(copy, receive.runs.num_bytes, token)

    def _read(self, receive: Receive) -> None:
        runs = receive.runs
        # NIXL does not say how far it has come, only whether it is over: it has the time at once
        # that over tcp each piece has.
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

    def _is_prepared(self, receive: Receive) -> bool:
        """Whether each run is one block, of the own pool. Longer runs are cheaper as they are."""
        size, runs = self._block_bytes, receive.runs
        return (
            receive.memory == self._pool
            and bool((runs.lengths == size).all())
            and not (runs.source_offsets % size).any()
            and not (runs.destination_offsets % size).any()
        )
