"""Which buffer serves which peer: static 1P1D or dynamic xPyD (seed N-37, N-38, N-42, N-43).

    a static buffer, if there is one; else by key:
    prefill   key ""              one SendBuffer for every decode worker
    decode    key (host, port)    one RecvBuffer for each prefill worker

The proxy decides who talks to whom and says so in typed fields of the leg (N-45). A buffer
is made at its first use, its connection in the background: other requests keep running.
"""

from dataclasses import dataclass

import zmq

from neuron_di.errors import PeerRefused
from neuron_di.obs import get_logger
from neuron_di.transfer.identity import LocalWorker
from neuron_di.transfer.recv_buffer import RecvBuffer
from neuron_di.transfer.send_buffer import OnEnd, SendBuffer
from neuron_di.transfer.transfer_engine import TransferEngine
from neuron_di.wire import PeerAddress

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Addresses and deadlines of the signal link. `static_peer` fixes the only partner.

    For a decode worker it is the prefill worker's signal address "host:port"; for a prefill
    worker the decode worker's id.
    """

    signal_host: str = "127.0.0.1"
    signal_port: int = 0
    kv_lease_s: float = 60.0
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 10.0
    static_peer: str | None = None


class NeuronConnector:
    """Owns the ZMQ context and every buffer of one worker. Lives on the worker's event loop."""

    def __init__(
        self, local: LocalWorker, transfer: TransferEngine, options: ConnectorOptions
    ) -> None:
        self._local = local
        self._transfer = transfer
        self._options = options
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._send_buffer: SendBuffer | None = None
        self.connection_dict: dict[tuple[str, int], RecvBuffer] = {}

    def open_send_buffer(self, on_end: OnEnd) -> SendBuffer:
        """Prefill, once at start: bind the signal link."""
        assert self._send_buffer is None
        options = self._options
        self._send_buffer = SendBuffer(
            self._local,
            self._transfer,
            self._context,
            host=options.signal_host,
            port=options.signal_port,
            kv_lease_s=options.kv_lease_s,
            on_end=on_end,
            allowed_peer=options.static_peer,
        )
        return self._send_buffer

    def maybe_setup_buffer(self, peer: PeerAddress) -> RecvBuffer:
        """Decode: the buffer for this prefill worker, made if there is none that works.

        PeerRefused when this worker is bound to another partner.
        """
        key = (peer.signal_host, peer.signal_port)
        static_peer = self._options.static_peer
        if static_peer is not None and static_peer != f"{key[0]}:{key[1]}":
            raise PeerRefused(f"{self._local.worker_id} is bound to {static_peer}")
        buffer = self.connection_dict.get(key)
        # The same address may be another process by now: its KV is another process's.
        if buffer is not None and buffer.peer.incarnation != peer.incarnation:
            buffer.close()
        if buffer is None or buffer.is_broken:
            _log.info("recv_buffer_made", peer=peer.worker_id)
            self._forget_broken()
            buffer = self.connection_dict[key] = RecvBuffer(
                self._local,
                self._transfer,
                self._context,
                peer,
                connect_timeout_s=self._options.connect_timeout_s,
                silence_timeout_s=self._options.silence_timeout_s,
            )
        return buffer

    def _forget_broken(self) -> None:
        for key in [key for key, buffer in self.connection_dict.items() if buffer.is_broken]:
            del self.connection_dict[key]

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
        """Close every socket, then the context. Safe to call once, at the end."""
        for buffer in self.connection_dict.values():
            buffer.close()
        if self._send_buffer is not None:
            self._send_buffer.close()
        self._context.term()
