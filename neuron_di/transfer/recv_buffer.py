"""Decode's end of the hand-overs with one prefill worker: ask, wait, pull, confirm (seed N-41).

    connect()   Handshake -> Welcome, KvMapInit -> KvMap, transfer engine connected
    lookup()    LookupAll -> (NotYet ->) Ready          or raises
    pull()      Pull, then the transfer engine fills our blocks, then Done

Lives on the worker's event loop. Waits have deadlines; a peer that falls silent fails every
request that waits for it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import (
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.obs import get_logger
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.signal_link import SignalSocket, connect_dealer, endpoint
from neuron_di.transfer.transfer_engine import BlockSource, TransferEngine, TransferToken
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Abort,
    Done,
    FromDecode,
    Handshake,
    Hold,
    KvMap,
    KvMapInit,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    PeerAddress,
    Ping,
    Pull,
    Ready,
    Refused,
    Region,
    Welcome,
    encode_msgpack,
    from_prefill_decoder,
)

_log = get_logger(__name__)

PING_INTERVAL_S = 1.0

Key = tuple[RequestId, int]


class RecvBuffer:
    """Owns one DEALER socket. `is_broken` once the peer is lost: drop it and make another."""

    def __init__(
        self,
        local: LocalWorker,
        transfer: TransferEngine,
        context: "zmq.Context[zmq.Socket[bytes]]",
        peer: PeerAddress,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
    ) -> None:
        self._local = local
        self._transfer = transfer
        self._peer = peer
        self._connect_timeout_s = connect_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._loop = asyncio.get_running_loop()
        self._address = endpoint(peer.signal_host, peer.signal_port)
        socket = connect_dealer(
            context, peer.signal_host, peer.signal_port, local.incarnation.encode()
        )
        self._link = SignalSocket(socket, self._on_frames)
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()
        self._kv_map: asyncio.Future[KvMap] = self._loop.create_future()
        self._waiting: dict[Key, asyncio.Future[Ready]] = {}
        self._held: set[Key] = set()  # from Ready to the end of the pull
        self._pulling: dict[Key, TransferToken] = {}
        self._broken: NeuronDiError | None = None
        self._last_heard_s = now_s()
        self._num_pings = 0
        self._connecting = self._loop.create_task(self._connect())
        # Its error reaches everybody through connect(); that nobody called it is no warning.
        self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._pinger: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> PeerAddress:
        return self._peer

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    async def connect(self) -> None:
        """Return when blocks can be pulled. Any number of callers; one of them going is fine.

        PeerGone, PeerTimeout, PeerRefused or StaleIncarnation when that cannot be.
        """
        await asyncio.shield(self._connecting)

    async def lookup(self, request_id: RequestId, attempt: int, deadline: Deadline) -> Ready:
        """Wait until prefill is complete. KvMissing if it never will be; PeerTimeout; PeerGone."""
        await self.connect()
        key = (request_id, attempt)
        if key in self._waiting:
            raise LocalProtocolError(f"request {request_id} is looked up already")
        if self._broken is not None:
            raise self._broken
        future = self._waiting[key] = self._loop.create_future()
        try:
            self._send(LookupAll(request_id=request_id, attempt=attempt))
            async with asyncio.timeout(deadline.remaining_s()):
                ready: Ready = await future
                self._held.add(key)
                return ready
        except TimeoutError:
            self.abort(request_id, attempt, "the decode worker's deadline passed")
            raise PeerTimeout(
                f"prefill worker {self._peer.worker_id} was not ready before the deadline"
            ) from None
        except asyncio.CancelledError:
            self.abort(request_id, attempt, "cancelled")
            raise
        finally:
            del self._waiting[key]

    def pull(self, ready: Ready, block_ids: Sequence[BlockId]) -> TransferToken:
        """Start filling our blocks. Returns at once; on success Done is sent, else Abort."""
        key = (ready.request_id, ready.attempt)
        if self._broken is not None:
            token = TransferToken()
            token.complete(self._broken)
            return token
        self._send(
            Pull(request_id=ready.request_id, attempt=ready.attempt, block_ids=list(block_ids))
        )
        source = BlockSource(ready.block_ids, ready.generations)
        token = self._transfer.post_receive(self._peer.incarnation, source, block_ids)
        if isinstance(error := token.error(), PeerGone):
            self._break(error)  # no way to the peer's pool: the next request makes a new one
        self._pulling[key] = token
        token.on_done(lambda done: self._loop.call_soon_threadsafe(self._on_pulled, key, done))
        return token

    def abort(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """Tell prefill that its KV is not wanted any more. A running copy ends by itself."""
        self._held.discard((request_id, attempt))
        if self._broken is None:
            self._send(Abort(request_id=request_id, attempt=attempt, reason=reason))

    def close(self) -> None:
        """End with PeerGone for whoever waits."""
        self._break(PeerGone(f"connection to {self._peer.worker_id} was closed"))

    async def _connect(self) -> None:
        incarnation = self._peer.incarnation
        try:
            region = await self._shake_hands()
            # Mapping or connecting may block, so neither this loop nor the engine does it.
            await self._loop.run_in_executor(None, self._transfer.connect, incarnation, region)
            if self._broken is not None:  # meanwhile
                self._transfer.disconnect(incarnation)
                raise self._broken
        except NeuronDiError as error:
            self._break(error)
            raise
        except Exception as error:
            self._break(LocalProtocolError(f"connecting failed: {error!r}"))
            raise
        _log.info("connected", peer=self._peer.worker_id, address=self._address)
        self._pinger = self._loop.call_later(PING_INTERVAL_S, self._ping)

    async def _shake_hands(self) -> Region:
        """Say who we are, and learn where the peer's pool lies."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                self._send_handshake()
                await self._welcome
                self._send(KvMapInit(region=self._transfer.local_region()))
                return (await self._kv_map).region
        except TimeoutError:
            raise PeerTimeout(
                f"no answer from prefill worker {self._peer.worker_id} at {self._address} "
                f"within {self._connect_timeout_s:g} s"
            ) from None

    def _send_handshake(self) -> None:
        local = self._local
        self._send(
            Handshake(
                version=SIGNAL_VERSION,
                worker_id=local.worker_id,
                incarnation=local.incarnation,
                expects=self._peer.incarnation,
                model_digest=local.model_digest,
                layout_digest=local.layout_digest,
            )
        )

    def _on_frames(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"message of {len(frames)} frames")
            message = from_prefill_decoder.decode(frames[0])
        except RemoteProtocolError as error:
            self._break(error)
            return
        self._last_heard_s = now_s()
        if isinstance(message, Welcome):
            if not self._welcome.done():
                self._welcome.set_result(message)
        elif isinstance(message, KvMap):
            if not self._kv_map.done():
                self._kv_map.set_result(message)
        elif isinstance(message, Refused):
            kind = StaleIncarnation if message.is_stale else PeerRefused
            self._break(kind(f"{self._peer.worker_id} refused: {message.reason}"))
        elif isinstance(message, Malformed):
            self._break(RemoteProtocolError(f"{self._peer.worker_id}: {message.reason}"))
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Never):
            self._on_never((message.request_id, message.attempt), message.reason)
        elif isinstance(message, NotYet):
            pass  # Ready follows by itself

    def _on_ready(self, ready: Ready) -> None:
        future = self._waiting.get((ready.request_id, ready.attempt))
        if future is not None and not future.done():
            future.set_result(ready)

    def _on_never(self, key: Key, reason: str) -> None:
        future = self._waiting.get(key)
        if future is not None and not future.done():
            future.set_exception(
                KvMissing(f"prefill worker {self._peer.worker_id} has no KV to give: {reason}")
            )

    def _on_pulled(self, key: Key, token: TransferToken) -> None:
        self._held.discard(key)
        if self._pulling.pop(key, None) is None or self._broken is not None:
            return
        request_id, attempt = key
        if (error := token.error()) is not None:
            self._send(Abort(request_id=request_id, attempt=attempt, reason=error.code))
        else:
            self._send(
                Done(
                    request_id=request_id,
                    attempt=attempt,
                    kv_bytes=token.kv_bytes,
                    transfer_s=token.transfer_s,
                )
            )

    def _ping(self) -> None:
        self._pinger = self._loop.call_later(PING_INTERVAL_S, self._ping)
        silence_s = now_s() - self._last_heard_s
        if silence_s > self._silence_timeout_s:
            self._break(PeerGone(f"{self._peer.worker_id} said nothing for {silence_s:.1f} s"))
            return
        self._num_pings += 1
        self._send(Ping(sequence=self._num_pings))
        for request_id, attempt in self._waiting:  # a Ready may have been lost with a connection
            self._send(LookupAll(request_id=request_id, attempt=attempt))
        for request_id, attempt in self._held:
            self._send(Hold(request_id=request_id, attempt=attempt))

    def _break(self, error: NeuronDiError) -> None:
        """The one end of this buffer: whoever waits gets the error, the socket closes."""
        if self._broken is not None:
            return
        self._broken = error
        if not isinstance(error, PeerGone) or self._waiting:
            _log.warning("link_lost", peer=self._peer.worker_id, reason=error.message)
        if self._pinger is not None:
            self._pinger.cancel()
        futures: list[asyncio.Future[Any]] = [self._welcome, self._kv_map, *self._waiting.values()]
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # a future that nobody awaits is no warning
        self._transfer.disconnect(self._peer.incarnation)
        self._link.close()

    def _send(self, message: FromDecode) -> None:
        # Not sent means that the queue to a lost peer is full: the silence deadline ends it.
        if not self._link.send([encode_msgpack(message)]):
            _log.info("signal_unsent", kind=type(message).__name__)
