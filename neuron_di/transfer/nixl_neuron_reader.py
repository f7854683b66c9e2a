"""What reads one prefill worker's device through NIXL, into this worker's: agent and thread.

    what is read                   from                          to
    header, generations            the peer's host memory        host memory
    a request's used tokens        the peer's KV tensors         this worker's KV tensors

Behind the tokens a number of each tensor that was written is read back (nixl_fence.py), and behind
that the generations.

*Proof.* KV tensors have no header. The pool's head, in the peer's host memory, says whose it is. It
and the tensors are registered by one agent, so they are of one process. That the way from device to
device works is tried when a peer is connected, with a number of each pair of cores. It goes behind
the slots' positions that requests use, where idle rows' garbage goes, too, and what it is is not
looked at: digests are compared of every block, before a token is computed from it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError, PeerError
from neuron_di.kv import Memory
from neuron_di.transfer.nixl_agent import NixlAgent, Rows, rows_of
from neuron_di.transfer.nixl_fence import Fence
from neuron_di.transfer.nixl_head import PeerHead
from neuron_di.transfer.nixl_reader import PeerReader
from neuron_di.transfer.nixl_tensors import DeviceMemory
from neuron_di.transfer.nrt_plan import DevicePlan, Moves
from neuron_di.transfer.transfer_engine import Receive, TransferToken, deadline_of
from neuron_di.types import Incarnation
from neuron_di.wire import NixlNeuronRegion

# Of one transfer of NIXL's: it keeps a record of each, and posts all to the adapter's send queue,
# which holds some thousands.
RUNS_MAX = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """This worker's tensors, and what reads them back."""

    memory: DeviceMemory
    num_positions: int  # of a slot, with those behind what requests use
    fence: Fence  # open


class NixlNeuronReader(PeerReader):
    """PeerError where the peer cannot be reached or is another, ConfigError where this worker's
    tensors cannot be registered with the agent.

    Connects within `connect_timeout_s`, beside what registering takes. `check_open` raises where
    the engine is being closed: then the tensors are not touched any more. `on_arrived` is told what
    came, before anybody else is.
    """

    def __init__(
        self,
        agent: NixlAgent,
        peer: Incarnation,
        region: NixlNeuronRegion,
        plan: DevicePlan,
        source: DeviceMemory,
        own: OwnDevice,
        on_arrived: Callable[[Receive], object],
        check_open: Callable[[], object],
        *,
        connect_timeout_s: float,
        timeout_s: float,
    ) -> None:
        super().__init__(agent)
        self._plan = plan
        self._source = source
        self._own = own
        self._on_arrived = on_arrived
        self._timeout_s = timeout_s
        self.num_blocks = region.num_blocks
        deadline = Deadline.after(connect_timeout_s)
        agent.connect(region.agent, region.metadata, connect_timeout_s)
        self._head = PeerHead(
            agent, region.head_address, peer, region.num_blocks, deadline, timeout_s=timeout_s
        )
        sample = plan.moves([0], [0], 1)  # of all tensors that any is of
        agent.check(source.whole(np.unique(sample.source_tensors)), source.kind)
        check_open()
        tensors = np.unique(sample.destination_tensors)
        agent.register_rows(own.memory.whole(tensors), own.memory.kind)
        check_open()
        self._try(sample, deadline)

    def post(self, receive: Receive, token: TransferToken) -> None:
        """The caller checked the bounds."""
        copied, num_bytes = TransferToken(), 0

        def copy() -> NeuronDiError | None:
            nonlocal num_bytes
            try:
                moves = self._plan.moves(
                    receive.source.block_ids, receive.block_ids, receive.num_tokens
                )
            except PeerError as refusal:
                return refusal
            error = self._receive(lambda: self._read(moves), receive.source)
            if error is None:
                num_bytes = moves.num_bytes
                self._on_arrived(receive)
            return error

        def end(copied: TransferToken) -> None:
            token.kv_bytes, token.transfer_s = num_bytes, copied.transfer_s
            token.complete(copied.error())

        copied.on_done(end)
        self._thread.post(copy, 0, copied)

    def _read(self, moves: Moves) -> None:
        deadline = deadline_of(moves.num_bytes, self._timeout_s)
        for start in range(0, len(moves.lengths), RUNS_MAX):
            part = slice(start, start + RUNS_MAX)
            lengths = moves.lengths[part]
            tensors, offsets = moves.destination_tensors[part], moves.destination_offsets[part]
            self._read_into(
                self._own.memory.rows(tensors, offsets, lengths),
                self._source.rows(moves.source_tensors[part], moves.source_offsets[part], lengths),
                deadline,
            )
        # Of each tensor the last number that was written.
        tensors, places = np.unique(moves.destination_tensors[::-1], return_index=True)
        last = len(moves.lengths) - 1 - places
        ends = moves.destination_offsets[last] + moves.lengths[last]
        fence = self._own.fence
        fence.read_back(tensors, ends - fence.item_bytes)

    def _try(self, sample: Moves, deadline: Deadline) -> None:
        """A number of each pair of cores goes behind what requests use."""
        memory, fence = self._own.memory, self._own.fence
        first = sample.starts[:-1]
        tensors = sample.destination_tensors[first]
        lengths = np.full(len(first), fence.item_bytes, np.int64)
        peers = self._source.rows(
            sample.source_tensors[first], sample.source_offsets[first], lengths
        )
        offsets = np.zeros(len(tensors), np.int64)
        if self._own.num_positions > memory.geometry.block_size:
            offsets = memory.position_offsets(self._own.num_positions - 1)[tensors]
            self._read_into(memory.rows(tensors, offsets, lengths), peers, deadline)
        else:  # nothing is behind it: into host memory
            # Kept until the agent is closed.
            self._numbers = np.zeros(len(lengths) * fence.item_bytes, np.uint8)
            self._agent.register(Memory(self._numbers.ctypes.data, len(self._numbers)))
            places = np.arange(len(lengths)) * fence.item_bytes
            own = rows_of(self._numbers.ctypes.data, places, lengths)
            self._agent.read(own, peers, deadline, peers_kind=self._source.kind)
        tensors, which = np.unique(tensors, return_index=True)
        fence.read_back(tensors, offsets[which])

    def _read_into(self, own: Rows, peers: Rows, deadline: Deadline) -> None:
        """From the peer's tensors into own ones."""
        kinds = self._own.memory.kind, self._source.kind
        self._agent.read(own, peers, deadline, own_kind=kinds[0], peers_kind=kinds[1])
