"""A transfer engine between fake pools, on virtual time, with every way a copy can go wrong.

One-sided (the reader copies) or two-sided (a send for each receive, matched in order). Bytes
arrive in two halves, so that a source reused meanwhile is read torn; and what has arrived is
visible only after `fence`. Faults, each by its rate:

    transfer fails              an error, nothing was moved
    transfer stalls             half arrives, the rest seconds later
    transfer flips a bit        in the pool, after all went well
    transfer hits a wrong block one block takes the place of another
    transfer is late            all of it seconds later
    transfer is slow
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from neuron_di.errors import (
    KvChanged,
    NeuronDiError,
    PeerError,
    PeerGone,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.testing.fake_model import FakePool
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import Process
from neuron_di.transfer import BlockSource, TransferToken
from neuron_di.types import BlockId, Incarnation
from neuron_di.wire import Region

COPY_S_MEAN = 0.002
LATE_S_MAX = 8.0


@dataclass(slots=True)
class Fabric:
    """What the wires between the pools know: whose engine each incarnation's is."""

    network: Network
    engines: dict[Incarnation, "FakeTransferEngine"] = field(default_factory=dict)


@dataclass(slots=True)
class _Receive:
    peer: "FakeTransferEngine"
    source: BlockSource
    block_ids: Sequence[BlockId]
    generations: list[int]  # of our blocks when it was posted
    token: TransferToken
    started_s: float
    send: TransferToken | None = None
    rows: list[npt.NDArray[np.uint64]] = field(default_factory=list)  # what has been read


class FakeTransferEngine:
    """A TransferEngine of one simulated process. Borrows the pool."""

    def __init__(
        self, fabric: Fabric, process: Process, pool: FakePool, *, is_two_sided: bool = False
    ) -> None:
        self.name = "fake-two-sided" if is_two_sided else "fake"
        self.is_one_sided = not is_two_sided
        self.pool = pool
        self.process = process
        self._fabric = fabric
        self._network = fabric.network
        self._is_two_sided = is_two_sided
        self._peers: dict[Incarnation, FakeTransferEngine] = {}
        # Two-sided: what was posted and waits for its other half, in order, by peer.
        self._receives: dict[Incarnation, deque[_Receive]] = {}
        self._sends: dict[Incarnation, deque[TransferToken]] = {}
        self._running: dict[Incarnation, list[TransferToken]] = {}  # sends that were matched
        self._invisible: dict[Incarnation, list[_Receive]] = {}
        self.num_fences = 0
        fabric.engines[pool.incarnation] = self

    def local_region(self) -> Region:
        return self.pool.region()

    def connect(self, peer: Incarnation, region: Region) -> None:
        if region.incarnation != peer:
            raise StaleIncarnation("the pool is not the peer's")
        engine = self._fabric.engines.get(peer)
        if engine is None or engine.process.is_dead:
            raise PeerGone("the peer's pool cannot be reached")
        self._peers[peer] = engine

    def accept(self, peer: Incarnation, region: Region) -> None:
        if self._is_two_sided:
            self.connect(peer, region)

    def post_send(self, peer: Incarnation, block_ids: Sequence[BlockId]) -> TransferToken:  # noqa: ARG002
        token = TransferToken()
        engine = self._peers.get(peer)
        if not self._is_two_sided:
            token.complete()
        elif engine is None or engine.process.is_dead:
            token.complete(PeerGone("no connection to the decode worker"))
        else:
            self._sends.setdefault(peer, deque()).append(token)
            engine.match(self.pool.incarnation)
        return token

    def post_receive(
        self, peer: Incarnation, source: BlockSource, block_ids: Sequence[BlockId]
    ) -> TransferToken:
        token = TransferToken()
        engine = self._peers.get(peer)
        if engine is None:
            token.complete(PeerGone("no connection to the prefill worker's pool"))
        elif len(source.block_ids) != len(block_ids):
            token.complete(RemoteProtocolError("another number of blocks was offered"))
        elif not all(0 <= block_id < engine.pool.num_blocks for block_id in source.block_ids):
            token.complete(RemoteProtocolError("a block outside of the peer's pool"))
        else:
            receive = _Receive(
                engine,
                source,
                list(block_ids),
                self.pool.generations(block_ids),
                token,
                self._network.loop.now_s,
            )
            if self._is_two_sided:
                self._receives.setdefault(peer, deque()).append(receive)
                self.match(peer)
            else:
                self._start(receive)
        return token

    def match(self, peer: Incarnation) -> None:
        """Two-sided: start the receives whose sends are posted, too."""
        engine = self._peers.get(peer)
        if engine is None:
            return
        sends = engine._sends.get(self.pool.incarnation, deque())  # noqa: SLF001 - the other half
        receives = self._receives.get(peer, deque())
        while sends and receives:
            receive = receives.popleft()
            receive.send = sends.popleft()
            engine._running.setdefault(self.pool.incarnation, []).append(receive.send)  # noqa: SLF001
            self._start(receive)

    def fence(self, peer: Incarnation) -> None:
        """What arrived from this peer, and was not given up meanwhile, can be read now."""
        self.num_fences += 1
        for receive in self._invisible.pop(peer, []):
            if self._is_wanted(receive):
                self._write(receive)

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)
        for receive in self._receives.pop(peer, ()):
            receive.token.complete(PeerGone("the peer was disconnected"))
        for send in (*self._sends.pop(peer, ()), *self._running.pop(peer, ())):
            if not send.is_done():
                send.complete(PeerGone("the peer was disconnected"))

    def close(self) -> None:
        """Posted transfers end by themselves."""

    def _start(self, receive: _Receive) -> None:
        """Copy in the background: half, then the rest, then the outcome."""
        faults, rng = self._network.faults, self._network.rng
        first_s = rng.random() * COPY_S_MEAN
        rest_s = rng.random() * COPY_S_MEAN
        if faults.strikes("transfer fails"):
            self.process.call_later(first_s, self._end, receive, PeerError("an injected fault"))
            return
        if faults.strikes("transfer stalls"):
            rest_s = rng.random() * LATE_S_MAX
        elif faults.strikes("transfer is late"):
            first_s = rng.random() * LATE_S_MAX
        elif faults.strikes("transfer is slow"):
            first_s, rest_s = rng.random() * 0.3, rng.random() * 0.3
        half = len(receive.block_ids) // 2
        self.process.call_later(first_s, self._read, receive, 0, half)
        # What is in flight from a process that dies is lost with it.
        self.process.call_later(first_s + rest_s, self._finish, receive, half)

    def _read(self, receive: _Receive, start: int, end: int) -> None:
        words = receive.peer.pool.words_NS
        receive.rows += [words[block_id].copy() for block_id in receive.source.block_ids[start:end]]

    def _finish(self, receive: _Receive, start: int) -> None:
        peer, source = receive.peer, receive.source
        self._read(receive, start, len(receive.block_ids))
        if peer.process.is_dead and self._is_two_sided:
            self._end(receive, PeerGone("the peer is gone"))
        elif peer.pool.generations(map(BlockId, source.block_ids)) != list(source.generations):
            self._write(receive)  # torn as it is
            self._end(receive, KvChanged("the prefill worker gave the blocks up"))
        else:
            self._damage(receive)
            if self._is_wanted(receive):
                self._invisible.setdefault(peer.pool.incarnation, []).append(receive)
            else:
                self._write(receive)  # it cannot be called back: the blocks must be nobody's
            self._end(receive, None)

    def _end(self, receive: _Receive, error: NeuronDiError | None) -> None:
        self._network.note("transfer", self.process.name, len(receive.block_ids), error)
        token = receive.token
        token.transfer_s = self._network.loop.now_s - receive.started_s
        if error is None:
            token.kv_bytes = len(receive.block_ids) * self.pool.layout.block_bytes
        if receive.send is not None:
            send = receive.send
            receive.peer.process.call_soon(_complete, send, error)
        token.complete(error)

    def _is_wanted(self, receive: _Receive) -> bool:
        return self.pool.generations(receive.block_ids) == receive.generations

    def _damage(self, receive: _Receive) -> None:
        faults, rng = self._network.faults, self._network.rng
        if faults.strikes("transfer flips a bit"):
            row = rng.choice(receive.rows)
            row[rng.randrange(len(row))] ^= np.uint64(1 << rng.randrange(64))
        if len(receive.rows) > 1 and faults.strikes("transfer hits a wrong block"):
            here, there = rng.sample(range(len(receive.rows)), 2)
            receive.rows[here] = receive.rows[there]

    def _write(self, receive: _Receive) -> None:
        for block_id, row in zip(receive.block_ids, receive.rows, strict=True):
            self.pool.words_NS[block_id] = row


def _complete(token: TransferToken, error: NeuronDiError | None) -> None:
    """Unless a disconnection did it before."""
    if not token.is_done():
        token.complete(error)
