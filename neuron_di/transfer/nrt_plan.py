"""Which bytes go from which core to which: what both ends of a pair of devices reckon alike.

Geometries come from both ends' regions, so both make the same plan of the same blocks and tokens:
each head once, from whatever number of ranks to whatever other. Of a head's replicas one sends and
one receives, layer by layer another; the receiver fills its others by itself.

What moves is the used tokens, but for keys that both ends keep transposed in slots of one length:
of them a head's whole part of the slot is one message, with the unused tail and the pad behind it,
which nobody reads. By used tokens it would be a message for each dim. While such a message is under
way a step of the receiver's model may write to the same pad, as its idle rows do: whatever is there
in the end, no attention takes it.
"""

import hashlib
from dataclasses import dataclass

import msgspec
import numpy as np

from neuron_di.errors import ConfigError, LocalProtocolError, PeerRefused, RemoteProtocolError
from neuron_di.kv import (
    DTYPE_BYTES,
    BlockIds,
    DeviceKv,
    KvGeometry,
    KvLayout,
    KvMap,
    Planner,
    Strides,
    as_ids,
)
from neuron_di.kv.geometry import Order
from neuron_di.kv.runs import Ints
from neuron_di.wire import DeviceFields, NrtRegion

_ORDERS: tuple[Order, ...] = ("HSD", "SHD", "HDS")
_HOLDERS_MAX = 1 << 16  # of all layers' heads, replicas counted: 64 ranks of 80 layers are 5,120
_MESSAGES_MAX = 1 << 18  # of a slot
_BYTES_MAX = 1 << 62  # of one tensor: offsets are signed, of 64 bits, and are added to


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """A transfer's messages. Those of one pair of cores lie together, in the order in which both
    ends post them. All arrays int64; `starts` has where each pair's begin, and the end."""

    starts: Ints
    source_tensors: Ints
    source_offsets: Ints
    destination_tensors: Ints
    destination_offsets: Ints
    lengths: Ints

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())

    def digest(self) -> int:
        """64 bits, equal where two ends would post messages of the same lengths in one order."""
        sizes = np.concatenate((self.starts, self.lengths)).astype("<i8").tobytes()
        return int.from_bytes(hashlib.sha256(sizes).digest()[:8], "little")

    def in_turns(self) -> tuple[Ints, Ints]:
        """The first message of each pair of cores, then the second of each, and so on, as far as
        each has any: their pairs, and their rows."""
        counts = np.diff(self.starts)
        pairs = np.repeat(np.arange(len(counts)), counts)
        turns = np.arange(len(pairs)) - self.starts[pairs]
        order = np.lexsort((pairs, turns))
        return pairs[order], order


class DevicePlan:
    """From the slots of one device into those of another. Immutable.

    `pairs` are the ranks that exchange anything: (source's, destination's). PeerRefused where the
    two keep KV in different orders, so that single numbers would have to move, or a slot as more
    messages than _MESSAGES_MAX.
    """

    def __init__(self, source: KvGeometry, destination: KvGeometry) -> None:
        self._block_size = source.block_size
        try:
            self._planner = Planner(source, destination, with_unused=True)
        except ConfigError as error:
            raise PeerRefused(f"another KV layout: {error.message}") from None
        if self._planner.is_staged:
            raise PeerRefused("the two devices keep KV in different orders or number formats")
        if (most := self._planner.num_runs_below(source.block_size)) > _MESSAGES_MAX:
            raise PeerRefused(f"a slot would move as {most} messages, at most {_MESSAGES_MAX} may")
        self._source_ranks, self._destination_ranks = map(_ranks_by_tensor, (source, destination))
        self._num_ranks = len(destination.heads)
        runs = self._planner.plan([0], [0], 1).runs
        assert runs.source_tensors is not None
        assert runs.destination_tensors is not None
        self._pairs = np.unique(self._pairs_of(runs.source_tensors, runs.destination_tensors))
        self.pairs: tuple[tuple[int, int], ...] = tuple(
            divmod(pair, self._num_ranks) for pair in self._pairs.tolist()
        )

    def moves(
        self, source_ids: BlockIds, destination_ids: BlockIds, num_tokens: int | None
    ) -> Moves:
        """For these blocks, which hold so many tokens; None: they are full.

        RemoteProtocolError for blocks that are none, named twice, too many or too few.
        """
        for ids in (source_ids, destination_ids):
            if len(set(ids)) < len(ids):
                raise RemoteProtocolError("a block is named twice in one transfer")
        count = len(source_ids) * self._block_size if num_tokens is None else num_tokens
        if not count:
            raise RemoteProtocolError("a transfer of nothing")
        try:
            runs = self._planner.plan(as_ids(source_ids), as_ids(destination_ids), count).runs
        except (LocalProtocolError, OverflowError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"a transfer that cannot be: {error}") from None
        assert runs.source_tensors is not None
        assert runs.destination_tensors is not None
        pairs = self._pairs_of(runs.source_tensors, runs.destination_tensors)
        order = np.argsort(pairs, kind="stable")
        return Moves(
            starts=np.append(np.searchsorted(pairs[order], self._pairs), len(pairs)),
            source_tensors=runs.source_tensors[order],
            source_offsets=runs.source_offsets[order],
            destination_tensors=runs.destination_tensors[order],
            destination_offsets=runs.destination_offsets[order],
            lengths=runs.lengths[order],
        )

    def _pairs_of(self, source_tensors: Ints, destination_tensors: Ints) -> Ints:
        sources = self._source_ranks[source_tensors]
        pairs: Ints = sources * self._num_ranks + self._destination_ranks[destination_tensors]
        return pairs


def _ranks_by_tensor(geometry: KvGeometry) -> Ints:
    ranks = geometry.rank_of_tensor()
    return np.array([ranks[number] for number in range(len(ranks))], np.int64)


def region_of(
    device: DeviceKv,
    num_blocks: int,
    *,
    host: str,
    port: int,
    secret: bytes,
    is_tls: bool,
) -> NrtRegion:
    """What a peer must know of this worker's device. ConfigError where it cannot be told."""
    fields = device_fields(device, num_blocks)
    return NrtRegion(
        host=host, port=port, secret=secret, is_tls=is_tls, **msgspec.structs.asdict(fields)
    )


def device_fields(device: DeviceKv, num_blocks: int) -> DeviceFields:
    """Of that, what every engine tells. ConfigError where it cannot be told."""
    geometry = device.geometry
    keys, values = (_order(geometry, strides) for strides in geometry.strides)
    fields = DeviceFields(
        lncs=list(device.lncs),
        heads=[list(heads) for heads in geometry.heads],
        keys=keys,
        values=values,
        block_size=geometry.block_size,
        num_blocks=num_blocks,
    )
    told = _rank_tensors(fields, _layout_of(geometry))
    for name in ("tensors", "offsets"):
        if not np.array_equal(getattr(told, name), getattr(geometry, name)):
            raise ConfigError("the device's KV is not one tensor per rank, layer and K or V")
    return fields


def device_geometry(region: DeviceFields, layout: KvLayout) -> KvGeometry:
    """The part of a peer's slots that requests use; both ends' pools have `layout`.

    RemoteProtocolError where the region is none that a worker has.
    """
    if len(region.lncs) != len(region.heads) or len(set(region.lncs)) < len(region.lncs):
        raise RemoteProtocolError("a device whose cores are not one for each rank")
    if sum(map(len, region.heads)) * layout.num_layers > _HOLDERS_MAX:
        raise RemoteProtocolError("a device with more KV heads than there are")
    if region.block_size < layout.block_size:
        raise RemoteProtocolError("a device with slots that are shorter than its requests")
    try:
        geometry = _rank_tensors(region, layout)
        geometry.holders()
    except (ConfigError, IndexError) as error:
        raise RemoteProtocolError(f"a device that cannot be: {error}") from None
    if geometry.num_kv_heads != layout.num_kv_heads:
        raise RemoteProtocolError("a device with other KV heads than its pool")
    if geometry.num_blocks * geometry.strides[0].block > _BYTES_MAX:
        raise RemoteProtocolError("a device of a size that none has")
    return DeviceKv.used_part(geometry, layout.block_size)


def _order(geometry: KvGeometry, strides: Strides) -> Order:
    """Of one rank's keys or values. Where a rank has one head two orders are the same but for the
    stride that nobody takes."""
    sizes = len(geometry.heads[0]), geometry.block_size, geometry.head_dim
    for order in _ORDERS:
        if Strides.of(order, *sizes, DTYPE_BYTES[geometry.dtype]) == strides:
            return order
    raise ConfigError("the device's KV is not an array of slots, heads, tokens and dims")


def _layout_of(geometry: KvGeometry) -> KvLayout:
    return KvLayout(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        block_size=geometry.block_size,
        dtype=geometry.dtype,
    )


def _rank_tensors(region: DeviceFields, layout: KvLayout) -> KvGeometry:
    return KvGeometry.of_rank_tensors(
        KvMap(tuple(map(tuple, region.heads))),
        num_layers=layout.num_layers,
        head_dim=layout.head_dim,
        block_size=region.block_size,
        num_blocks=region.num_blocks,
        dtype=layout.dtype,
        keys=region.keys,
        values=region.values,
    )
