"""What the two ends of `neuron-di bench-transfer` say to each other.

    measuring end                    serving end
    OpenPool    ->
                <-                       PoolOpened      random bytes in a pool of this shape
    OpenLane    ->
                <-                       LaneOpened
    AcceptLane  ->
                <-                       LaneAccepted    how its pool is reached
    Prepare     ->
                <-                       Prepared        for one transfer; nothing moves yet
    Post        ->
                <-                       Posted          two-sided engines only: it may be asked for
    Finish      ->
                <-                       Finished        what it cost this end
    ClosePool   ->
                <-                       Closed
    whatever cannot be done  <-          Refused

One question at a time. The frames are authenticated; see control_link.py.
"""

from typing import Annotated

import msgspec

from neuron_di.types import Incarnation
from neuron_di.wire import Decoder, LayoutFields, Offer, ShmRegion

FRAME_BYTES_MAX = 4 << 20
BLOCKS_MAX = 1 << 18  # of one transfer, and of a pool

_IDS_MAX = 1 << 24  # an arena has more than one worker's blocks

_BlockIds = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, lt=_IDS_MAX)]],
    msgspec.Meta(min_length=1, max_length=BLOCKS_MAX),
]
_Offers = Annotated[list[Offer], msgspec.Meta(max_length=16)]
_EngineName = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
_LaneNumber = Annotated[int, msgspec.Meta(ge=0, lt=16)]
_Name = Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=64)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]


class OpenPool(msgspec.Struct, frozen=True, kw_only=True, tag="open_pool"):
    layout: LayoutFields
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)]
    # Of the measuring end's process, where the serving end is its child: one memory for both.
    arena_fd: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    is_on_device: bool = False  # in the memory of the first GPU


class PoolOpened(msgspec.Struct, frozen=True, kw_only=True, tag="pool_opened"):
    incarnation: _Name
    region: ShmRegion
    block_ids: _BlockIds


class OpenLane(msgspec.Struct, frozen=True, kw_only=True, tag="open_lane"):
    """`engine` may be "auto": all that this end has."""

    lane: _LaneNumber
    engine: _EngineName


class LaneOpened(msgspec.Struct, frozen=True, kw_only=True, tag="lane_opened"):
    open_s: _Seconds


class AcceptLane(msgspec.Struct, frozen=True, kw_only=True, tag="accept_lane"):
    lane: _LaneNumber
    incarnation: _Name
    offers: _Offers


class LaneAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="lane_accepted"):
    offers: _Offers


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare"):
    """One transfer: blocks of the serving end's pool into those of the measuring end's."""

    lane: _LaneNumber
    engine: _EngineName
    tag: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    source_ids: _BlockIds
    block_ids: _BlockIds
    with_digest: bool


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    generations: list[Annotated[int, msgspec.Meta(ge=0)]]
    digest: Annotated[bytes, msgspec.Meta(max_length=16)]  # of the blocks in order; may be empty


class Post(msgspec.Struct, frozen=True, kw_only=True, tag="post"):
    pass


class Posted(msgspec.Struct, frozen=True, kw_only=True, tag="posted"):
    pass


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    pass


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    cpu_s: _Seconds  # of the whole process since Prepared


class ClosePool(msgspec.Struct, frozen=True, kw_only=True, tag="close_pool"):
    pass


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag="closed"):
    pass


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    code: Annotated[str, msgspec.Meta(max_length=64)]
    message: Annotated[str, msgspec.Meta(max_length=2000)]


ToServing = OpenPool | OpenLane | AcceptLane | Prepare | Post | Finish | ClosePool
ToMeasuring = (
    PoolOpened | LaneOpened | LaneAccepted | Prepared | Posted | Finished | Closed | Refused
)

to_serving_decoder: Decoder[ToServing] = Decoder(
    ToServing, bytes_max=FRAME_BYTES_MAX, as_json=False
)
to_measuring_decoder: Decoder[ToMeasuring] = Decoder(
    ToMeasuring, bytes_max=FRAME_BYTES_MAX, as_json=False
)
