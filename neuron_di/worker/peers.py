"""A worker knows its peers: whom it connects to before a request asks, and who may connect to it.

    decode    connects to every prefill worker that fits and is ready, in the background
    prefill   lets in the keys of the decode workers that its directory has, and no others

The proxy decides who works with whom and names the prefill worker in each decode leg. A leg
whose peer is not connected yet connects by itself, as without a registry; it is only slower.
While the registry cannot be reached the directory keeps what it had, and so do both sides.

Next: neuron_di/transfer/connector.py
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from neuron_di.clock import Deadline, now_s
from neuron_di.config import WorkerAddressOptions
from neuron_di.errors import NeuronDiError, PeerError
from neuron_di.obs import LimitedLogger
from neuron_di.registry import KEEP_S, Directory, Supervised, WatchableRegistry
from neuron_di.transfer import Admission, KeyOwner, NeuronConnector, RecvBuffer
from neuron_di.types import Incarnation
from neuron_di.wire import WorkerRecord
from neuron_di.worker.worker import Worker

_log = LimitedLogger(__name__)

# A connection takes four descriptors, and a process may have 1,024 unless its operator says more.
# Of more prefill workers than this each decode worker takes others; the rest connect on demand.
FOLLOWED_MAX = 64
CONNECTING_MAX = 8  # at once: a handshake takes both ends a few ms, and streams run meanwhile
UNUSED_S = 10.0  # since the last request, until the connection to a peer that left is closed
RETRY_S_MIN, RETRY_S_MAX = 0.2, 5.0
_LOOK_INTERVAL_S = 0.05  # a crowd of changes is one
_LOOK_AT_USED_S = 1.0  # whether the last request of a peer that left has ended


@asynccontextmanager
async def following_peers(
    worker: Worker,
    registry: WatchableRegistry,
    *,
    addresses: WorkerAddressOptions | None = None,
    keep_s: float = KEEP_S,
) -> AsyncIterator[None]:
    """Keep this worker's connections, or its list of who may connect, as the registry says.

    `addresses` says where peers may be, `keep_s` how long one is kept whose key has vanished. A
    worker that computes whole requests has no peers.
    """
    connector = worker.connector
    if connector is None:
        yield
        return
    async with Directory(registry, addresses=addresses, keep_s=keep_s) as directory:
        if worker.prefill is None:
            connections = PeerConnections(worker.record(), connector, directory)
            follow = connections.follow
        elif connector.admission is not None:
            follow = _Admitting(connector.admission, directory).follow
        else:
            yield
            return
        async with Supervised("list of peers", follow):
            yield


class _Admitting:
    """Tells a prefill worker's door whose key is whose."""

    def __init__(self, admission: Admission, directory: Directory) -> None:
        self._admission = admission
        self._directory = directory

    async def follow(self) -> None:
        while True:
            epoch = self._directory.epoch
            self._admission.set_owners(
                {
                    record.signal_key: KeyOwner(record.worker_id, record.incarnation)
                    for record in self._directory.workers()
                    if record.role != "prefill" and record.signal_key is not None
                }
            )
            await self._directory.wait_changed(epoch)
            await asyncio.sleep(_LOOK_INTERVAL_S)


@dataclass(slots=True)
class _Retry:
    """A peer that was connected, or could not be."""

    due: Deadline
    wait_s: float = RETRY_S_MIN
    connected_s: float | None = None  # since when it is


class PeerConnections:
    """The connections of one decode worker. Borrows the connector, which owns them."""

    def __init__(self, own: WorkerRecord, connector: NeuronConnector, directory: Directory) -> None:
        self._own = own
        self._connector = connector
        self._directory = directory
        self._retries: dict[Incarnation, _Retry] = {}
        self._woken = asyncio.Event()

    async def follow(self) -> None:
        """Never ends."""
        self._connector.on_change = self._on_change
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                self._woken.clear()
                next_s = self.look()
                try:
                    async with asyncio.timeout(next_s):
                        await self._woken.wait()
                except TimeoutError:
                    continue
                await asyncio.sleep(_LOOK_INTERVAL_S)
        finally:
            self._connector.on_change = lambda _: None
            watch.cancel()

    def look(self) -> float | None:
        """Do what is to be done now. Returns the seconds until something will be, if so."""
        wanted = self._wanted()
        self._retries = {i: retry for i, retry in self._retries.items() if i in wanted}
        waits = [self._close_unwanted(wanted), self._connect(wanted)]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _wanted(self) -> dict[Incarnation, WorkerRecord]:
        """The prefill workers to be connected to."""
        fitting = [record for record in self._directory.workers() if self._fits(record)]
        if len(fitting) > FOLLOWED_MAX:
            fitting.sort(key=lambda record: self._spread(record.incarnation))
        return {record.incarnation: record for record in fitting[:FOLLOWED_MAX]}

    def _fits(self, record: WorkerRecord) -> bool:
        own = self._own
        return (
            record.role == "prefill"
            and record.state == "ready"
            and record.signal_port != 0
            and record.model_digest == own.model_digest
            and record.layout_digest == own.layout_digest
            and not set(record.transfer).isdisjoint(own.transfer)
            and self._connector.may_talk_to(record.peer_address())
        )

    def _spread(self, peer: Incarnation) -> float:
        """From 0 to 1: always the same for these two processes, and another for every two."""
        return zlib.crc32(f"{self._own.incarnation} {peer}".encode()) / (1 << 32)

    def _close_unwanted(self, wanted: dict[Incarnation, WorkerRecord]) -> float | None:
        next_s: float | None = None
        for buffer in list(self._connector.connection_dict.values()):
            if buffer.peer.incarnation in wanted or not buffer.is_connected:
                continue  # whatever is connecting ends that by itself
            left_s = buffer.asked_s + UNUSED_S - now_s()
            if buffer.is_used:
                left_s = max(left_s, _LOOK_AT_USED_S)
            if left_s <= 0:
                buffer.close()
            else:
                next_s = left_s if next_s is None else min(left_s, next_s)
        return next_s

    def _connect(self, wanted: dict[Incarnation, WorkerRecord]) -> float | None:
        buffers = self._connector.connection_dict.values()
        known = {buffer.peer.incarnation for buffer in buffers}
        num_connecting = sum(not buffer.is_connected for buffer in buffers)
        next_s: float | None = None
        for record in wanted.values():
            if record.incarnation in known:
                continue
            retry = self._retries.get(record.incarnation)
            wait_s = retry.due.remaining_s() if retry is not None else 0.0
            if wait_s > 0:
                next_s = wait_s if next_s is None else min(wait_s, next_s)
            elif num_connecting < CONNECTING_MAX:  # else the next one that ends wakes us
                num_connecting += 1
                try:
                    self._connector.buffer_for(record.peer_address())
                except PeerError as error:
                    num_connecting -= 1
                    self._put_off(record.incarnation, record.worker_id, error)
                    next_s = RETRY_S_MIN
        return next_s

    def _on_change(self, buffer: RecvBuffer) -> None:
        incarnation = buffer.peer.incarnation
        if buffer.broken is not None:
            self._put_off(incarnation, buffer.peer.worker_id, buffer.broken)
        elif (retry := self._retries.get(incarnation)) is not None:
            retry.connected_s = now_s()
        self._woken.set()

    def _put_off(self, incarnation: Incarnation, worker_id: str, error: NeuronDiError) -> None:
        """Try again later, and later still where that did not help for long."""
        _log.info("peer_lost", peer=worker_id, reason=error.message)
        before = self._retries.get(incarnation)
        wait_s = RETRY_S_MIN
        if before is not None and now_s() - (before.connected_s or now_s()) < RETRY_S_MAX:
            wait_s = min(2 * before.wait_s, RETRY_S_MAX)
        # Many lose one peer at the same time, and should not all be back at the same time.
        due = Deadline.after(wait_s * (1 - self._spread(incarnation) / 2))
        self._retries[incarnation] = _Retry(due, wait_s)

    async def _watch(self) -> None:
        epoch = self._directory.epoch
        while True:
            epoch = await self._directory.wait_changed(epoch)
            self._woken.set()
