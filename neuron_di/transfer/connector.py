"""Which buffer serves which peer: static 1P1D or dynamic xPyD (N-37, N-38, N-42, N-43).

    a static buffer, if there is one; else by key:
    prefill   key ""                           one SendBuffer for every decode worker
    decode    key (host, port, incarnation)    one RecvBuffer for each prefill worker

The proxy decides who talks to whom and says so in typed fields of the leg (N-45). A buffer
is made at its first use, its connection in the background: other requests keep running.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from neuron_di.clock import now_s
from neuron_di.config import HandOverOptions
from neuron_di.errors import NeuronDiError, PeerRefused
from neuron_di.kv import KvPool
from neuron_di.obs import get_logger
from neuron_di.transfer.admission import Admission
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.door import Guard
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.landing import Landing
from neuron_di.transfer.lanes import Lane, LaneSet
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.send_buffer import OnEnd, SendBuffer
from neuron_di.transfer.signal_keys import SignalKeys
from neuron_di.transfer.signal_link import SignalTransport, ZmqTransport
from neuron_di.types import Incarnation
from neuron_di.wire import PeerAddress

_log = get_logger(__name__)

# Of the time that a decode worker waits for a connection: prefill's "no" must reach it before.
_PATIENCE_SHARE = 0.8
# Landing memory, where nobody says how much: what the pool can hold fits, in wider numbers, too. It
# is more than this only where a single prompt may be.
LANDING_SHARE = 2
LANDING_BYTES = 1 << 30
TRIALS_MAX = 1  # of better lanes, at a time: they take threads that requests need, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Addresses, limits and keys of the signal link. `static_peer` fixes the only partner.

    For a decode worker it is the prefill worker's signal address "host:port"; for a prefill
    worker the decode worker's id. `static_peer_key` is the public key that the partner must have.

    Without `keys` nothing is encrypted. With them, but without a directory, a prefill worker lets
    in whoever knows its public key, which is no secret: what is said cannot be read or changed on
    the way, and a decode worker talks to nobody else, but any process that reaches the port may
    ask. A directory or `static_peer_key` keeps strangers out: with `has_directory` nobody is let
    in before `NeuronConnector.admission` was told who may.
    """

    signal_host: str = "127.0.0.1"
    signal_port: int = 0
    limits: HandOverOptions = field(default_factory=HandOverOptions)
    static_peer: str | None = None
    static_peer_key: str | None = None
    has_directory: bool = False
    landing_bytes: int | None = None  # None: by the pool's size and the longest prompt
    landing_bytes_max: int = LANDING_BYTES  # where nobody says how much
    keys: SignalKeys | None = None


class NeuronConnector:
    """Owns the signal transport and every buffer of one worker. Lives on its event loop.

    `on_change` is called with each RecvBuffer that connected or broke. `admission` says whose
    keys a prefill worker lets in; None where nothing is encrypted. `pool` is this worker's: what
    was received there is verified before it is used.
    """

    def __init__(
        self,
        local: LocalWorker,
        lanes: LaneSet,
        pool: KvPool,
        options: ConnectorOptions,
        *,
        transport: SignalTransport | None = None,
    ) -> None:
        self._local = local
        self._lanes = lanes
        self._pool = pool
        self._options = options
        self._transport = transport or ZmqTransport()
        self._send_buffer: SendBuffer | None = None
        self._num_connections = 0
        self.admission: Admission | None = None
        self.on_change: Callable[[RecvBuffer], None] = lambda _: None
        if options.keys is not None:
            self.admission = Admission(only=options.static_peer_key)
            if options.has_directory:
                self.admission.set_owners({})
        self.counters = HandOverCounters()
        self.landing = _landing(lanes, pool, options, local.context_tokens)
        self.connection_dict: dict[tuple[str, int, Incarnation], RecvBuffer] = {}
        self._retired: list[RecvBuffer] = []  # each until its last request is over
        self._trials: list[RecvBuffer] = []  # beside a buffer whose lane is a fallback

    def open_send_buffer(self, on_end: OnEnd) -> SendBuffer:
        """Prefill, once at start: bind the signal link."""
        assert self._send_buffer is None
        options = self._options
        self._send_buffer = SendBuffer(
            self._local,
            self._lanes,
            self._transport,
            host=options.signal_host,
            port=options.signal_port,
            limits=options.limits,
            counters=self.counters,
            on_end=on_end,
            allowed_peer=options.static_peer,
            guard=self._guard(),
        )
        return self._send_buffer

    def _guard(self) -> Guard | None:
        options = self._options
        if options.keys is None or self.admission is None:
            return None
        patience_s = _PATIENCE_SHARE * options.limits.peer_connect_timeout_s
        return Guard(options.keys, self.admission, patience_s, self._on_stranger)

    def _on_stranger(self) -> None:
        self.counters.num_signals_refused += 1

    def maybe_setup_buffer(self, peer: PeerAddress) -> RecvBuffer:
        """Decode, for a request: the buffer for this prefill worker, made if none works.

        PeerRefused when this worker is bound to another partner, or one end encrypts and the
        other cannot.
        """
        buffer = self.buffer_for(peer)
        buffer.asked_s = now_s()
        self._try_better(buffer)
        return buffer

    def buffer_for(self, peer: PeerAddress) -> RecvBuffer:
        """As maybe_setup_buffer, where no request asks: ahead of the first one."""
        peer = self._bound(peer)
        # The same address may be another process by now: its KV is another process's. Which of
        # the two is gone, the handshake or silence will show.
        key = (peer.signal_host, peer.signal_port, peer.incarnation)
        buffer = self.connection_dict.get(key)
        if buffer is not None and buffer.is_retired:
            self._retired.append(self.connection_dict.pop(key))
            buffer = None
        if buffer is None:
            buffer = self.connection_dict[key] = self._make_buffer(peer, self._lanes)
            _log.info("recv_buffer_made", peer=peer.worker_id)
        return buffer

    def _make_buffer(self, peer: PeerAddress, lanes: LaneSet) -> RecvBuffer:
        self._num_connections += 1
        return RecvBuffer(
            self._local,
            lanes,
            self.landing,
            self._transport,
            self._pool,
            peer,
            limits=self._options.limits,
            counters=self.counters,
            connection=self._num_connections,
            keys=self._options.keys,
            on_connected=self._on_connected,
            on_broken=self._on_broken,
        )

    def _try_better(self, buffer: RecvBuffer) -> None:
        """Where its lane is a fallback, see now and then whether a better one works by now.

        Requests go by the lane there is, until the other has proved itself; and while a link is
        ending, whose lane may be the better one, nothing is tried.
        """
        others = [*self._retired, *self._trials]
        if (
            len(self._trials) < TRIALS_MAX
            and buffer.is_connected
            and buffer.lane is not None
            and not any(other.peer.incarnation == buffer.peer.incarnation for other in others)
            and (better := self._lanes.better_than(buffer.lane)) is not None
        ):
            try:
                self._trials.append(self._make_buffer(buffer.peer, better))
            except NeuronDiError as error:  # no descriptor is left: what there is goes on
                _log.warning("trial_failed", peer=buffer.peer.worker_id, reason=error.message)

    def _end_trial(self, trial: RecvBuffer) -> None:
        """Its lane works: let further requests go by it, unless a new link is there or comes."""
        self._trials.remove(trial)
        peer = trial.peer
        key = (peer.signal_host, peer.signal_port, peer.incarnation)
        before = self.connection_dict.get(key)
        if before is not None and (before.lane is None or not before.lane.is_fallback):
            trial.close()
            return
        if before is not None:
            before.is_retired = True
            self._retired.append(before)
        self.connection_dict[key] = trial

    def may_talk_to(self, peer: PeerAddress) -> bool:
        """Decode: whether this is not another than the only partner, if there is one."""
        static_peer = self._options.static_peer
        return static_peer in (None, f"{peer.signal_host}:{peer.signal_port}")

    def _bound(self, peer: PeerAddress) -> PeerAddress:
        """The peer, if this worker may talk to it, with the key that it must have."""
        if not self.may_talk_to(peer):
            raise PeerRefused(f"{self._local.worker_id} is bound to {self._options.static_peer}")
        static_key = self._options.static_peer_key
        if static_key is None or static_key == peer.signal_key:
            return peer
        if peer.signal_key is not None:
            raise PeerRefused(f"{self._local.worker_id} is bound to a peer with another key")
        return msgspec.structs.replace(peer, signal_key=static_key)

    def _on_connected(self, buffer: RecvBuffer) -> None:
        if buffer in self._trials:
            self._end_trial(buffer)
        if not buffer.is_broken:
            self._disconnect_unused(buffer.peer.incarnation)
            self.on_change(buffer)

    def _on_broken(self, broken: RecvBuffer) -> None:
        """Forget it. Nobody hears of it while another buffer works with the same process."""
        peer = broken.peer
        key = (peer.signal_host, peer.signal_port, peer.incarnation)
        if self.connection_dict.get(key) is broken:
            del self.connection_dict[key]
        if broken in self._retired:
            self._retired.remove(broken)
        if is_trial := broken in self._trials:
            self._trials.remove(broken)
            _log.info("lane_not_better", peer=peer.worker_id)
        self._disconnect_unused(peer.incarnation)
        others = (b for b in self._buffers() if b.peer.incarnation == peer.incarnation)
        if not is_trial and not any(other.is_connected for other in others):
            self.on_change(broken)

    def _disconnect_unused(self, peer: Incarnation) -> None:
        """Leave no engine connected to a process that no link reaches by it."""
        lanes = [b.lane for b in self._buffers() if b.peer.incarnation == peer]
        used = [lane.name for lane in lanes if lane is not None]
        if len(used) == len(lanes):  # else one is connecting, by any of them
            self._lanes.disconnect(peer, but=used)

    def buffers(self) -> list[RecvBuffer]:
        """All there are, with those that are retired, or tried."""
        return [*self.connection_dict.values(), *self._retired, *self._trials]

    def _buffers(self) -> list[RecvBuffer]:
        return [buffer for buffer in self.buffers() if not buffer.is_broken]

    def connections(self) -> list[str]:
        """Worker ids of the peers that KV can be moved from or to now."""
        peers: set[str] = {b.peer.worker_id for b in self._buffers() if b.is_connected}
        if self._send_buffer is not None:
            peers.update(self._send_buffer.peers)
        return sorted(peers)

    def lanes(self) -> list[tuple[PeerAddress, Lane]]:
        """Decode: the peers that are connected, each with what moves its KV."""
        return [(b.peer, b.lane) for b in self._buffers() if b.is_connected and b.lane is not None]

    def lease_left_s(self) -> float | None:
        """Seconds until the last KV is given up that nobody pulls; None: none is parked."""
        return self._send_buffer.lease_left_s() if self._send_buffer is not None else None

    def close(self) -> None:
        """Close every link, then the transport. Once, on the loop; then `wait_closed` off it."""
        for buffer in self.buffers():
            buffer.close()
        if self._send_buffer is not None:
            self._send_buffer.close()
        self._transport.close()

    def wait_closed(self) -> None:
        """Come back once what was said is sent, or 0.2 s have passed. Blocks."""
        self._transport.wait_closed()


def _landing(
    lanes: LaneSet, pool: KvPool, options: ConnectorOptions, context_tokens: int
) -> Landing:
    if options.landing_bytes is not None:
        return Landing(lanes, options.landing_bytes)
    # Of this worker's blocks: an arena's `memory()` is that of all workers.
    block_bytes = LANDING_SHARE * pool.layout.block_bytes
    pool_bytes = pool.num_blocks * block_bytes
    # Whoever connects first, the longest prompt of any peer should find room.
    longest_bytes = pool.layout.num_blocks_for(context_tokens) * block_bytes
    size_bytes = max(LANDING_BYTES, min(longest_bytes, options.landing_bytes_max))
    return Landing(lanes, min(pool_bytes, size_bytes), min(pool_bytes, options.landing_bytes_max))
