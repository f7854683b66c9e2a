"""What moves KV between two workers. One file per kind of link stands behind this.

The contract covers one-sided engines (the reader copies: shared memory, CUDA IPC, NIXL) and
two-sided ones (a send must be posted for each receive: TCP, libnrt). What follows from the
strictest of them, libnrt, holds for all:

- For one pair of workers, receives are posted in the order of the Pull messages, and sends
  in the order in which Pull messages arrive. An engine may match by order or by tag.
- A posted transfer cannot be cancelled, unless the engine can (`cancel`). Source and destination
  stay untouched by anybody else until its token is done. But for the sources of single layers,
  which are an offer (layer_sender.py): what is read of a block given up matches no digest.
- Done is not yet visible: whoever reads received bytes calls `fence` first; and not yet final:
  whoever has verified them calls `commit`, which fails where the source was given up meanwhile.
- connect() and accept() may take long and may block: they are called neither on the event
  loop nor on the engine's thread.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, Self

from neuron_di.clock import Deadline
from neuron_di.errors import NeuronDiError
from neuron_di.kv import BlockIds, KvLayout, Memory, Runs
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import Region

BYTES_PER_S_MIN = 1e6  # of what is on its way, beside the silence that is allowed
MOVING_S_MAX = 600.0  # and nothing, however large, may take longer: a peer keeps its blocks


class TransferToken:
    """One transfer's outcome: polled by the scheduler, announced once to a callback (N-50).

    Set by the transfer engine from any thread, at most once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_done = False
        self._error: NeuronDiError | None = None
        self._on_done: list[Callable[[TransferToken], object]] = []
        self.kv_bytes = 0  # moved; 0 where blocks changed owner instead
        self.transfer_s = 0.0
        self.verify_s = 0.0
        # Blocks that came in the place of the first ones that were offered; None: none did.
        self.adopted_ids: list[BlockId] | None = None

    @classmethod
    def over(cls, error: NeuronDiError | None = None) -> Self:
        """Of a transfer that needs nothing, or that must not begin."""
        token = cls()
        token.complete(error)
        return token

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
        """Set the outcome and tell whoever asked to be told: all, though one of them fails."""
        with self._lock:
            assert not self._is_done, "a transfer ends once"
            self._error = error
            self._is_done = True
            callbacks, self._on_done = self._on_done, []
        with ExitStack() as stack:
            for callback in reversed(callbacks):
                stack.callback(callback, self)


def deadline_of(num_bytes: int, silence_s: float) -> Deadline:
    """When a transfer, or a piece of one, of so many bytes must be through once it has begun."""
    return Deadline.after(min(silence_s + num_bytes / BYTES_PER_S_MIN, MOVING_S_MAX))


@dataclass(frozen=True, slots=True)
class BlockSource:
    """Blocks in a peer's pool, in token order, with the generations they were promised at."""

    block_ids: BlockIds
    generations: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Prefill's half of a transfer: these bytes of its own pool, in this order.

    `tag` is the same at both ends and no other's among the pair's open transfers. `block_ids` are
    the blocks that these bytes lie in, in token order, and `exchange` the peer's, that it offers
    for them or wants them in: engines that move blocks' owners, or the KV of a device, go by these,
    and by the tokens that the blocks hold.
    """

    tag: int  # unsigned, 64 bits
    runs: Runs
    block_ids: Sequence[BlockId] = ()
    exchange: Sequence[int] = ()
    num_tokens: int | None = None  # None: the blocks are full


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Decode's half of a transfer: bytes of a peer's pool into `memory`.

    `runs.destination_offsets` count from `memory`, which is this worker's pool or was registered.
    `block_ids` are blocks of this worker's pool: engines that move blocks' owners give these to
    the peer, and those that move the KV of a device fill them with `num_tokens` tokens. Empty where
    the bytes go to other memory.
    """

    tag: int
    runs: Runs
    memory: Memory
    source: BlockSource
    block_ids: Sequence[BlockId] = ()
    num_tokens: int | None = None  # None: the blocks are full


class TransferEngine(Protocol):
    """Moves bytes from its peers' pools into this worker's memory. Thread-safe."""

    name: str
    # One-sided: a receive needs nothing of the peer, so it always ends by itself.
    is_one_sided: bool

    def local_region(self, peer: Incarnation) -> Region:
        """How this peer reaches this worker's pool; sent to it alone, at the handshake."""
        ...

    def register(self, memory: Memory) -> None:
        """Further memory that receives will go to, until close()."""
        ...

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Decode side: make the prefill worker's pool, of this layout, reachable, and prove it.

        What was read through the connection shows that it is the peer's memory. May block, never
        longer than its own deadline. PeerGone, PeerRefused, StaleIncarnation or PeerTimeout when
        that cannot be: another engine may still do.
        """
        ...

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Prefill side: let a decode worker connect. May block. One-sided: nothing to do."""
        ...

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        """Prefill side, on Pull: let the peer have these bytes. One-sided: done at once.

        Returns at once. The token is done when the bytes may be overwritten; where nobody receives
        them, after a deadline of the engine's own.
        """
        ...

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        """Decode side: fill the memory. Returns at once; poll the token.

        Runs outside of what the peer or this worker registered, and lists that do not fit each
        other, end the token with RemoteProtocolError: nothing was touched.
        """
        ...

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """End a posted receive whose send may never come, with KvMissing, as soon as nothing
        writes to its memory any more. Engines that cannot do nothing: it stays posted."""
        ...

    def fence(self, peer: Incarnation) -> None:
        """Make the bytes of every receive that is done visible to this worker's readers.

        Called before they are verified, on the thread that completed the receive. Short.
        """
        ...

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        """Make a verified receive final, on the same thread. Short.

        KvChanged where the source was given up at any time before, as far as the engine can tell:
        then the bytes may be anybody's.
        """
        ...

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        """Instead of commit: what came is not what was promised. Nothing is taken. Short.

        KvChanged where that is no wonder, because the source was given up meanwhile.
        """
        ...

    def disconnect(self, peer: Incarnation) -> None:
        """Forget a peer. Unknown peers are ignored.

        A receive of a two-sided engine that nothing will match any more ends with an error here,
        or, where the device cannot end it, stays posted, and its blocks quarantined.
        """
        ...

    def close(self) -> None:
        """End after the transfers that were posted. Blocks until then, or its deadline."""
        ...
