"""What a worker says of itself: the record it announces, and its status when asked.

The key is that of AWS's document, `/workers/{role}/{ip}/{api_port}` (N-36); the value is typed.
"""

from typing import Annotated

import msgspec

from neuron_di.types import WORKER_ID_PATTERN, Incarnation, Role, WorkerId, WorkerState
from neuron_di.wire.codec import Decoder
from neuron_di.wire.legs import PeerAddress, ToolFormat
from neuron_di.wire.sampling_defaults import SamplingDefaults

RECORD_BYTES_MAX = 64 << 10
PROTOCOL_VERSION = 6

STATUS_BYTES_MAX = 256 << 10
TRANSFERS_MAX = 16
LANES_MAX = 256  # in a status

Transfer = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
# Of more no load and no metric can be computed.
_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Tag = Annotated[str, msgspec.Meta(min_length=1)]  # an empty one divides no text


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's entry in the registry."""

    protocol_version: int
    worker_id: Annotated[WorkerId, msgspec.Meta(pattern=rf"\A{WORKER_ID_PATTERN}\Z")]
    incarnation: Incarnation
    role: Role
    state: WorkerState
    pid: _Int64
    model: str  # the name clients use
    model_digest: str
    layout_digest: str  # of what two KV layouts must agree in, so that one can take the other's
    context_tokens: _Int64
    host: str
    api_port: _Int64
    signal_host: str
    signal_port: _Int64  # 0 where the role has no SendBuffer (decode)
    # Public CURVE key of its signal link, in Z85; None: what is said there is not encrypted.
    signal_key: str | None = None
    # What can move its KV, and whom that reaches, the preferred first: two workers need one in
    # common.
    transfer: Annotated[list[Transfer], msgspec.Meta(max_length=TRANSFERS_MAX)] = []
    started_unix_s: float
    # How this worker rounds. A continuation among workers that say the same is exact, bit for
    # bit; None: no two runs need be equal.
    numerics: str | None = None
    connections: list[str] = []  # worker ids of the peers it has a buffer for
    num_legs: _Int64 = 0  # requests it had when it announced this
    slots: _Int64 = 0  # requests it computes together
    num_vocab: _Int64 = 0
    # Tensor-parallel ranks: processes that each have a part of the model.
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # How the model's chat template writes tool calls; None: it does not.
    tool_format: ToolFormat | None = None
    reasoning: tuple[Tag, Tag] | None = None  # around a model's reasoning, if it has any
    sampling_defaults: SamplingDefaults = SamplingDefaults()

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
            signal_key=self.signal_key,
        )


class RecordHead(msgspec.Struct, frozen=True):
    """What any version's record has: more of it may be unreadable."""

    protocol_version: int = 0  # 0: it does not say
    worker_id: str = ""

    def why_not_understood(self) -> str:
        """In words; empty where it speaks our version, as far as it says."""
        if self.protocol_version in (0, PROTOCOL_VERSION):
            return ""
        return f"it speaks protocol version {self.protocol_version}, not {PROTOCOL_VERSION}"


class StatusHead(msgspec.Struct, frozen=True):
    """What any version's status has."""

    record: RecordHead


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What moves KV from one prefill worker to this decode worker, and why not something else."""

    peer: WorkerId
    engine: str
    reason: str  # a word on each engine that was considered
    verdicts: str = ""  # the same in codes, which may be shown to anybody
    connect_s: float  # that finding it took


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to GET /status on a worker: its record and its load at this moment."""

    record: WorkerRecord
    num_blocks: _Int64  # the sum of all the kinds below
    num_blocks_free: _Int64
    num_blocks_running: _Int64 = 0
    num_blocks_parked: _Int64 = 0  # prefill: under a KvLease
    num_blocks_receiving: _Int64 = 0  # decode
    num_blocks_cached: _Int64 = 0
    num_blocks_quarantined: _Int64 = 0  # given up while a transfer may still touch them
    num_legs: _Int64 = 0
    num_waiting: _Int64
    num_running: _Int64
    num_transferring: _Int64  # prefill: parked; decode: being received
    num_steps: _Int64
    kv_bytes_received: _Int64 = 0
    landing_bytes: _Int64 = 0  # decode: memory for KV of another layout; 0: no peer needed it yet
    landing_bytes_asked: _Int64 = 0  # of it: taken now, or waited for
    # What went wrong since this process started, and was dealt with.
    num_kv_mismatched: _Int64 = 0  # received KV that was not what was promised; never used
    num_leases_ended: _Int64 = 0  # KV that nobody pulled in time
    num_signals_refused: _Int64 = 0  # messages of peers that could not be understood or allowed
    num_stale: _Int64 = 0  # messages that came too late or twice
    num_lanes_failed: _Int64 = 0  # connections to a peer's KV that broke while they were used
    num_fallbacks: _Int64 = 0  # connections that are not the preferred ones, because these failed
    num_streams_refused: _Int64 = 0  # layers that came while the prefill ran, and were not right
    lanes: list[LaneStatus] = []  # decode: of the peers that it is connected to
    is_leaving: bool = False  # an order to drain or to change its role is prepared
    is_stuck: bool = False  # what the engine does now has taken so long that it may never end
    has_failed: bool = False  # the engine ended by a bug: this process is about to end


record_decoder: Decoder[WorkerRecord] = Decoder(
    WorkerRecord, bytes_max=RECORD_BYTES_MAX, as_json=True
)
status_decoder: Decoder[WorkerStatus] = Decoder(
    WorkerStatus, bytes_max=STATUS_BYTES_MAX, as_json=True
)
record_head_decoder: Decoder[RecordHead] = Decoder(
    RecordHead, bytes_max=RECORD_BYTES_MAX, as_json=True
)
status_head_decoder: Decoder[StatusHead] = Decoder(
    StatusHead, bytes_max=STATUS_BYTES_MAX, as_json=True
)
