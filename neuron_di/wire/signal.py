"""What a decode worker and a prefill worker say to each other over ZMQ (N-39, N-40, N-52).

    decode (DEALER)                 prefill (ROUTER)
    Handshake        ->
                     <-                 Welcome            (or Refused)
    KvMapInit        ->
                     <-                 KvMap
    LookupAll        ->                                    "is this request's KV there?"
                     <-                 NotYet             prefill is not finished; Ready follows
                     <-                 Never              it failed, was cancelled, or is over
                     <-                 LayerReady         one layer of some of its blocks is there
    PullLayer        ->                      where a send must be posted for it; nothing is promised
                     <-                 Ready              all ids, whose KV it is, where it lies
    Hold                 ->                            Ready is here, a slot is not: keep the KV
    Pull             ->                                    a slot is free: the transfer starts now
      (the transfer engine moves the blocks; two-sided engines post their sends on Pull)
    Done             ->                                    blocks arrived and verified; free them
    Abort                ->                                   this request is over on my side
    Ping             ->
                     <-                 Pong

`request_id` and `attempt` are typed fields; nothing is parsed out of an id. A message that
cannot be decoded is answered with Malformed and changes nothing else.
"""

from typing import Annotated

import msgspec

from neuron_di.types import WORKER_ID_PATTERN, Incarnation, WorkerId
from neuron_di.wire.codec import (
    SIGNAL_BYTES_MAX,
    BoundedAttempt,
    BoundedCount,
    BoundedRequestId,
    Decoder,
)
from neuron_di.wire.regions import EngineName, KvForm, LayoutFields, Offers

SIGNAL_VERSION = 4
REASON_CHARS_MAX = 1000
PIECES_MAX = 4096  # of one request's KV that is streamed


class Handshake(msgspec.Struct, frozen=True, kw_only=True, tag="handshake"):
    version: int
    # It stands in this worker's record, whose size is bounded.
    worker_id: Annotated[WorkerId, msgspec.Meta(pattern=rf"\A{WORKER_ID_PATTERN}\Z")]
    incarnation: Incarnation
    expects: Incarnation  # the incarnation the sender was told to talk to
    model_digest: str
    layout_digest: str  # of what two KV layouts must agree in: KvLayout.exchange_digest


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    status: str  # "ok"
    timestamp: float  # unix seconds
    worker_id: WorkerId
    incarnation: Incarnation


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]
    is_stale: bool = False  # true: this is not the process you expected, ask who is there now
    is_busy: bool = False  # true: there is no room for another peer now


class KvMapInit(msgspec.Struct, frozen=True, kw_only=True, tag="kv_map_init"):
    """The sender's KV: its geometry, and every way to move it, the preferred first."""

    layout: LayoutFields
    offers: Offers


class KvMap(msgspec.Struct, frozen=True, kw_only=True, tag="kv_map"):
    """As KvMapInit. Of what could move it, what is prepared for this peer."""

    layout: LayoutFields
    offers: Offers


class LookupAll(msgspec.Struct, frozen=True, kw_only=True, tag="lookup_all"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt
    streams: bool = False  # layers are welcome while the prefill computes


class NotYet(msgspec.Struct, frozen=True, kw_only=True, tag="not_yet"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt


class Never(msgspec.Struct, frozen=True, kw_only=True, tag="never"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


class LayerReady(msgspec.Struct, frozen=True, kw_only=True, tag="layer_ready"):
    """One layer of full blocks, or of a prompt's last one, was computed: it may be fetched.

    Nothing is promised: what was fetched is believed only when it matches the digests of Ready.
    """

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    piece: Annotated[int, msgspec.Meta(ge=0, lt=PIECES_MAX)]  # the number of this message
    layer: Annotated[int, msgspec.Meta(ge=0)]
    first_block: Annotated[int, msgspec.Meta(ge=0)]  # its place in the request
    block_ids: list[int]
    generations: list[int]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]  # of the whole request


class PullLayer(msgspec.Struct, frozen=True, kw_only=True, tag="pull_layer"):
    """Post the send of this piece. Only of an engine that needs one."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    piece: Annotated[int, msgspec.Meta(ge=0, lt=PIECES_MAX)]
    engine: EngineName


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Everything the decode worker needs to continue: it never re-tokenises or re-samples.

    `digests[i]` is block i's of `kv.block_digests`, keyed by the identity that the other fields
    state: whose KV this is, computed by which process, in which attempt, in which layout.
    """

    request_id: BoundedRequestId
    attempt: BoundedAttempt
    worker_id: WorkerId
    incarnation: Incarnation
    layout_digest: str  # of exactly this layout
    prompt_ids: list[int]
    generated: list[int]  # output ids so far, the newest last; its KV is not there yet
    block_ids: list[int]  # in the prefill worker's pool, in token order
    generations: list[int]  # of those blocks; a reader compares them after its copy
    digests: list[int]  # unsigned, 64 bits each
    num_tokens: int  # token positions that hold KV
    in_reasoning: bool = False  # the prompt ends inside of the model's reasoning

    def __repr__(self) -> str:
        return f"Ready(request_id={self.request_id!r}, attempt={self.attempt})"


def ready_bytes_max(num_tokens: int, num_blocks: int) -> int:
    """What a Ready of so many token ids and blocks takes at most; it may have SIGNAL_BYTES_MAX.

    An id takes up to 5 bytes, a block's generation and digest up to 9 each.
    """
    return 4096 + 5 * num_tokens + (5 + 9 + 9) * num_blocks


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Repeated between Ready and Done: extends the lease of the parked KV."""

    request_id: BoundedRequestId
    attempt: BoundedAttempt


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag="pull"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt
    engine: EngineName  # how: one that both offered, and that worked when it was tried
    # Destination blocks in the decode worker's pool, those that it has already included. Where
    # owners change instead of bytes, what the prefill worker gets in exchange.
    block_ids: list[int]
    # Blocks of Ready that the decode worker has already, from the first on: they are not moved.
    num_held: Annotated[int, msgspec.Meta(ge=0)] = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt
    engine: EngineName
    form: KvForm
    # Both go to the proxy in a receipt: beyond its bounds that would end a link with all its legs.
    kv_bytes: BoundedCount
    transfer_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)]  # no NaN: it is passed on as JSON


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    request_id: BoundedRequestId
    attempt: BoundedAttempt
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    sequence: int


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    sequence: int


class Malformed(msgspec.Struct, frozen=True, kw_only=True, tag="malformed"):
    reason: Annotated[str, msgspec.Meta(max_length=REASON_CHARS_MAX)]


FromDecode = Handshake | KvMapInit | LookupAll | PullLayer | Hold | Pull | Done | Abort | Ping
FromPrefill = Welcome | Refused | KvMap | NotYet | Never | LayerReady | Ready | Pong | Malformed

from_decode_decoder: Decoder[FromDecode] = Decoder(
    FromDecode, bytes_max=SIGNAL_BYTES_MAX, as_json=False
)
from_prefill_decoder: Decoder[FromPrefill] = Decoder(
    FromPrefill, bytes_max=SIGNAL_BYTES_MAX, as_json=False
)
