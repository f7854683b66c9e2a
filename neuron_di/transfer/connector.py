"""Which buffer serves which peer: static 1P1D or dynamic xPyD (seed N-37, N-38, N-42, N-43).

    a static buffer, if there is one; else by key:
    prefill   key ""                           one SendBuffer for every decode worker
    decode    key (host, port, incarnation)    one RecvBuffer for each prefill worker

The proxy decides who talks to whom and says so in typed fields of the leg (N-45). A buffer
is made at its first use, its connection in the background: other requests keep running.
"""

from dataclasses import dataclass, field

from neuron_di.config import HandOverOptions
from neuron_di.errors import PeerRefused
from neuron_di.kv import BlockMemory
from neuron_di.obs import get_logger
from neuron_di.transfer.counters import HandOverCounters
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.send_buffer import OnEnd, SendBuffer
from neuron_di.transfer.signal_link import SignalTransport, ZmqTransport
from neuron_di.transfer.transfer_engine import TransferEngine
from neuron_di.types import Incarnation
from neuron_di.wire import PeerAddress

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Addresses and limits of the signal link. `static_peer` fixes the only partner.

    For a decode worker it is the prefill worker's signal address "host:port"; for a prefill
    worker the decode worker's id.
    """

    signal_host: str = "127.0.0.1"
    signal_port: int = 0
    limits: HandOverOptions = field(default_factory=HandOverOptions)
    static_peer: str | None = None


class NeuronConnector:
    """Owns the signal transport and every buffer of one worker. Lives on its event loop.

    `memory` is this worker's pool, of blocks of `block_bytes`: what was received there is
    verified before it is used.
    """

    def __init__(
        self,
        local: LocalWorker,
        transfer: TransferEngine,
        memory: BlockMemory,
        options: ConnectorOptions,
        *,
        block_bytes: int,
        transport: SignalTransport | None = None,
    ) -> None:
        self._local = local
        self._transfer = transfer
        self._memory = memory
        self._options = options
        self._block_bytes = block_bytes
        self._transport = transport or ZmqTransport()
        self._send_buffer: SendBuffer | None = None
        self._num_connections = 0
        self.counters = HandOverCounters()
        self.connection_dict: dict[tuple[str, int, Incarnation], RecvBuffer] = {}

    def open_send_buffer(self, on_end: OnEnd) -> SendBuffer:
        """Prefill, once at start: bind the signal link."""
        assert self._send_buffer is None
        options = self._options
        self._send_buffer = SendBuffer(
            self._local,
            self._transfer,
            self._transport,
            host=options.signal_host,
            port=options.signal_port,
            limits=options.limits,
            counters=self.counters,
            on_end=on_end,
            allowed_peer=options.static_peer,
        )
        return self._send_buffer

    def maybe_setup_buffer(self, peer: PeerAddress) -> RecvBuffer:
        """Decode: the buffer for this prefill worker, made if there is none that works.

        PeerRefused when this worker is bound to another partner.
        """
        static_peer = self._options.static_peer
        if static_peer is not None and static_peer != f"{peer.signal_host}:{peer.signal_port}":
            raise PeerRefused(f"{self._local.worker_id} is bound to {static_peer}")
        # The same address may be another process by now: its KV is another process's. Which of
        # the two is gone, the handshake or silence will show.
        key = (peer.signal_host, peer.signal_port, peer.incarnation)
        buffer = self.connection_dict.get(key)
        if buffer is None or buffer.is_broken:
            _log.info("recv_buffer_made", peer=peer.worker_id)
            self._forget_broken()
            self._num_connections += 1
            buffer = self.connection_dict[key] = RecvBuffer(
                self._local,
                self._transfer,
                self._transport,
                self._memory,
                peer,
                limits=self._options.limits,
                counters=self.counters,
                connection=self._num_connections,
                block_bytes=self._block_bytes,
                on_broken=self._on_broken,
            )
        return buffer

    def _forget_broken(self) -> None:
        for key in [key for key, buffer in self.connection_dict.items() if buffer.is_broken]:
            del self.connection_dict[key]

    def _on_broken(self, broken: RecvBuffer) -> None:
        """Disconnect the transfer engine, unless a newer buffer works with the same process."""
        if not self._is_connected(broken.peer.incarnation):
            self._transfer.disconnect(broken.peer.incarnation)

    def _is_connected(self, incarnation: Incarnation) -> bool:
        return any(
            not buffer.is_broken and buffer.peer.incarnation == incarnation
            for buffer in self.connection_dict.values()
        )

    def connections(self) -> list[str]:
        """Worker ids of the peers that this worker has a working buffer for."""
        peers: set[str] = {
            buffer.peer.worker_id
            for buffer in self.connection_dict.values()
            if not buffer.is_broken
        }
        if self._send_buffer is not None:
            peers.update(self._send_buffer.peers)
        return sorted(peers)

    def close(self) -> None:
        """Close every link, then the transport. Safe to call once, at the end."""
        for buffer in list(self.connection_dict.values()):
            buffer.close()
        if self._send_buffer is not None:
            self._send_buffer.close()
        self._transport.close()
