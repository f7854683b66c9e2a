"""Prefill's end of every hand-over: what is parked, who asked for it, who has it (N-41).

One SendBuffer serves all decode workers on one link (N-44). It lives on the worker's event
loop; nothing here blocks, and the engine's thread never enters. What may happen when, and what
follows, stands in the SENDER table; this file only carries it out.

Next: neuron_di/wire/handoff.py
"""

import asyncio
from collections.abc import Callable

from neuron_di.clock import Deadline
from neuron_di.config import HandOverOptions
from neuron_di.core.remembered import Remembered
from neuron_di.errors import (
    KvExpired,
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    PeerError,
    RemoteProtocolError,
    StaleAttempt,
)
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.door import Guard
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.kv_sender import KvSender
from neuron_di.transfer.lanes import LaneSet
from neuron_di.transfer.layer_sender import LayerSender
from neuron_di.transfer.send_entry import Cause, Entry, Key, gives_way, never, unless_done
from neuron_di.transfer.send_peers import Identity, Peer, SendPeers
from neuron_di.transfer.signal_link import SignalTransport
from neuron_di.transfer.transfer_engine import TransferToken
from neuron_di.types import Incarnation, RequestId
from neuron_di.wire import (
    Abort,
    Done,
    FromPrefill,
    Handshake,
    Hold,
    KvMapInit,
    LookupAll,
    Malformed,
    NotYet,
    Ping,
    Pong,
    Pull,
    PullLayer,
    Ready,
    Refused,
    encode_msgpack,
    from_decode_decoder,
)
from neuron_di.wire.handoff import SenderAction, SenderEvent, SenderState, sender_step
from neuron_di.wire.signal import REASON_CHARS_MAX

_log = get_logger(__name__)
_limited = LimitedLogger(__name__)

SWEEP_INTERVAL_S = 1.0

# Called once per parked request: the peer's Done, or why the KV was given up. Its blocks may be
# used again once `held_by`, if there is one, is done.
OnEnd = Callable[[Key, Done | NeuronDiError, TransferToken | None], None]

_NO_CAUSE = Cause()
_ACTION, _EVENT, _STATE = SenderAction, SenderEvent, SenderState
_GIVEN_UP = (SenderState.RECALLED, SenderState.OVER)


class SendBuffer:
    """Owns its end of the link and the table of hand-overs; borrows the parked blocks.

    `allowed_peer` is the fixed decode worker's id in static mode (N-42); None takes any. With a
    `guard` the link is encrypted, and open to whom it lets in.
    """

    def __init__(
        self,
        local: LocalWorker,
        lanes: LaneSet,
        transport: SignalTransport,
        *,
        host: str,
        port: int,
        limits: HandOverOptions,
        counters: HandOverCounters,
        on_end: OnEnd,
        allowed_peer: str | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._lanes = lanes
        self._sender = KvSender(local, lanes)
        self._limits = limits
        self._counters = counters
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._peers = SendPeers(
            local,
            allowed_peer=allowed_peer,
            admission=guard.admission if guard is not None else None,
            peers_max=limits.peers_max,
            silence_s=limits.peer_silence_s,
            on_lost=self._on_peer_lost,
        )
        self._link, self.port = transport.bind(host, port, self._on_frames, guard=guard)
        self.layers = LayerSender(local, lanes, self._send, limits.stream_layers)
        self.lookup_dict: dict[Key, Entry] = {}
        self._over: Remembered[Key, str] = Remembered(limits.remembered_max)  # and why
        self._latest: Remembered[RequestId, int] = Remembered(limits.remembered_max)  # attempt
        self._accepting: set[asyncio.Task[None]] = set()
        self._sweep_interval_s = min(SWEEP_INTERVAL_S, limits.kv_lease_s / 4)
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)

    @property
    def peers(self) -> list[str]:
        """Worker ids of the decode workers that shook hands and still talk."""
        return self._peers.worker_ids()

    def expect(self, request_id: RequestId, attempt: int) -> None:
        """A prefill was accepted: lookups for it are "not yet" until park() or drop().

        StaleAttempt when a later attempt is known, KvMissing when this one was here before, or
        is over because its decode worker gave up: nobody would pull it.
        """
        if attempt < self._latest.get(request_id, 0):
            raise StaleAttempt("a later attempt at this request is known")
        self._latest.set(request_id, attempt)
        for earlier in range(attempt):
            self.drop(request_id, earlier, reason="a later attempt took over")
        self._happen((request_id, attempt), _EVENT.EXPECT)
        self.layers.begin((request_id, attempt))

    def park(self, ready: Ready) -> None:
        """The prefill is complete: its blocks may be pulled until the lease ends.

        StaleAttempt when a later attempt was expected in the meantime.
        """
        key = (ready.request_id, ready.attempt)
        if ready.attempt < self._latest.get(ready.request_id, 0):
            raise StaleAttempt("a later attempt took over")
        if (entry := self.lookup_dict.get(key)) is not None:
            entry.ready = ready
        self._happen(key, _EVENT.PARK)

    def drop(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """The request is over on this side: failed, cancelled, or complete with its first token."""
        error = KvMissing(f"the prefill worker gave the request up: {reason}")
        self._happen((request_id, attempt), _EVENT.DROP, Cause(reason=reason, error=error))

    def lease_left_s(self) -> float | None:
        """Seconds until the last lease of parked KV ends; None: none is parked."""
        leases = [e.lease.remaining_s() for e in self.lookup_dict.values() if e.lease is not None]
        return max(leases, default=None)

    def close(self) -> None:
        self._sweeper.cancel()
        for task in self._accepting:
            task.cancel()
        self._link.close()

    # Messages. A bad one is answered and counted; it harms nobody but its sender.

    def _on_frames(self, frames: list[bytes]) -> None:
        identity = frames[0].decode("latin-1")  # any bytes, and back again
        try:
            if len(frames) != 2:
                raise RemoteProtocolError(f"message of {len(frames)} frames")
            self._on_message(identity, from_decode_decoder.decode(frames[1]))
        except PeerError as error:
            self._counters.num_signals_refused += 1
            _limited.warning("signal_refused", fault="peer", reason=error.message)
            self._send(identity, Malformed(reason=error.message[:REASON_CHARS_MAX]))

    def _on_message(self, identity: Identity, message: object) -> None:
        if isinstance(message, Handshake):
            answer = self._peers.shake_hands(identity, message)
            self._counters.num_signals_refused += isinstance(answer, Refused)
            self._send(identity, answer)
            return
        peer = self._peers.heard(identity)
        if peer is None:
            raise RemoteProtocolError("handshake first")
        if isinstance(message, KvMapInit):
            self._start_accepting(identity, peer, message)
        elif isinstance(message, Ping):
            self._send(identity, Pong(sequence=message.sequence))
        elif isinstance(message, PullLayer):
            self._counters.num_stale += not self.layers.pull(identity, peer, message)
        elif isinstance(message, LookupAll | Hold | Pull | Done | Abort):
            self._on_request_message(identity, peer, message)

    def _on_request_message(
        self, identity: Identity, peer: Peer, message: LookupAll | Hold | Pull | Done | Abort
    ) -> None:
        key = (message.request_id, message.attempt)
        entry = self.lookup_dict.get(key)
        if entry is not None and entry.reader not in (None, identity):
            raise RemoteProtocolError("this request belongs to another worker")
        if isinstance(message, LookupAll):
            early_max = self._limits.remembered_max
            gone = () if entry is not None else gives_way(self.lookup_dict, identity, early_max)
            if gone is None:
                self._send(identity, never(key, "this prefill worker has too many open requests"))
                return
            for each in gone:
                self.drop(*each, reason="its worker has too many open requests")
        elif entry is not None and entry.reader is None:
            self._counters.num_stale += 1  # it gave this request up, or never asked for it
            return
        cause = Cause(identity=identity)
        if isinstance(message, Pull):
            if entry is not None and entry.ready is not None:
                self._sender.check(peer, message, entry.ready)
            cause = Cause(identity=identity, peer=peer, pull=message)
        elif isinstance(message, Done):
            cause = Cause(identity=identity, done=message, reason="it was handed over")
        elif isinstance(message, Abort):
            error = KvMissing(f"the decode worker gave up: {message.reason}")
            cause = Cause(identity=identity, reason=message.reason, error=error)
        self._happen(key, _EVENTS[type(message)], cause)
        if isinstance(message, LookupAll) and message.streams:
            entry = self.lookup_dict.get(key)
            if entry is not None and entry.state in (_STATE.ASKED, _STATE.PREFILLING):
                self.layers.ask(key, identity)

    def _start_accepting(self, identity: Identity, peer: Peer, message: KvMapInit) -> None:
        if peer.is_connecting:
            raise RemoteProtocolError("the KV map is being exchanged already")
        peer.is_connecting = True
        task = self._loop.create_task(self._accept(identity, peer, message))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, identity: Identity, peer: Peer, message: KvMapInit) -> None:
        try:
            threads, accept = self._lanes.threads, self._sender.accept
            peer.layout, answer = await self._loop.run_in_executor(threads, accept, peer, message)
        except NeuronDiError as error:  # its own words; the log has those of each engine
            self._send(identity, Refused(reason=error.message[:REASON_CHARS_MAX]))
        except Exception:  # ours; the peer must not wait for its deadline to learn of it
            _log.exception("accept_failed", peer=peer.worker_id)
            self._send(identity, Refused(reason="the transfer engine failed to connect"))
        else:
            self._send(identity, answer)
        finally:
            peer.is_connecting = False
            if not self._peers.is_connected(peer.incarnation):  # forgotten meanwhile
                self._lanes.disconnect(peer.incarnation)

    # The table, carried out.

    def _happen(self, key: Key, event: SenderEvent, cause: Cause = _NO_CAUSE) -> None:
        """Move a hand-over by the table. Raises what the table forbids; nothing changed then."""
        entry = self.lookup_dict.get(key) or Entry(self._state_of(key))
        before = entry.state
        entry.state, actions = sender_step(before, event)
        if entry.state in _GIVEN_UP and before not in _GIVEN_UP:
            self._over.set(key, cause.reason or event.value)
        if entry.state is _STATE.OVER:
            self.lookup_dict.pop(key, None)
            self.layers.end(key)
        elif entry.state is not _STATE.UNKNOWN:
            self.lookup_dict[key] = entry
        for action in actions:
            self._act(key, entry, action, cause)

    def _state_of(self, key: Key) -> SenderState:
        """Of a hand-over without an entry."""
        if key in self._over or key[1] < self._latest.get(key[0], 0):
            return _STATE.OVER
        return _STATE.UNKNOWN

    def _why_never(self, key: Key) -> str:
        is_late = key[1] < self._latest.get(key[0], 0)
        return self._over.get(key, "a later attempt took over" if is_late else "it is not here")

    def _act(self, key: Key, entry: Entry, action: SenderAction, cause: Cause) -> None:
        match action:
            case _ACTION.NAME_READER:
                entry.reader = cause.identity
            case _ACTION.FORGET_READER:
                entry.reader = None
                self.layers.forget_reader(key)
            case _ACTION.START_LEASE:
                self._start_lease(entry)
            case _ACTION.RENEW_LEASE:
                renewed = Deadline.after(self._limits.kv_lease_s)
                entry.lease = renewed.earlier_of(entry.lease_max or renewed)
            case _ACTION.STOP_LEASE:
                entry.lease = entry.lease_max = None
            case _ACTION.SAY_NOT_YET:
                self._say(entry, cause, NotYet(request_id=key[0], attempt=key[1]))
            case _ACTION.SAY_NEVER:
                self._say(entry, cause, never(key, cause.reason or self._why_never(key)))
            case _ACTION.SAY_READY:
                assert entry.ready is not None, "parked entries have it"
                self._say(entry, cause, entry.ready)
            case _ACTION.REFUSE:
                raise KvMissing(f"this attempt is here already, or over: {self._why_never(key)}")
            case _ACTION.COUNT_STALE:
                self._counters.num_stale += 1
            case _:
                self._act_on_blocks(key, entry, action, cause)

    def _act_on_blocks(self, key: Key, entry: Entry, action: SenderAction, cause: Cause) -> None:
        match action:
            case _ACTION.POST_SEND:
                assert entry.ready is not None, "parked entries have it"
                assert cause.peer is not None, "PULL brings its sender"
                assert cause.pull is not None, "PULL brings itself"
                try:
                    entry.send = self._sender.post(cause.peer, cause.pull, entry.ready)
                except Exception as bug:  # a send that was never posted must not be waited for
                    error = LocalProtocolError(f"no send was posted: {type(bug).__name__}")
                    entry.send = TransferToken.over(error)
                entry.send.on_done(lambda send: self._on_sent(key, entry, send))
            case _ACTION.RELEASE:
                assert cause.done is not None, "only Done releases"
                self._on_end(key, cause.done, unless_done(entry.send))
            case _ACTION.GIVE_UP:
                assert cause.error is not None, "whatever ends a hand-over says why"
                self._on_end(key, cause.error, unless_done(entry.send))
            case _ACTION.QUARANTINE:
                assert cause.error is not None, "whatever ends a hand-over says why"
                entry.quarantine = TransferToken()
                _limited.info("kv_quarantined", request=key[0], reason=cause.reason)
                # Nobody was told where the blocks are: nobody reads them.
                is_read = entry.reader is not None
                entry.lease = entry.lease if is_read else Deadline.after(0.0)
                self._on_end(key, cause.error, entry.quarantine if is_read else None)
            case _ACTION.LET_GO:
                quarantine, send = entry.quarantine, entry.send
                assert quarantine is not None, "only recalled blocks are let go"
                if send is None:
                    quarantine.complete()
                else:  # the reader has let go, but our own send may still run
                    send.on_done(lambda _: quarantine.complete())

    def _on_sent(self, key: Key, entry: Entry, send: TransferToken) -> None:
        """A posted send ended, on any thread. Of a failed one the reader would never hear."""
        if (error := send.error()) is not None:
            self._loop.call_soon_threadsafe(self._on_send_failed, key, entry, error)

    def _on_send_failed(self, key: Key, entry: Entry, error: NeuronDiError) -> None:
        if self.lookup_dict.get(key) is entry:
            reason = f"the send failed: {error.code}"
            self._happen(key, _EVENT.DROP, Cause(reason=reason, error=error))

    def _start_lease(self, entry: Entry) -> None:
        if entry.state is _STATE.RECALLED:
            entry.lease = Deadline.after(self._limits.quarantine_s)
        else:
            entry.lease = Deadline.after(self._limits.kv_lease_s)
            entry.lease_max = Deadline.after(self._limits.kv_lease_max_s)

    def _on_peer_lost(self, identity: Identity, incarnation: Incarnation) -> None:
        error = KvMissing("the decode worker fell silent")
        cause = Cause(identity=identity, reason="the decode worker fell silent", error=error)
        for key in [key for key, entry in self.lookup_dict.items() if entry.reader == identity]:
            self._happen(key, _EVENT.READER_LOST, cause)
        if not self._peers.is_connected(incarnation):
            self._lanes.disconnect(incarnation)

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(self._sweep_interval_s, self._sweep)
        self._peers.forget_silent()
        for key, entry in list(self.lookup_dict.items()):
            if entry.lease is None or not entry.lease.has_passed():
                continue
            if entry.state in (_STATE.PARKED, _STATE.PULLING):
                self._counters.num_leases_ended += 1
                _log.warning("kv_lease_ended", request=key[0])
            error = KvExpired("nobody pulled the KV before its lease ended")
            cause = Cause(reason="the lease ended", error=error)
            self._happen(key, _EVENT.LEASE_ENDED, cause)

    def _say(self, entry: Entry, cause: Cause, message: FromPrefill) -> None:
        """To whoever asked just now, else to whoever asked before, else to nobody."""
        if (identity := cause.identity or entry.reader) is not None:
            self._send(identity, message)

    def _send(self, identity: Identity, message: FromPrefill) -> None:
        # Not sent means that the peer is gone: its leg fails at the proxy, and leases end.
        if not self._link.send([identity.encode("latin-1"), encode_msgpack(message)]):
            _limited.info("signal_unsent", kind=type(message).__name__)


_EVENTS: dict[type, SenderEvent] = {
    LookupAll: _EVENT.LOOKUP,
    Hold: _EVENT.HOLD,
    Pull: _EVENT.PULL,
    Done: _EVENT.DONE,
    Abort: _EVENT.ABORT,
}
