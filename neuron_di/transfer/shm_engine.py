"""The transfer engine of one host: the decode worker copies bytes out of prefill's pool.

One copy, straight from the prefill worker's blocks to where they are wanted, on a thread of
its own that runs without the interpreter lock; a small one before post_receive returns, because to
wake that thread is felt, while such copies are few. Prefill's processor is not involved.
"""

from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from neuron_di.errors import KvChanged, NeuronDiError, PeerGone, PeerRefused, StaleIncarnation
from neuron_di.kv import KvLayout, KvPool, Memory, PeerPool, open_peer_pool
from neuron_di.transfer.copy_thread import CopyThread
from neuron_di.transfer.domain import this_machine
from neuron_di.transfer.run_bounds import OwnMemories
from neuron_di.transfer.transfer_engine import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import Region, ShmRegion
from neuron_di_bindings.block_runs import are_words
from neuron_di_bindings.run_copy import copy_promised

# Measured: to wake the thread for 1 MiB, 150 µs, takes another fifth of that.
SMALL_BYTES_MAX = 1 << 20
LANDED_BYTES_MAX = 128 << 10


@dataclass(slots=True)
class _Peer:
    """A peer's pool, and what is the same for every receive from it."""

    pool: PeerPool
    base_address: int
    block_bytes: int
    num_blocks: int  # when it was last looked at: it may grow, and never shrinks

    def has_grown(self) -> bool:
        """Look again."""
        before, self.num_blocks = self.num_blocks, self.pool.num_blocks
        return self.num_blocks > before


class ShmEngine:
    """Owns one thread and the maps of its peers' pools; borrows this worker's pool.

    Up to `small_bytes_max` are copied on the thread that posts the receive.
    """

    name = "shm"
    is_one_sided = True

    def __init__(self, pool: KvPool, *, small_bytes_max: int = SMALL_BYTES_MAX) -> None:
        self._pool = pool
        self._small_bytes_max = small_bytes_max
        self._memories = OwnMemories(pool.memory())
        self._peers: dict[Incarnation, _Peer] = {}
        self._thread = CopyThread("kv-transfer")

    def local_region(self, peer: Incarnation) -> Region:  # noqa: ARG002
        return replace(self._pool.region(), host=this_machine())

    def register(self, memory: Memory) -> None:
        self._memories.add(memory)

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        if not isinstance(region, ShmRegion):
            raise PeerRefused("the peer's pool is not in shared memory")
        if region.host not in ("", this_machine()):
            raise PeerRefused(
                "the peer is on another machine, in another container or of another user"
            )
        if region.incarnation != peer:
            raise StaleIncarnation(f"the pool of process {region.pid} is not the peer's")
        # The header that was mapped names its owner: it is the peer's memory, whoever says so.
        pool = open_peer_pool(region, layout)
        self._peers[peer] = _Peer(pool, pool.base_address, layout.block_bytes, pool.num_blocks)

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        """Nothing to do: the decode worker maps this pool by itself."""

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:  # noqa: ARG002
        return TransferToken.over()  # the reader does all the work

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        known = self._peers.get(peer)
        if known is None:
            return TransferToken.over(PeerGone("no connection to the prefill worker's pool"))
        refusal = self._refusal(known, receive)
        if refusal is not None and known.has_grown():
            refusal = self._refusal(known, receive)
        if refusal is not None:
            return TransferToken.over(refusal)
        token = TransferToken()
        num_bytes = receive.runs.num_bytes
        # Without blocks it lands, and whoever posts it places it, too: that may take far longer.
        small_bytes_max = self._small_bytes_max if len(receive.block_ids) else LANDED_BYTES_MAX
        is_short = num_bytes <= min(small_bytes_max, self._small_bytes_max)
        self._thread.post(partial(_copy, known, receive), num_bytes, token, is_short=is_short)
        return token

    def _refusal(self, known: _Peer, receive: Receive) -> NeuronDiError | None:
        num_blocks = known.num_blocks
        return self._memories.refusal(
            receive, peer_bytes=num_blocks * known.block_bytes, peer_blocks=num_blocks
        )

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """Nothing to do: a copy waits for nobody."""

    def fence(self, peer: Incarnation) -> None:
        """Nothing to do: this processor wrote the bytes that it will read."""

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        known = self._peers.get(peer)
        if known is None:
            return PeerGone("the prefill worker was disconnected before its blocks were taken")
        return _why_changed(known, receive)

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        known = self._peers.get(peer)
        return None if known is None else _why_changed(known, receive)

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)  # a running copy keeps its map

    def close(self) -> None:
        self._thread.end()
        self._thread.join()


def _copy(peer: _Peer, receive: Receive) -> NeuronDiError | None:
    """KvChanged right here says why the digests of torn blocks would not match either."""
    runs, source = receive.runs, receive.source
    is_kept = copy_promised(
        destination_address=receive.memory.address,
        source_address=peer.base_address,
        destination_offsets=runs.destination_offsets,
        source_offsets=runs.source_offsets,
        lengths=runs.lengths,
        words=peer.pool.words,
        ids=source.block_ids,
        numbers=source.generations,
    )
    return None if is_kept else _changed()


def _why_changed(peer: _Peer, receive: Receive) -> NeuronDiError | None:
    """After the copy: a block given up at any time before shows a newer generation."""
    source = receive.source
    is_kept = are_words(peer.pool.words, source.block_ids, source.generations)
    return None if is_kept else _changed()


def _changed() -> KvChanged:
    return KvChanged("the prefill worker gave the blocks up while they were read")
