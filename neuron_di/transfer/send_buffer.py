"""Prefill's end of every hand-over: what is parked, who asked for it, who has it (seed N-41).

One SendBuffer serves all decode workers on one ROUTER socket (N-44). It lives on the
worker's event loop; nothing here blocks, and the engine's thread never enters.

    EXPECTED ---park--> PARKED ---Pull--> PULLING ---Done--> gone
       |                  |                  |
       +---- drop, Abort, end of lease ------+-------------> gone, remembered for a while
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import zmq

from neuron_di.clock import Deadline, now_s, unix_s
from neuron_di.errors import KvExpired, KvMissing, NeuronDiError, PeerError, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.signal_link import SignalSocket, bind_router, bound_port
from neuron_di.transfer.transfer_engine import TransferEngine, TransferToken
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Abort,
    Done,
    FromPrefill,
    Handshake,
    Hold,
    KvMap,
    KvMapInit,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    Ping,
    Pong,
    Pull,
    Ready,
    Refused,
    Welcome,
    encode_msgpack,
    from_decode_decoder,
)

_log = get_logger(__name__)

ENDED_REMEMBERED_MAX = 4096  # how many ended requests still answer "never" instead of "not yet"
ASKED_EARLY_MAX = 4096  # lookups that came before their request
SWEEP_INTERVAL_S = 1.0
PEER_SILENCE_S = 30.0  # then a decode worker, which pings every second, is forgotten

Key = tuple[RequestId, int]
# Called once per parked request: the peer's Done, or why the KV was given up.
OnEnd = Callable[[Key, Done | NeuronDiError], None]


class _State(Enum):
    EXPECTED = "expected"  # a lookup may have come; the prefill is not finished
    PARKED = "parked"
    PULLING = "pulling"


@dataclass(slots=True)
class _Entry:
    deadline: Deadline | None  # None: the prefill is ours and runs under its own deadline
    state: _State = _State.EXPECTED
    asker: Incarnation | None = None
    ready: Ready | None = None
    send: TransferToken | None = None


@dataclass(slots=True)
class _Peer:
    worker_id: str
    last_heard_s: float


class SendBuffer:
    """Owns the ROUTER socket and the table of parked requests; borrows their blocks.

    `allowed_peer` is the fixed decode worker's id in static mode (N-42); None takes any.
    """

    def __init__(
        self,
        local: LocalWorker,
        transfer: TransferEngine,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        host: str,
        port: int,
        kv_lease_s: float,
        on_end: OnEnd,
        allowed_peer: str | None = None,
    ) -> None:
        self._local = local
        self._transfer = transfer
        self._kv_lease_s = kv_lease_s
        self._on_end = on_end
        self._allowed_peer = allowed_peer
        self._loop = asyncio.get_running_loop()
        socket = bind_router(context, host, port)
        self.port = bound_port(socket)
        self._link = SignalSocket(socket, self._on_frames)
        self.lookup_dict: dict[Key, _Entry] = {}
        self._ended: OrderedDict[Key, str] = OrderedDict()
        self._peers: dict[Incarnation, _Peer] = {}  # after the handshake
        self._accepting: set[asyncio.Task[None]] = set()
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        self.num_malformed = 0

    @property
    def peers(self) -> list[str]:
        """Worker ids of the decode workers that shook hands and still talk."""
        return sorted(peer.worker_id for peer in self._peers.values())

    def expect(self, request_id: RequestId, attempt: int) -> None:
        """A prefill was accepted: lookups for it are "not yet" until park() or drop()."""
        self.lookup_dict.setdefault((request_id, attempt), _Entry(None)).deadline = None

    def park(self, ready: Ready) -> None:
        """The prefill is complete: its blocks may be pulled until the lease ends."""
        entry = self.lookup_dict[(ready.request_id, ready.attempt)]
        assert entry.state is _State.EXPECTED
        entry.state, entry.ready = _State.PARKED, ready
        self._renew(entry)
        if entry.asker is not None:
            self._send(entry.asker, ready)

    def drop(self, request_id: RequestId, attempt: int, reason: str) -> None:
        """The request is over on this side: failed, cancelled, or complete with its first token."""
        entry = self._forget((request_id, attempt), reason)
        if entry is not None and entry.asker is not None:
            self._send(entry.asker, Never(request_id=request_id, attempt=attempt, reason=reason))

    def close(self) -> None:
        self._sweeper.cancel()
        for task in self._accepting:
            task.cancel()
        self._link.close()

    # Messages. A bad one is answered and counted; it harms nobody but its sender.

    def _on_frames(self, frames: list[bytes]) -> None:
        peer = Incarnation(frames[0].decode("latin-1"))  # any bytes, and back again
        try:
            if len(frames) != 2:
                raise RemoteProtocolError(f"message of {len(frames)} frames")
            self._on_message(peer, from_decode_decoder.decode(frames[1]))
        except PeerError as error:
            self.num_malformed += 1
            _log.warning("signal_refused", fault="peer", reason=error.message)
            self._send_raw(frames[0], Malformed(reason=error.message))

    def _on_message(self, peer: Incarnation, message: object) -> None:
        if isinstance(message, Handshake):
            self._on_handshake(peer, message)
            return
        if peer not in self._peers:
            raise RemoteProtocolError("handshake first")
        self._peers[peer].last_heard_s = now_s()
        if isinstance(message, KvMapInit):
            task = self._loop.create_task(self._accept(peer, message))
            self._accepting.add(task)
            task.add_done_callback(self._accepting.discard)
        elif isinstance(message, LookupAll):
            self._on_lookup(peer, message)
        elif isinstance(message, Hold):
            self._on_hold(peer, message)
        elif isinstance(message, Pull):
            self._on_pull(peer, message)
        elif isinstance(message, Done):
            self._on_done(peer, message)
        elif isinstance(message, Abort):
            self._on_abort(peer, message)
        elif isinstance(message, Ping):
            self._send(peer, Pong(sequence=message.sequence))

    def _on_handshake(self, peer: Incarnation, message: Handshake) -> None:
        local = self._local
        refusal = None
        is_stale = message.expects != local.incarnation
        if message.version != SIGNAL_VERSION:
            refusal = f"signal protocol {message.version}, this worker speaks {SIGNAL_VERSION}"
        elif is_stale:
            refusal = f"{local.worker_id} restarted: not the process you were told of"
        elif message.incarnation != peer:
            refusal = "the connection's identity is not the incarnation it states"
        elif message.model_digest != local.model_digest:
            refusal = f"another model than {local.worker_id}'s"
        elif message.layout_digest != local.layout_digest:
            refusal = f"another KV layout than {local.worker_id}'s"
        elif self._allowed_peer is not None and message.worker_id != self._allowed_peer:
            refusal = f"{local.worker_id} is bound to {self._allowed_peer}"
        if refusal is not None:
            _log.warning("handshake_refused", peer=message.worker_id, reason=refusal)
            self._send(peer, Refused(reason=refusal, is_stale=is_stale))
            return
        self._peers[peer] = _Peer(message.worker_id, now_s())
        _log.info("handshake", peer=message.worker_id)
        self._send(
            peer,
            Welcome(
                status="ok",
                timestamp=unix_s(),
                worker_id=local.worker_id,
                incarnation=local.incarnation,
            ),
        )

    async def _accept(self, peer: Incarnation, message: KvMapInit) -> None:
        try:
            await self._loop.run_in_executor(None, self._transfer.accept, peer, message.region)
        except PeerError as error:
            self._send(peer, Refused(reason=error.message))
        else:
            self._send(peer, KvMap(region=self._transfer.local_region()))

    def _on_lookup(self, peer: Incarnation, message: LookupAll) -> None:
        request_id, attempt = key = (message.request_id, message.attempt)
        if (reason := self._ended.get(key)) is not None:
            self._send(peer, Never(request_id=request_id, attempt=attempt, reason=reason))
            return
        entry = self.lookup_dict.get(key)
        if entry is None:
            # The two legs race: the decode worker may ask before the prompt has arrived here.
            if len(self.lookup_dict) >= ASKED_EARLY_MAX:
                self._send(peer, Never(request_id=request_id, attempt=attempt, reason="busy"))
                return
            entry = self.lookup_dict[key] = _Entry(Deadline.after(self._kv_lease_s))
        if entry.asker is not None and entry.asker != peer:
            raise RemoteProtocolError("this request was asked for by another worker")
        entry.asker = peer
        if entry.ready is not None:
            self._renew(entry)
            self._send(peer, entry.ready)
        else:
            self._send(peer, NotYet(request_id=request_id, attempt=attempt))

    def _on_hold(self, peer: Incarnation, message: Hold) -> None:
        entry = self._entry_of(peer, message.request_id, message.attempt)
        if entry is not None and entry.ready is not None:
            self._renew(entry)

    def _renew(self, entry: _Entry) -> None:
        entry.deadline = Deadline.after(self._kv_lease_s)

    def _on_pull(self, peer: Incarnation, message: Pull) -> None:
        entry = self._entry_of(peer, message.request_id, message.attempt)
        if entry is None or entry.ready is None or entry.state is not _State.PARKED:
            return  # too late or twice: Never was sent when it ended, or the pull is running
        if len(message.block_ids) != len(entry.ready.block_ids):
            raise RemoteProtocolError("a pull for another number of blocks than were parked")
        entry.state = _State.PULLING
        self._renew(entry)
        blocks = [BlockId(block_id) for block_id in entry.ready.block_ids]
        entry.send = self._transfer.post_send(peer, blocks)

    def _on_done(self, peer: Incarnation, message: Done) -> None:
        entry = self._entry_of(peer, message.request_id, message.attempt)
        if entry is None:
            return
        if entry.ready is None:
            raise RemoteProtocolError("done with what was never ready")
        self._end((message.request_id, message.attempt), entry, "handed over", message)

    def _on_abort(self, peer: Incarnation, message: Abort) -> None:
        key = (message.request_id, message.attempt)
        entry = self._entry_of(peer, *key)
        if entry is not None and entry.ready is not None:
            error = KvMissing(f"the decode worker gave up: {message.reason}")
            self._end(key, entry, message.reason, error)
        elif entry is not None:
            entry.asker = None  # still being prefilled: the proxy cancels that leg itself

    def _end(self, key: Key, entry: _Entry, reason: str, outcome: Done | NeuronDiError) -> None:
        self._forget(key, reason)
        if entry.send is None:
            self._on_end(key, outcome)
        else:  # the blocks are ours again when our own side has let go of them, too
            entry.send.on_done(
                lambda _: self._loop.call_soon_threadsafe(self._on_end, key, outcome)
            )

    def _entry_of(self, peer: Incarnation, request_id: RequestId, attempt: int) -> _Entry | None:
        entry = self.lookup_dict.get((request_id, attempt))
        if entry is None or entry.asker is None:
            return None  # over here, or given up by the decode worker: nothing to change
        if entry.asker != peer:
            raise RemoteProtocolError("this request belongs to another worker")
        return entry

    def _forget(self, key: Key, reason: str) -> _Entry | None:
        entry = self.lookup_dict.pop(key, None)
        if entry is not None:
            self._ended[key] = reason
            if len(self._ended) > ENDED_REMEMBERED_MAX:
                self._ended.popitem(last=False)
        return entry

    def _sweep(self) -> None:
        self._sweeper = self._loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        silent_since_s = now_s() - PEER_SILENCE_S
        for peer in [p for p, heard in self._peers.items() if heard.last_heard_s < silent_since_s]:
            _log.info("peer_silent", peer=self._peers.pop(peer).worker_id)
            self._transfer.disconnect(peer)
        passed = [
            key
            for key, entry in self.lookup_dict.items()
            if entry.deadline is not None and entry.deadline.has_passed()
        ]
        for key in passed:
            was_parked = self.lookup_dict[key].ready is not None
            self.drop(*key, reason="the lease ended")
            if was_parked:
                _log.warning("kv_lease_ended", request=key[0])
                self._on_end(key, KvExpired("nobody pulled the KV before its lease ended"))

    def _send(self, peer: Incarnation, message: FromPrefill) -> None:
        self._send_raw(peer.encode("latin-1"), message)

    def _send_raw(self, identity: bytes, message: FromPrefill) -> None:
        # Not sent means that the peer is gone: its leg fails at the proxy, and leases end.
        if not self._link.send([identity, encode_msgpack(message)]):
            _log.info("signal_unsent", kind=type(message).__name__)
