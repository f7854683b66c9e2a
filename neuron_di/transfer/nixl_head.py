"""The head of a peer's pool, read over NIXL: whose memory it is, and which blocks were given up.

offset 0 of the peer's segment    header         read once, proves whose memory it is
4096                              generations    read after each transfer, and compared
`head_bytes`                      block 0 …      what transfers read, unless a device has it
"""

import numpy as np
from numpy.typing import NDArray

from neuron_di.clock import Deadline
from neuron_di.kv import GENERATIONS_OFFSET, Memory, as_ids, check_header, head_bytes
from neuron_di.transfer.nixl_agent import NixlAgent, rows_of
from neuron_di.transfer.transfer_engine import BlockSource
from neuron_di.types import Incarnation

_GENERATION_BYTES = 8


class PeerHead:
    """Of a peer that the agent reaches. One thread's. StaleIncarnation where it is another's.

    Its first bytes come before `deadline`, and generations each within `timeout_s`.
    """

    def __init__(
        self,
        agent: NixlAgent,
        address: int,
        peer: Incarnation,
        num_blocks: int,
        deadline: Deadline,
        *,
        timeout_s: float,
    ) -> None:
        self._agent = agent
        self._address = address
        self._timeout_s = timeout_s
        self._arrays: list[NDArray[np.uint8]] = []  # kept until the agent is closed
        # The first bytes of the peer's segment, as they were last read.
        self._bytes = self._registered(GENERATIONS_OFFSET)
        self._read(0, GENERATIONS_OFFSET, deadline)
        check_header(self._bytes.data, peer, num_blocks)
        self._bytes = self._registered(head_bytes(num_blocks))

    def read_generations(self, source: BlockSource) -> None:
        """Of these blocks, as they are now. PeerError where they cannot be read.

        After the blocks' bytes: one given up at any time before shows a newer generation.
        """
        if not len(source.block_ids):
            return
        block_ids = as_ids(source.block_ids)
        first, last = int(block_ids.min()), int(block_ids.max())
        start = GENERATIONS_OFFSET + first * _GENERATION_BYTES
        num_bytes = (last + 1 - first) * _GENERATION_BYTES
        self._read(start, num_bytes, Deadline.after(self._timeout_s))

    def has_kept(self, source: BlockSource) -> bool:
        """Whether the generations that were read are those that were promised."""
        generations = self._bytes[GENERATIONS_OFFSET:].view(np.uint64)
        found: list[int] = generations[as_ids(source.block_ids)].tolist()
        return found == list(source.generations)

    def _registered(self, num_bytes: int) -> NDArray[np.uint8]:
        array = np.zeros(num_bytes, np.uint8)
        self._arrays.append(array)
        self._agent.register(Memory(array.ctypes.data, num_bytes))
        return array

    def _read(self, start: int, num_bytes: int, deadline: Deadline) -> None:
        offsets, lengths = np.array([start], np.int64), np.array([num_bytes], np.int64)
        self._agent.read(
            rows_of(self._bytes.ctypes.data, offsets, lengths),
            rows_of(self._address, offsets, lengths),
            deadline,
        )
