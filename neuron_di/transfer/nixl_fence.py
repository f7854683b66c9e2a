"""What makes sure that bytes which NIXL read are in this worker's device: they are read back.

That a read is complete does not say that its bytes are in the device's memory: the adapter writes
them there by another way than its word of completion goes to the host (libfabric's fi_efa(7) and
its pull requests 12761 and 12807). What the adapter itself then reads from there comes behind them.
So a number of each tensor that was written is read back, before anybody is told of the bytes.

That rests on one adapter for each tensor: what one adapter reads says nothing of what another one
wrote. NIXL takes the adapter beside the memory, and nixl_neuron_probe.py looks that it is there.

The numbers go through an agent of the fence's own, which reads from the agent that serves: within
one agent NIXL's LIBFABRIC takes a read for complete at once. One for all peers, for the agent that
serves is connected to a few hundred times at most (nixl_serving.py).
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, PeerError, PeerGone, PeerTimeout
from neuron_di.kv import DTYPE_BYTES, Memory
from neuron_di.kv.runs import Ints
from neuron_di.transfer.nixl_agent import NixlAgent, rows_of
from neuron_di.transfer.nixl_serving import ServingAgents
from neuron_di.transfer.nixl_tensors import DeviceMemory

# For the wait for others and the read: a few bytes, within this machine. It and a reader's
# ENDING_S are less than a CopyThread is waited for.
FENCE_TIMEOUT_S = 8.0


class Fence:
    """Of this worker's tensors. Owns its agent; borrows `serving`, which has them. Thread-safe.

    `open_agent` makes an agent of this name that reads. It is `open` only where KV is received.
    """

    def __init__(
        self,
        name: str,
        memory: DeviceMemory,
        serving: ServingAgents,
        open_agent: Callable[[str], NixlAgent],
        *,
        timeout_s: float,
    ) -> None:
        self.item_bytes = DTYPE_BYTES[memory.geometry.dtype]
        self._name = name
        self._memory = memory
        self._serving = serving
        self._open_agent = open_agent
        self._timeout_s = min(timeout_s, FENCE_TIMEOUT_S)
        self._numbers = np.zeros(len(memory.addresses) * self.item_bytes, np.uint8)
        self._opened = itertools.count()
        self._lock = threading.Lock()
        self._agent: NixlAgent | None = None
        self._is_closed = False

    def open(self, timeout_s: float) -> None:
        """Once more where it failed. PeerError where it cannot be: another engine may do."""
        with self._held(Deadline.after(timeout_s)):
            if self._agent is not None:
                return
            try:
                agent = self._open_agent(f"{self._name}-{next(self._opened)}")
            except ConfigError as error:
                raise PeerGone(error.message) from None
            try:
                self._connect(agent, timeout_s)
            except ConfigError as error:
                agent.close()
                raise PeerGone(error.message) from None
            except BaseException:
                agent.close()
                raise
            self._agent = agent

    def read_back(self, tensors: Ints, offsets: Ints) -> None:
        """A number of each of these tensors, each named once. Blocks. PeerError where it fails."""
        deadline = Deadline.after(self._timeout_s)
        lengths = np.full(len(tensors), self.item_bytes, np.int64)
        places = np.arange(len(tensors)) * self.item_bytes
        with self._held(deadline):
            agent = self._agent
            if agent is None:
                raise PeerGone("this worker's tensors cannot be read back: that has failed")
            try:
                agent.read(
                    rows_of(self._numbers.ctypes.data, places, lengths),
                    self._memory.rows(tensors, offsets, lengths),
                    deadline,
                    peers_kind=self._memory.kind,
                )
            except PeerError:
                self._agent = None
                agent.close()  # only then nothing comes any more
                raise

    def close(self) -> None:
        """Behind the last read_back."""
        is_held = self._lock.acquire(timeout=FENCE_TIMEOUT_S)
        self._is_closed = True
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
        if is_held:
            self._lock.release()

    def _connect(self, agent: NixlAgent, timeout_s: float) -> None:
        server = self._serving.take(self._name)
        every = self._memory.whole(np.arange(len(self._memory.addresses)))
        agent.connect(server.name, [server.metadata_of(every, self._memory.kind)], timeout_s)
        agent.register(Memory(self._numbers.ctypes.data, len(self._numbers)))

    @contextmanager
    def _held(self, deadline: Deadline) -> Iterator[None]:
        if not self._lock.acquire(timeout=deadline.remaining_s()):
            raise PeerTimeout("this worker's tensors are not read back in time")
        try:
            if self._is_closed:
                raise PeerGone("the transfer engine is closed")
            yield
        finally:
            self._lock.release()
