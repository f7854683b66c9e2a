"""A transfer engine between fake pools, on virtual time, with every way a copy can go wrong.

One-sided (the reader copies) or two-sided (a send for each receive, matched by its tag). Bytes
arrive in two parts, so that a source reused meanwhile is read torn; and what has arrived is
visible only after `fence`. Faults, each by its rate:

    transfer fails              an error, nothing was moved
    transfer stalls             half arrives, the rest seconds later
    transfer flips a bit        in the pool, after all went well
    transfer hits a wrong block one piece takes the place of another
    transfer is late            all of it seconds later
    transfer is slow
"""

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from neuron_di.errors import (
    KvChanged,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    PeerGone,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.kv import KvLayout, Memory
from neuron_di.testing.fake_model import FakePool
from neuron_di.testing.network import Network
from neuron_di.testing.virtual_loop import Process
from neuron_di.transfer import Receive, Send, TransferToken
from neuron_di.types import Incarnation
from neuron_di.wire import Region, ShmRegion

COPY_S_MEAN = 0.002
LATE_S_MAX = 8.0
UNCLAIMED_S = 30.0  # as TcpTimes has it: a send whose receive was given up while it was on its way


@dataclass(slots=True)
class Fabric:
    """What the wires between the pools know: whose engine each incarnation's is."""

    network: Network
    engines: dict[Incarnation, "FakeTransferEngine"] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Bytes of one block that lie together at both ends."""

    source: int
    destination: int
    num_bytes: int


@dataclass(slots=True)
class _Receive:
    peer: "FakeTransferEngine"
    order: Receive
    generations: list[int]  # of our blocks when it was posted
    token: TransferToken
    started_s: float
    send: TransferToken | None = None
    pieces: list[_Piece] = field(default_factory=list)
    rows: list[npt.NDArray[np.uint8]] = field(default_factory=list)  # what has been read


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
        # Two-sided: what was posted and waits for its other half, by peer and tag.
        self._receives: dict[Incarnation, dict[int, _Receive]] = {}
        self._sends: dict[Incarnation, dict[int, tuple[Send, TransferToken]]] = {}
        self._cancelled: dict[Incarnation, set[int]] = {}  # what comes for them is thrown away
        self._running: dict[Incarnation, list[TransferToken]] = {}  # sends that were matched
        self._invisible: dict[Incarnation, list[_Receive]] = {}
        self._is_closed = False
        fabric.engines[pool.incarnation] = self

    def local_region(self, peer: Incarnation) -> Region:  # noqa: ARG002
        return self.pool.region()

    def register(self, memory: Memory) -> None:
        """It is written by its address."""

    def connect(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:  # noqa: ARG002
        if not isinstance(region, ShmRegion) or region.incarnation != peer:
            raise StaleIncarnation("the pool is not the peer's")
        engine = self._fabric.engines.get(peer)
        if engine is None or engine.process.is_dead:
            raise PeerGone("the peer's pool cannot be reached")
        self._peers[peer] = engine

    def accept(self, peer: Incarnation, region: Region, layout: KvLayout) -> None:
        if self._is_two_sided:
            self.connect(peer, region, layout)

    def post_send(self, peer: Incarnation, send: Send) -> TransferToken:
        token = TransferToken()
        engine = self._peers.get(peer)
        if not self._is_two_sided:
            token.complete()
        elif engine is None or engine.process.is_dead:
            token.complete(PeerGone("no connection to the decode worker"))
        else:
            self._sends.setdefault(peer, {})[send.tag] = (send, token)
            engine.match(self.pool.incarnation)
            self.process.call_later(UNCLAIMED_S, self._end_unclaimed, peer, send.tag, token)
        return token

    def _end_unclaimed(self, peer: Incarnation, tag: int, token: TransferToken) -> None:
        if self._sends.get(peer, {}).get(tag, (None, None))[1] is token:
            del self._sends[peer][tag]
            token.complete(KvMissing("no receive was posted for this send"))

    def post_receive(self, peer: Incarnation, receive: Receive) -> TransferToken:
        token = TransferToken()
        engine = self._peers.get(peer)
        source = receive.source
        if engine is None:
            token.complete(PeerGone("no connection to the prefill worker's pool"))
        elif len(source.block_ids) != len(source.generations):
            token.complete(RemoteProtocolError("another number of blocks was offered"))
        elif not all(0 <= block_id < engine.pool.num_blocks for block_id in source.block_ids):
            token.complete(RemoteProtocolError("a block outside of the peer's pool"))
        else:
            posted = _Receive(
                engine,
                receive,
                self.pool.generations(receive.block_ids),
                token,
                self._network.loop.now_s,
            )
            if self._is_two_sided:
                self._receives.setdefault(peer, {})[receive.tag] = posted
                self.match(peer)
            else:
                self._start(posted)
        return token

    def match(self, peer: Incarnation) -> None:
        """Two-sided: start the receives whose sends are posted, too."""
        engine = self._peers.get(peer)
        if engine is None:
            return
        sends = engine._sends.get(self.pool.incarnation, {})  # noqa: SLF001 - the other half
        receives, cancelled = self._receives.get(peer, {}), self._cancelled.get(peer, set())
        for tag in [tag for tag in sends if tag in receives or tag in cancelled]:
            send, sent = sends.pop(tag)
            engine._running.setdefault(self.pool.incarnation, []).append(sent)  # noqa: SLF001
            if tag in receives:
                receive = receives.pop(tag)
                receive.send = sent
                if _offsets(send) != _offsets(receive.order):
                    raise LocalProtocolError("both ends must name the same bytes")
                self._start(receive)
            else:
                cancelled.discard(tag)
                engine.process.call_soon(_complete, sent, None)

    def cancel(self, peer: Incarnation, tag: int) -> None:
        """A receive whose send has come ends by itself, and soon."""
        receive = self._receives.get(peer, {}).pop(tag, None)
        if receive is not None:
            self._cancelled.setdefault(peer, set()).add(tag)
            self.process.call_soon(receive.token.complete, KvMissing("the receive was cancelled"))

    def fence(self, peer: Incarnation) -> None:
        """What arrived from this peer, and was not given up meanwhile, can be read now."""
        for receive in self._invisible.pop(peer, []):
            if self._is_wanted(receive):
                self._write(receive)

    def commit(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        engine = self._peers.get(peer)
        if engine is None:
            return PeerGone("the peer was disconnected")
        source = receive.source
        if engine.pool.generations(source.block_ids) != list(source.generations):
            return KvChanged("the prefill worker gave the blocks up")
        return None

    def abandon(self, peer: Incarnation, receive: Receive) -> NeuronDiError | None:
        return self.commit(peer, receive)  # which only looks

    def disconnect(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)
        self._cancelled.pop(peer, None)
        for receive in self._receives.pop(peer, {}).values():
            receive.token.complete(PeerGone("the peer was disconnected"))
        posted = [token for _, token in self._sends.pop(peer, {}).values()]
        for send in (*posted, *self._running.pop(peer, ())):
            if not send.is_done():
                send.complete(PeerGone("the peer was disconnected"))

    def close(self) -> None:
        """Posted transfers end by themselves, and touch nothing."""
        self._is_closed = True

    def _start(self, receive: _Receive) -> None:
        """Copy in the background: half, then the rest, then the outcome."""
        receive.pieces = _pieces(receive)
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
        half = len(receive.pieces) // 2
        self.process.call_later(first_s, self._read, receive, 0, half)
        # What is in flight from a process that dies is lost with it.
        self.process.call_later(first_s + rest_s, self._finish, receive, half)

    def _read(self, receive: _Receive, start: int, end: int) -> None:
        source = receive.peer.pool.all_bytes
        receive.rows += [
            source[piece.source : piece.source + piece.num_bytes].copy()
            for piece in receive.pieces[start:end]
        ]

    def _finish(self, receive: _Receive, start: int) -> None:
        peer, source = receive.peer, receive.order.source
        if self._is_closed:
            self._end(receive, PeerGone("this worker is closed"))
            return
        self._read(receive, start, len(receive.pieces))
        if peer.process.is_dead and self._is_two_sided:
            self._end(receive, PeerGone("the peer is gone"))
        elif peer.pool.generations(source.block_ids) != list(source.generations):
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
        self._network.note(
            "transfer", self.process.name, len(receive.order.source.block_ids), error
        )
        token = receive.token
        token.transfer_s = self._network.loop.now_s - receive.started_s
        if error is None:
            token.kv_bytes = receive.order.runs.num_bytes
        if receive.send is not None:
            send = receive.send
            receive.peer.process.call_soon(_complete, send, error)
        token.complete(error)

    def _is_wanted(self, receive: _Receive) -> bool:
        return self.pool.generations(receive.order.block_ids) == receive.generations

    def _damage(self, receive: _Receive) -> None:
        faults, rng = self._network.faults, self._network.rng
        if faults.strikes("transfer flips a bit"):
            row = rng.choice(receive.rows)
            row[rng.randrange(len(row))] ^= np.uint8(1 << rng.randrange(8))
        if len(receive.rows) > 1 and faults.strikes("transfer hits a wrong block"):
            here, there = rng.sample(range(len(receive.rows)), 2)
            if len(receive.rows[here]) == len(receive.rows[there]):
                receive.rows[here] = receive.rows[there]

    def _write(self, receive: _Receive) -> None:
        if self._is_closed:
            return
        address = receive.order.memory.address
        for piece, row in zip(receive.pieces, receive.rows, strict=True):
            ctypes.memmove(address + piece.destination, row.ctypes.data, piece.num_bytes)


def _offsets(half: Send | Receive) -> tuple[list[int], list[int]]:
    return half.runs.source_offsets.tolist(), half.runs.lengths.tolist()


def _pieces(receive: _Receive) -> list[_Piece]:
    """A receive's runs, cut where a block of the peer ends."""
    runs, block_bytes = receive.order.runs, receive.peer.pool.layout.block_bytes
    pieces: list[_Piece] = []
    columns = (runs.source_offsets, runs.destination_offsets, runs.lengths)
    for source, destination, length in zip(*(column.tolist() for column in columns), strict=True):
        at = 0
        while at < length:
            num_bytes = min(length - at, block_bytes - (source + at) % block_bytes)
            pieces.append(_Piece(source + at, destination + at, num_bytes))
            at += num_bytes
    return pieces


def _complete(token: TransferToken, error: NeuronDiError | None) -> None:
    """Unless a disconnection did it before."""
    if not token.is_done():
        token.complete(error)
