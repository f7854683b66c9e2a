"""The decode workers that a SendBuffer talks to: who shook hands, and who still speaks."""

from collections.abc import Callable
from dataclasses import dataclass

from neuron_di.clock import now_s, unix_s
from neuron_di.kv import KvLayout
from neuron_di.obs import LimitedLogger
from neuron_di.transfer.admission import Admission
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.signal_keys import KEY_CHARS
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import SIGNAL_VERSION, Handshake, Refused, Welcome

_log = LimitedLogger(__name__)  # who may connect may do so as often as it likes

# A decode worker has one or two, and for a while those whose requests are ending. Nobody says
# goodbye on one that broke: it would keep its place until it counts as silent, and a worker that
# makes a new one for each request would take all places.
CONNECTIONS_MAX = 8  # of one worker

# A connection's name on the signal link: "<incarnation>.<number>", unique for each connection.
# Where the link is encrypted, behind the key that the connection proved to have: another key's
# connection is another peer, whatever it calls itself.
Identity = str


@dataclass(slots=True)
class Peer:
    worker_id: WorkerId
    incarnation: Incarnation
    connection: str  # its name, as the decode worker knows it
    last_heard_s: float
    is_connecting: bool = False  # its transfer engine is
    layout: KvLayout | None = None  # of its pool; None: KV maps were not exchanged yet


class SendPeers:
    """Every connection that shook hands. At most `peers_max`; the silent ones are forgotten, and
    of a worker with too many the one that was silent the longest.

    `admission` knows whose key is whose; None: the link is not encrypted.
    """

    def __init__(
        self,
        local: LocalWorker,
        *,
        allowed_peer: str | None,
        admission: Admission | None,
        peers_max: int,
        silence_s: float,
        on_lost: Callable[[Identity, Incarnation], None],
    ) -> None:
        self._local = local
        self._allowed_peer = allowed_peer
        self._admission = admission
        self._peers_max = peers_max
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._peers: dict[Identity, Peer] = {}

    def worker_ids(self) -> list[str]:
        return sorted({peer.worker_id for peer in self._peers.values()})

    def heard(self, identity: Identity) -> Peer | None:
        """The peer behind a message, noted as alive; None when it has not shaken hands."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.last_heard_s = now_s()
        return peer

    def is_connected(self, incarnation: Incarnation) -> bool:
        return any(peer.incarnation == incarnation for peer in self._peers.values())

    def shake_hands(self, identity: Identity, message: Handshake) -> Welcome | Refused:
        """The answer to a handshake; on Welcome the peer is known from now on."""
        local = self._local
        reason = self._why_refused(identity, message)
        if reason is not None:
            _log.warning("handshake_refused", peer=message.worker_id, reason=reason)
            return Refused(reason=reason, is_stale=message.expects != local.incarnation)
        is_new = identity not in self._peers
        if is_new:
            self._make_room(message.incarnation)
        if is_new and len(self._peers) >= self._peers_max:
            reason = f"{local.worker_id} talks to {self._peers_max} workers already"
            _log.warning("handshake_refused", peer=message.worker_id, reason=reason)
            return Refused(reason=reason, is_busy=True)
        if (peer := self.heard(identity)) is None:  # who shakes hands twice stays who it is
            peer = Peer(message.worker_id, message.incarnation, self._name_of(identity), now_s())
            self._peers[identity] = peer
        peer.worker_id = message.worker_id
        if is_new:
            _log.info("handshake", peer=message.worker_id)
        return Welcome(
            status="ok",
            timestamp=unix_s(),
            worker_id=local.worker_id,
            incarnation=local.incarnation,
        )

    def forget_silent(self) -> None:
        """Let go of those that said nothing for too long."""
        since_s = now_s() - self._silence_s
        for identity in [i for i, peer in self._peers.items() if peer.last_heard_s < since_s]:
            peer = self._peers.pop(identity)
            _log.info("peer_silent", peer=peer.worker_id)
            self._on_lost(identity, peer.incarnation)

    def _make_room(self, incarnation: Incarnation) -> None:
        """For one more connection of this worker."""
        own = [i for i, peer in self._peers.items() if peer.incarnation == incarnation]
        if len(own) >= CONNECTIONS_MAX:
            identity = min(own, key=lambda identity: self._peers[identity].last_heard_s)
            peer = self._peers.pop(identity)
            _log.info("connection_forgotten", peer=peer.worker_id)
            self._on_lost(identity, incarnation)

    def _name_of(self, identity: Identity) -> str:
        """The connection's name as the decode worker knows it.

        Where the link is encrypted it stands behind the key, and before what the transport added.
        """
        if self._admission is None:
            return identity
        name = identity[KEY_CHARS:]
        return name.rpartition("-")[0] or name

    def _why_refused(self, identity: Identity, message: Handshake) -> str | None:
        local = self._local
        if message.version != SIGNAL_VERSION:
            return f"signal protocol {message.version}, this worker speaks {SIGNAL_VERSION}"
        if message.expects != local.incarnation:
            return f"{local.worker_id} restarted: not the process you were told of"
        key = "" if self._admission is None else identity[:KEY_CHARS]
        if identity[len(key) :].rpartition(".")[0] != message.incarnation:
            return "the connection's identity is not the incarnation it states"
        if message.model_digest != local.model_digest:
            return f"another model than {local.worker_id}'s"
        if message.layout_digest != local.exchange_digest:
            return f"another KV layout than {local.worker_id}'s, or --kv-convert at one end only"
        if self._allowed_peer is not None and message.worker_id != self._allowed_peer:
            return f"{local.worker_id} is bound to {self._allowed_peer}"
        if self._admission is not None:
            return self._admission.why_not(key, message.worker_id, message.incarnation)
        return None
