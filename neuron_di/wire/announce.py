"""What a worker says of itself: the record it announces, and its status when asked.

The key is the seed's, `/workers/{role}/{ip}/{api_port}` (N-36); the value is typed.
"""

import msgspec

from neuron_di.types import Incarnation, Role, WorkerId, WorkerState
from neuron_di.wire.codec import Decoder
from neuron_di.wire.legs import PeerAddress

RECORD_BYTES_MAX = 64 << 10
PROTOCOL_VERSION = 1


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's entry in the registry."""

    protocol_version: int
    worker_id: WorkerId
    incarnation: Incarnation
    role: Role
    state: WorkerState
    pid: int
    model: str  # the name clients use
    model_digest: str
    layout_digest: str
    context_tokens: int
    host: str
    api_port: int
    signal_host: str
    signal_port: int  # 0 where the role has no SendBuffer (decode)
    started_unix_s: float
    connections: list[str] = []  # worker ids of the peers it has a buffer for

    def key(self) -> str:
        return f"/workers/{self.role}/{self.host}/{self.api_port}"

    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.api_port}"

    def peer_address(self) -> PeerAddress:
        return PeerAddress(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            signal_host=self.signal_host,
            signal_port=self.signal_port,
        )


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /status on a worker: its record and its load at this moment."""

    record: WorkerRecord
    num_blocks: int
    num_blocks_free: int
    num_waiting: int
    num_running: int
    num_transferring: int  # prefill: parked; decode: being received
    num_steps: int
    kv_bytes_received: int = 0


record_decoder: Decoder[WorkerRecord] = Decoder(
    WorkerRecord, bytes_max=RECORD_BYTES_MAX, as_json=True
)
status_decoder: Decoder[WorkerStatus] = Decoder(
    WorkerStatus, bytes_max=RECORD_BYTES_MAX, as_json=True
)
