"""What moves KV blocks between two workers. One file per kind of link stands behind this.

The contract covers one-sided engines (the reader copies: shared memory, CUDA IPC) and
two-sided ones (a send must be posted for each receive: libnrt, TCP). What follows from the
strictest of them, libnrt, holds for all:

- For one pair of workers, receives are posted in the order of the Pull messages, and sends
  in the order in which Pull messages arrive. Matching needs no tag.
- A posted transfer cannot be cancelled. Source and destination blocks stay untouched by
  anybody else until its token is done.
- Done is not yet visible: whoever reads received bytes calls `fence` first. Success is said
  only if the source blocks were not given up meanwhile, as far as the engine can tell.
- connect() and accept() may take long and may block: they are called neither on the event
  loop nor on the engine's thread.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neuron_di.errors import NeuronDiError
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import Region


class TransferToken:
    """One transfer's outcome: polled by the scheduler, announced once to a callback (N-50).

    Set by the transfer engine from any thread, at most once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False
        self._error: NeuronDiError | None = None
        self._on_done: list[Callable[[TransferToken], object]] = []
        self.kv_bytes = 0
        self.transfer_s = 0.0
        self.verify_s = 0.0

    def is_done(self) -> bool:
        return self._is_done

    def error(self) -> NeuronDiError | None:
        """Why it failed; None while it runs and when it succeeded."""
        return self._error

    def on_done(self, callback: "Callable[[TransferToken], object]") -> None:
        """Call back once, on the thread that completes it; at once when it is done already."""
        with self._lock:
            if not self._is_done:
                self._on_done.append(callback)
                return
        callback(self)

    def complete(self, error: NeuronDiError | None = None) -> None:
        """Set the outcome and tell whoever asked to be told."""
        with self._lock:
            assert not self._is_done, "a transfer ends once"
            self._error = error
            self._is_done = True
            callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback(self)


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Blocks in a peer's pool, in token order, with the generations they were promised at."""

    block_ids: Sequence[int]
    generations: Sequence[int]


class TransferEngine(Protocol):
    """Moves blocks between this worker's pool and its peers'. Thread-safe."""

    name: str
    # One-sided: a receive needs nothing of the peer, so it always ends by itself.
    is_one_sided: bool

    def local_region(self) -> Region:
        """How a peer reaches this worker's pool; sent at the handshake."""
        ...

    def connect(self, peer: Incarnation, region: Region) -> None:
        """Decode side: make the prefill worker's pool reachable. May block.

        PeerGone or StaleIncarnation when it cannot be reached.
        """
        ...

    def accept(self, peer: Incarnation, region: Region) -> None:
        """Prefill side: let a decode worker connect. May block. One-sided: nothing to do."""
        ...

    def post_send(self, peer: Incarnation, block_ids: Sequence[BlockId]) -> TransferToken:
        """Prefill side, on Pull: let the peer have these blocks. One-sided: done at once."""
        ...

    def post_receive(
        self, peer: Incarnation, source: BlockSource, block_ids: Sequence[BlockId]
    ) -> TransferToken:
        """Decode side: fill these blocks of ours. Returns at once; poll the token."""
        ...

    def fence(self, peer: Incarnation) -> None:
        """Make the bytes of every receive that is done visible to this worker's readers.

        Called before they are verified, on the thread that completed the receive. Short.
        """
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Forget a peer. Unknown peers are ignored.

        A receive of a two-sided engine that nothing will match any more ends with an error here,
        or, where the device cannot end it, stays posted, and its blocks quarantined.
        """
        ...

    def close(self) -> None:
        """End after the transfers that were posted. Blocks until then."""
        ...
