"""Decode's end of the hand-overs with one prefill worker: ask, wait, pull, confirm (seed N-41).

    lookup()    LookupAll -> (NotYet ->) Ready          or raises
    pull()      Pull, the transfer engine fills our blocks, fence, verify, then Done
    cancel()    Abort, at once or as soon as a running copy has ended

Lives on the worker's event loop. What may happen when, and what follows, stands in the RECEIVER
table; this file only carries it out. Every wait has a deadline, and a peer that falls silent
fails every request that waits for it.

Next: neuron_di/wire/handoff.py
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from neuron_di.clock import Deadline, now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import (
    DeadlinePassed,
    KvCorrupt,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerGone,
    PeerTimeout,
)
from neuron_di.kv import BlockMemory, KvIdentity, block_digests
from neuron_di.obs import get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.prefill_link import PrefillLink
from neuron_di.transfer.signal_keys import SignalKeys
from neuron_di.transfer.signal_link import SignalTransport
from neuron_di.transfer.transfer_engine import BlockSource, TransferEngine, TransferToken
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import (
    Abort,
    Done,
    FromPrefill,
    Hold,
    LookupAll,
    Never,
    NotYet,
    PeerAddress,
    Pull,
    Ready,
)
from neuron_di.wire.handoff import ReceiverAction, ReceiverEvent, ReceiverState, receiver_step
from neuron_di.wire.signal import REASON_CHARS_MAX

_log = get_logger(__name__)

Key = tuple[RequestId, int]
# Called at most once per request, between its Ready and its arrival: it will not arrive.
OnFail = Callable[[Key, NeuronDiError], None]

_ACTION, _EVENT, _STATE = ReceiverAction, ReceiverEvent, ReceiverState


@dataclass(slots=True)
class _Entry:
    promise: asyncio.Future[Ready]
    on_fail: OnFail
    state: ReceiverState = ReceiverState.UNKNOWN
    ready: Ready | None = None
    block_ids: Sequence[BlockId] = ()
    arrived: TransferToken = field(default_factory=TransferToken)  # what the engine polls
    late: asyncio.TimerHandle | None = None


@dataclass(frozen=True, slots=True)
class _Cause:
    """What an event brings along for the actions that it sets off."""

    error: NeuronDiError | None = None
    reason: str = ""
    ready: Ready | None = None


class RecvBuffer:
    """`is_broken` once the peer is lost: drop it and make another. Borrows the blocks it fills.

    `asked_s` is when a request last named this peer, by now_s().
    """

    def __init__(
        self,
        local: LocalWorker,
        transfer: TransferEngine,
        transport: SignalTransport,
        memory: BlockMemory,
        peer: PeerAddress,
        *,
        limits: HandOverOptions,
        counters: HandOverCounters,
        connection: int,
        block_bytes: int,
        keys: SignalKeys | None,
        on_connected: "Callable[[RecvBuffer], None]",
        on_broken: "Callable[[RecvBuffer], None]",
    ) -> None:
        self._local = local
        self._transfer = transfer
        self._memory = memory
        self._limits = limits
        self._counters = counters
        self._block_bytes = block_bytes
        self._notify_broken = on_broken
        self.asked_s = now_s()
        self._loop = asyncio.get_running_loop()
        self._entries: dict[Key, _Entry] = {}
        self._link = PrefillLink(
            local,
            transfer,
            transport,
            peer,
            limits,
            counters,
            connection=connection,
            keys=keys,
            on_message=self._on_message,
            on_tick=self._on_tick,
            on_connected=lambda: on_connected(self),
            on_broken=self._on_broken,
        )

    @property
    def peer(self) -> PeerAddress:
        return self._link.peer

    @property
    def is_broken(self) -> bool:
        return self._link.broken is not None

    @property
    def broken(self) -> NeuronDiError | None:
        """Why it is."""
        return self._link.broken

    @property
    def is_connected(self) -> bool:
        """Whether blocks can be pulled now."""
        return self._link.is_connected and not self.is_broken

    @property
    def is_used(self) -> bool:
        """Whether a request is between its lookup and its end here."""
        return bool(self._entries)

    async def connect(self) -> None:
        """Return when blocks can be pulled; else PeerGone, PeerTimeout, PeerRefused, …"""
        await self._link.connect()

    async def lookup(
        self, request_id: RequestId, attempt: int, deadline: Deadline, on_fail: OnFail
    ) -> Ready:
        """Wait until prefill is complete. KvMissing: it never will be; PeerGone; DeadlinePassed.

        From then on the KV is held for us; `cancel` gives it up, and `on_fail` says so if it is
        lost before it arrived.
        """
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self.connect()
                return await self._promise((request_id, attempt), on_fail)
        except TimeoutError:  # the time was the request's own: that is nobody's fault
            raise DeadlinePassed(
                f"prefill worker {self.peer.worker_id} was not ready before the deadline"
            ) from None

    async def _promise(self, key: Key, on_fail: OnFail) -> Ready:
        if key in self._entries:
            raise LocalProtocolError(f"request {key[0]} is looked up already")
        entry = self._entries[key] = _Entry(self._loop.create_future(), on_fail)
        self._happen(key, _EVENT.ASK)
        try:
            return await entry.promise
        except asyncio.CancelledError:
            self.cancel(*key, reason="the decode worker stopped waiting")
            raise

    def pull(self, ready: Ready, block_ids: Sequence[BlockId]) -> TransferToken:
        """Start filling our blocks. Returns at once.

        The token is done when nothing writes to the blocks any more; without an error the KV in
        them is the right one, byte for byte.
        """
        key = (ready.request_id, ready.attempt)
        entry = self._entries.get(key)
        if entry is None:  # it was lost a moment ago
            token = TransferToken()
            token.complete(self._link.broken or KvMissing("the KV was given up"))
            return token
        entry.block_ids = block_ids
        self._happen(key, _EVENT.ADMITTED)
        return entry.arrived

    def cancel(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """The request is over on this side. A running copy ends by itself, then prefill hears."""
        self._happen((request_id, attempt), _EVENT.CANCEL, _Cause(reason=reason))

    def close(self) -> None:
        """End with PeerGone for whoever waits."""
        self._link.break_off(PeerGone(f"connection to {self.peer.worker_id} was closed"))

    # Events.

    def _on_message(self, message: FromPrefill) -> None:
        if isinstance(message, NotYet):
            self._happen((message.request_id, message.attempt), _EVENT.NOT_YET)
        elif isinstance(message, Never):
            error = KvMissing(
                f"prefill worker {self.peer.worker_id} has no KV to give: {message.reason}"
            )
            cause = _Cause(error=error, reason=message.reason)
            self._happen((message.request_id, message.attempt), _EVENT.NEVER, cause)
        elif isinstance(message, Ready):
            self._on_ready(message)

    def _on_ready(self, ready: Ready) -> None:
        key = (ready.request_id, ready.attempt)
        entry = self._entries.get(key)
        if entry is not None and entry.state is _STATE.ASKING and not self._is_ours(ready):
            self._counters.num_kv_mismatched += 1
            _log.error("kv_identity_mismatch", request=key[0], peer=self.peer.worker_id)
            error = KvCorrupt(f"{self.peer.worker_id} offered KV that is not this request's")
            if not entry.promise.done():
                entry.promise.set_exception(error)
            self._happen(key, _EVENT.CANCEL, _Cause(reason=error.code))
            return
        self._happen(key, _EVENT.READY, _Cause(ready=ready))

    def _is_ours(self, ready: Ready) -> bool:
        """Whether Ready comes from the process and the layout that were asked for."""
        return (
            ready.worker_id == self.peer.worker_id
            and ready.incarnation == self.peer.incarnation
            and ready.layout_digest == self._local.layout_digest
            and len(ready.block_ids) == len(ready.generations) == len(ready.digests)
        )

    def _on_tick(self) -> None:
        for key in list(self._entries):
            self._happen(key, _EVENT.TICK)

    def _on_broken(self, error: NeuronDiError) -> None:
        if self._entries or not isinstance(error, PeerGone):
            _log.warning("link_lost", peer=self.peer.worker_id, reason=error.message)
        for key in list(self._entries):
            self._happen(key, _EVENT.LINK_LOST, _Cause(error=error))
        self._notify_broken(self)

    def _on_late(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        self._doubt_sends()
        if entry.state is _STATE.PULLING:  # else nobody waits for it
            _log.warning("transfer_stalled", request=key[0], peer=self.peer.worker_id)
            self.cancel(*key, reason="the transfer stalled")
            entry.on_fail(key, PeerTimeout("the transfer of the KV did not end in time"))

    def _on_received(self, key: Key, entry: _Entry, copied: TransferToken) -> None:
        """The engine's copy ended. On the thread that ended it: the bytes are read right here."""
        error = copied.error()
        try:
            if error is None:
                error = self._verify(entry, copied)
        except Exception as unexpected:
            error = LocalProtocolError(f"KV could not be verified: {type(unexpected).__name__}")
        self._loop.call_soon_threadsafe(self._settle, key, entry, error)

    def _verify(self, entry: _Entry, copied: TransferToken) -> NeuronDiError | None:
        """Compare every received byte with what the prefill worker computed."""
        start_s = now_s()
        ready = entry.ready
        assert ready is not None, "nothing is copied before Ready"
        self._transfer.fence(self.peer.incarnation)
        identity = KvIdentity(
            worker_id=self.peer.worker_id,
            incarnation=self.peer.incarnation,
            request_id=ready.request_id,
            attempt=ready.attempt,
            layout_digest=self._local.layout_digest,
        )
        is_equal = block_digests(self._memory, entry.block_ids, identity) == ready.digests
        entry.arrived.kv_bytes, entry.arrived.transfer_s = copied.kv_bytes, copied.transfer_s
        entry.arrived.verify_s = now_s() - start_s
        return None if is_equal else KvCorrupt("the received KV is not what was promised")

    def _settle(self, key: Key, entry: _Entry, error: NeuronDiError | None) -> None:
        """Nothing writes to the blocks any more."""
        if isinstance(error, KvCorrupt):
            self._counters.num_kv_mismatched += 1
            _log.error("kv_mismatch", request=key[0], peer=self.peer.worker_id)
        if entry.late is not None:
            entry.late.cancel()
        self._counters.kv_bytes_in_flight -= len(entry.block_ids) * self._block_bytes
        is_wanted = entry.state is _STATE.PULLING
        if error is None:
            self._happen(key, _EVENT.ARRIVED)
        else:
            self._happen(key, _EVENT.BROKE, _Cause(error=error, reason=error.code))
        if not entry.arrived.is_done():  # whoever waits for the blocks only may have them now
            entry.arrived.complete(error if is_wanted else KvMissing("the request was given up"))

    # The table, carried out.

    def _happen(self, key: Key, event: ReceiverEvent, cause: _Cause = _Cause()) -> None:
        """Move a hand-over by the table. Raises what the table forbids; nothing changed then."""
        entry = self._entries.get(key)
        if entry is None:
            _, actions = receiver_step(_STATE.OVER, event)
            self._counters.num_stale += len(actions)  # too late, or twice
            return
        entry.state, actions = receiver_step(entry.state, event)
        if entry.state is _STATE.OVER:
            del self._entries[key]
        for action in actions:
            self._act(key, entry, action, cause)

    def _act(self, key: Key, entry: _Entry, action: ReceiverAction, cause: _Cause) -> None:
        request_id, attempt = key
        match action:
            case _ACTION.SEND_LOOKUP:
                self._link.send(LookupAll(request_id=request_id, attempt=attempt))
            case _ACTION.SEND_HOLD:
                self._link.send(Hold(request_id=request_id, attempt=attempt))
            case _ACTION.SEND_PULL:
                self._link.send(
                    Pull(request_id=request_id, attempt=attempt, block_ids=list(entry.block_ids))
                )
            case _ACTION.SEND_DONE:
                arrived = entry.arrived
                self._link.send(
                    Done(
                        request_id=request_id,
                        attempt=attempt,
                        kv_bytes=arrived.kv_bytes,
                        transfer_s=arrived.transfer_s,
                    )
                )
            case _ACTION.SEND_ABORT:
                reason = (cause.reason or "the request was given up")[:REASON_CHARS_MAX]
                self._link.send(Abort(request_id=request_id, attempt=attempt, reason=reason))
            case _ACTION.POST_RECEIVE:
                self._post_receive(key, entry)
            case _ACTION.PROMISE:
                entry.ready = cause.ready
                if not entry.promise.done():
                    assert cause.ready is not None, "READY brings it"
                    entry.promise.set_result(cause.ready)
            case _ACTION.DELIVER:
                entry.arrived.complete()
            case _ACTION.FAIL:
                self._fail(key, entry, cause.error)
            case _ACTION.COUNT_STALE:
                self._counters.num_stale += 1

    def _post_receive(self, key: Key, entry: _Entry) -> None:
        assert entry.ready is not None, "only what was promised is pulled"
        source = BlockSource(entry.ready.block_ids, entry.ready.generations)
        # Transfers may wait for each other: what was posted before counts, too.
        self._counters.kv_bytes_in_flight += len(entry.block_ids) * self._block_bytes
        timeout_s = self._limits.transfer_deadline_s(self._counters.kv_bytes_in_flight)
        entry.late = self._loop.call_later(timeout_s, self._on_late, key)
        try:
            copied = self._transfer.post_receive(self.peer.incarnation, source, entry.block_ids)
        except Exception as bug:  # a receive that was never posted must not be waited for
            copied = TransferToken()
            copied.complete(LocalProtocolError(f"no receive was posted: {type(bug).__name__}"))
        copied.on_done(lambda done: self._on_received(key, entry, done))
        if isinstance(error := copied.error(), PeerGone):
            # No way to the peer's pool: the next request makes a new link.
            self._loop.call_soon(self._link.break_off, error)

    def _fail(self, key: Key, entry: _Entry, error: NeuronDiError | None) -> None:
        assert error is not None, "whatever fails a hand-over says why"
        if not entry.promise.done():
            entry.promise.set_exception(error)
        elif entry.state is _STATE.OVER and entry.block_ids:
            entry.arrived.complete(error)  # the engine ends the request
        else:
            entry.on_fail(key, error)
            if entry.state is _STATE.DRAINING:
                self._doubt_sends()

    def _doubt_sends(self) -> None:
        """A receive waits for a send that may never come, and every later one behind it."""
        if not self._transfer.is_one_sided:
            self._loop.call_soon(self._link.break_off, PeerGone("a posted receive lost its send"))
