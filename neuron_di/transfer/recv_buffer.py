"""Decode's end of the hand-overs with one prefill worker: ask, wait, pull, confirm (N-41).

    lookup()    LookupAll -> (NotYet ->) Ready          or raises
    pull()      Pull, the transfer engine fills our blocks, fence, verify, commit, then Done
    cancel()    Abort, at once or as soon as a running copy has ended

Lives on the worker's event loop. What may happen when, and what follows, stands in the RECEIVER
table; this file only carries it out. Every wait has a deadline, and a peer that falls silent
fails every request that waits for it.

Next: neuron_di/wire/handoff.py
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

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
from neuron_di.kv import KvLayout, KvPool
from neuron_di.obs import get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_receiver import KvReceiver
from neuron_di.transfer.landing import Landing, Room
from neuron_di.transfer.lanes import Lane, LaneSet, is_of_lane, streams_over
from neuron_di.transfer.layer_receiver import LayerReceiver
from neuron_di.transfer.prefill_link import PrefillLink
from neuron_di.transfer.recv_entry import Arrival, Cause, Entry, Key, OnFail
from neuron_di.transfer.recv_words import cause_of, word_of
from neuron_di.transfer.signal_keys import SignalKeys
from neuron_di.transfer.signal_link import SignalTransport
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import FromPrefill, LayerReady, Never, NotYet, PeerAddress, Ready
from neuron_di.wire.handoff import ReceiverAction, ReceiverEvent, ReceiverState, receiver_step

_log = get_logger(__name__)

_NO_CAUSE = Cause()
_ACTION, _EVENT, _STATE = ReceiverAction, ReceiverEvent, ReceiverState


class RecvBuffer:
    """`is_broken` once the peer is lost: drop it and make another. Borrows the blocks it fills.

    `asked_s` is when a request last named this peer, by now_s(). `is_retired` once a transfer
    stalled: further requests go elsewhere, and it ends after those it has.
    """

    def __init__(
        self,
        local: LocalWorker,
        lanes: LaneSet,
        landing: Landing,
        transport: SignalTransport,
        pool: KvPool,
        peer: PeerAddress,
        *,
        limits: HandOverOptions,
        counters: HandOverCounters,
        connection: int,
        keys: SignalKeys | None,
        on_connected: "Callable[[RecvBuffer], None]",
        on_broken: "Callable[[RecvBuffer], None]",
    ) -> None:
        self._local = local
        self._lanes = lanes
        self._landing = landing
        self._pool = pool
        self._limits = limits
        self._counters = counters
        self._receiver: KvReceiver | None = None  # once connected
        self._layers: LayerReceiver | None = None  # likewise, where layers are streamed
        self._notify_connected = on_connected
        self._notify_broken = on_broken
        self.asked_s = now_s()
        self.is_retired = False
        self._loop = asyncio.get_running_loop()
        self._entries: dict[Key, Entry] = {}
        self._link = PrefillLink(
            local,
            lanes,
            landing,
            transport,
            peer,
            limits,
            counters,
            connection=connection,
            keys=keys,
            on_message=self._on_message,
            on_tick=self._on_tick,
            on_connected=self._on_connected,
            on_broken=self._on_broken,
        )

    @property
    def peer(self) -> PeerAddress:
        return self._link.peer

    @property
    def broken(self) -> NeuronDiError | None:
        """Why it is."""
        return self._link.broken

    @property
    def is_broken(self) -> bool:
        return self.broken is not None

    @property
    def is_connected(self) -> bool:
        """Whether blocks can be pulled now."""
        return self._link.is_connected and not self.is_broken

    @property
    def is_used(self) -> bool:
        """Whether a request is between its lookup and its end here."""
        return bool(self._entries)

    @property
    def lane(self) -> Lane | None:
        """What moves its KV; None before it is connected."""
        return self._link.lane

    @property
    def layout(self) -> KvLayout:
        """Of the peer's KV. Once connected."""
        assert self._receiver is not None, "nothing is ready before it is connected"
        return self._receiver.layout

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
        entry = self._entries[key] = Entry(self._loop.create_future(), on_fail)
        entry.streams = self._layers is not None
        self._happen(key, _EVENT.ASK)
        try:
            return await entry.promise
        except asyncio.CancelledError:
            self.cancel(*key, reason="the decode worker stopped waiting")
            raise

    def pull(self, ready: Ready, block_ids: Sequence[BlockId], *, num_held: int = 0) -> Arrival:
        """Start filling our blocks. Returns at once.

        `block_ids` are those that hold the KV of the whole prompt. The first `num_held` blocks of
        Ready are here already: what they hold is not moved. The token is done when nothing writes
        to the blocks any more; without an error the KV in them is the right one, byte for byte.
        """
        key = (ready.request_id, ready.attempt)
        entry = self._entries.get(key)
        if entry is None:  # it was lost a moment ago
            return Arrival.over(self._link.broken or KvMissing("the KV was given up"))
        receiver = self._receiver
        assert receiver is not None, "nothing is ready before it is connected"
        entry.block_ids, entry.num_held = block_ids, num_held
        self._pool.begin_fill(block_ids[receiver.num_kept(num_held) :])
        on_settled = partial(self._find_room, key, entry, receiver)
        if self._layers is None or not self._layers.claim(key, entry, on_settled):
            on_settled()
        return entry.arrived

    def _find_room(self, key: Key, entry: Entry, receiver: KvReceiver) -> None:
        assert entry.ready is not None, "only what was promised is pulled"
        if entry.is_streamed or receiver.is_direct:
            self._happen(key, _EVENT.ADMITTED)
            return
        num_bytes = receiver.landing_bytes(entry.ready, entry.num_held)
        # Whoever has room gives it back within its own deadline.
        timeout_s = self._limits.transfer_deadline_s(self._landing.num_bytes_asked)
        ask = self._landing.ask(num_bytes, timeout_s, partial(self._on_room, key, entry))
        if entry.state is _STATE.HELD:
            entry.ask = ask

    def cancel(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """The request is over on this side. A running copy ends by itself, then prefill hears."""
        self._happen((request_id, attempt), _EVENT.CANCEL, Cause(reason=reason))

    def close(self) -> None:
        """End with PeerGone for whoever waits."""
        self._link.break_off(PeerGone(f"connection to {self.peer.worker_id} was closed"))

    # Events.

    def _on_connected(self) -> None:
        receiver = self._receiver = KvReceiver(self._local, self._pool, self._link)
        if streams_over(receiver.lane, self._limits) and self._landing.num_bytes_open:
            self._layers = LayerReceiver(
                receiver, self._landing, self._limits, self._counters, self._link
            )
        self._notify_connected(self)

    def _on_room(self, key: Key, entry: Entry, answer: Room | NeuronDiError) -> None:
        """Room to land, or none, for a request that is held."""
        entry.ask = None
        if isinstance(answer, Room):
            entry.room = answer
            self._happen(key, _EVENT.ADMITTED)
        else:
            self._happen(key, _EVENT.CANCEL, Cause(error=answer, reason=answer.code))

    def _on_message(self, message: FromPrefill) -> None:
        if isinstance(message, NotYet):
            self._happen((message.request_id, message.attempt), _EVENT.NOT_YET)
        elif isinstance(message, Never):
            cause = cause_of(message, self.peer)
            self._happen((message.request_id, message.attempt), _EVENT.NEVER, cause)
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, LayerReady) and self._layers is not None:
            entry = self._entries.get((message.request_id, message.attempt))
            if entry is not None and entry.state is _STATE.ASKING:
                self._layers.take(message)

    def _on_ready(self, ready: Ready) -> None:
        key = (ready.request_id, ready.attempt)
        entry, receiver = self._entries.get(key), self._receiver
        is_ours = receiver is not None and receiver.is_ours(ready)
        if entry is not None and entry.state is _STATE.ASKING and not is_ours:
            self._counters.num_kv_mismatched += 1
            _log.error("kv_identity_mismatch", request=key[0], peer=self.peer.worker_id)
            error = KvCorrupt(f"{self.peer.worker_id} offered KV that is not this request's")
            if not entry.promise.done():
                entry.promise.set_exception(error)
            self._happen(key, _EVENT.CANCEL, Cause(reason=error.code))
            return
        self._happen(key, _EVENT.READY, Cause(ready=ready))

    def _on_tick(self) -> None:
        for key in list(self._entries):
            self._happen(key, _EVENT.TICK)
        if self.is_retired and not self._entries:
            self.close()

    def _on_broken(self, error: NeuronDiError) -> None:
        if self._entries or not isinstance(error, PeerGone):
            _log.warning("link_lost", peer=self.peer.worker_id, reason=error.message)
        for key in list(self._entries):
            self._happen(key, _EVENT.LINK_LOST, Cause(error=error))
        self._notify_broken(self)

    def _on_late(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None or self._receiver is None:
            return
        if self._receiver.cancel(entry):
            self._link.doubt(lambda: self._entries.get(key) is entry)
        if entry.state is _STATE.PULLING:  # else nobody waits for it
            _log.warning("transfer_stalled", request=key[0], peer=self.peer.worker_id)
            self.cancel(*key, reason="the transfer stalled")
            error = PeerTimeout("the transfer of the KV did not end in time")
            self._retire(error)
            entry.on_fail(key, error)

    def _on_placed(self, key: Key, entry: Entry, error: NeuronDiError | None) -> None:
        """What came layer by layer is in our blocks, or must be pulled as a whole."""
        if error is not None and entry.state is _STATE.PULLING:
            for action in (_ACTION.SEND_PULL, _ACTION.POST_RECEIVE):
                self._act(key, entry, action, _NO_CAUSE)
        else:  # blocks of who gave up may have changed since: that says nothing of the memory
            self._settle(key, entry, error and KvMissing("the request was given up"))

    def _on_received(self, key: Key, entry: Entry, copied: TransferToken) -> None:
        """The engine's copy ended. On the thread that ended it: the bytes are read right here."""
        error = copied.error()
        try:
            if error is None:
                assert self._receiver is not None, "it posted the receive"
                error = self._receiver.finish(entry, copied)
        except Exception as unexpected:
            error = LocalProtocolError(f"KV could not be verified: {type(unexpected).__name__}")
        self._loop.call_soon_threadsafe(self._settle, key, entry, error)

    def _settle(self, key: Key, entry: Entry, error: NeuronDiError | None) -> None:
        """Nothing writes to the blocks any more."""
        if isinstance(error, KvCorrupt):
            self._counters.num_kv_mismatched += 1
            _log.error("kv_mismatch", request=key[0], peer=self.peer.worker_id)
        if entry.late is not None:
            entry.late.cancel()
        if entry.room is not None:
            self._landing.free(entry.room)
        self._counters.kv_bytes_in_flight -= entry.num_bytes
        is_wanted = entry.state is _STATE.PULLING
        if error is None:
            self._happen(key, _EVENT.ARRIVED)
        else:
            self._happen(key, _EVENT.BROKE, Cause(error=error, reason=error.code))
        if not entry.arrived.is_done():  # whoever waits for the blocks only may have them now
            entry.arrived.complete(error if is_wanted else KvMissing("the request was given up"))
        if error is not None and is_of_lane(error) and not self.is_broken:
            lane = self._retire(error)
            self._link.break_off(PeerGone(f"{lane.name} failed: {error.message}"))

    def _retire(self, error: NeuronDiError) -> Lane:
        """The lane is in doubt: the next request makes a new link, by another way if any."""
        assert self._receiver is not None, "a receive was posted"
        lane = self._receiver.lane
        self._counters.num_lanes_failed += not self.is_retired
        self._lanes.suspect(lane, error)
        self.is_retired = True
        return lane

    # The table, carried out.

    def _happen(self, key: Key, event: ReceiverEvent, cause: Cause = _NO_CAUSE) -> None:
        """Move a hand-over by the table. Raises what the table forbids; nothing changed then."""
        entry = self._entries.get(key)
        if entry is None:
            _, actions = receiver_step(_STATE.OVER, event)
            self._counters.num_stale += len(actions)  # too late, or twice
            return
        before = entry.state
        entry.state, actions = receiver_step(before, event)
        if entry.state is _STATE.OVER:
            del self._entries[key]
            if self._layers is not None:
                self._layers.end(key)
            if entry.ask is not None:
                self._landing.cancel(entry.ask)
        for action in actions:
            self._act(key, entry, action, cause)
        never_pulled = before is _STATE.HELD and entry.state is _STATE.OVER and entry.block_ids
        if never_pulled and not entry.arrived.is_done():  # it waited for room to land
            entry.arrived.complete(cause.error or KvMissing("the request was given up"))

    def _act(self, key: Key, entry: Entry, action: ReceiverAction, cause: Cause) -> None:
        match action:
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
            case _:  # to say something
                if not entry.is_streamed or action is not _ACTION.SEND_PULL:
                    self._link.send(word_of(action, key, entry, cause, self.lane))

    def _post_receive(self, key: Key, entry: Entry) -> None:
        receiver = self._receiver
        assert receiver is not None, "nothing is ready before it is connected"
        if entry.is_streamed and self._layers is not None:
            self._layers.place(entry, partial(self._on_placed, key, entry))
            return
        copied = receiver.post(entry)
        # Transfers may wait for each other: what was posted before counts, too.
        self._counters.kv_bytes_in_flight += entry.num_bytes
        timeout_s = self._limits.transfer_deadline_s(self._counters.kv_bytes_in_flight)
        entry.late = self._loop.call_later(timeout_s, self._on_late, key)
        copied.on_done(lambda done: self._on_received(key, entry, done))

    def _fail(self, key: Key, entry: Entry, error: NeuronDiError | None) -> None:
        assert error is not None, "whatever fails a hand-over says why"
        if not entry.promise.done():
            entry.promise.set_exception(error)
        elif entry.state is _STATE.OVER and entry.block_ids:
            entry.arrived.complete(error)  # the engine ends the request
        else:
            entry.on_fail(key, error)
            if entry.state is _STATE.DRAINING and self._receiver is not None:
                self._receiver.cancel(entry)  # what is being written has until its deadline
