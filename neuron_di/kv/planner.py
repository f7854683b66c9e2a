"""From one worker's KV geometry into another's: the fewest contiguous runs of bytes.

Only tokens that were used move; runs that are neighbours at both ends are one; each number of the
destination is written once. Where a head has replicas, "once" carries it over the link once, from
and to another replica layer by layer, so that all ranks and links share the work, and the
destination fills its further replicas by itself. "each" sends every replica its own copy, the
receivers spread over the senders (seed N-48): more bytes, but nothing is left to do.

Where a run would be a single number (keys transposed at one end only) or numbers must be
converted, the plan is staged: the source's own form moves into landing memory, which is a geometry
like any other, and a Placement says what goes where from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv.geometry import KvGeometry, Strides
from neuron_di.kv.layout import DTYPE_BYTES
from neuron_di.kv.placement import Placement, PlacementPart
from neuron_di.kv.runs import Ints, Runs, as_ids, joined
from neuron_di.kv.token_spans import TokenSpans, token_spans

Replicas = Literal["once", "each"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What moves, and what is left to do where it arrives.

    `runs` go to the destination's tensors, or, where `placement` is not None, to tensor 0: landing
    memory of `landing_bytes`. `fills` then copy within the destination's tensors.
    """

    runs: Runs
    fills: Runs
    placement: Placement | None = None
    landing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Heads of layers, row by row: who holds it at either end."""

    layer: Ints
    source: tuple[Ints, Ints]  # rank, place among its heads
    destination: tuple[Ints, Ints]


class Planner:
    """Plans for one pair of geometries. Immutable. ConfigError where no exchange can be."""

    def __init__(
        self, source: KvGeometry, destination: KvGeometry, replicas: Replicas = "once"
    ) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(destination, name), getattr(source, name)
            if ours != theirs:
                raise ConfigError(f"KV of {name} {theirs} cannot be brought into {name} {ours}")
        self._source = source
        self._destination = destination
        self._replicas: Replicas = replicas
        self._rows, self._fill_rows = _moves(source, destination, replicas)
        self.is_staged = source.dtype != destination.dtype or any(
            _atoms(ours, theirs, source.head_dim, source.dtype) is None
            for ours, theirs in zip(destination.strides, source.strides, strict=True)
        )

    def plan(
        self,
        source_ids: Sequence[int] | NDArray[np.integer],
        destination_ids: Sequence[int] | NDArray[np.integer],
        num_tokens: int,
    ) -> Plan:
        """For one request: its blocks, or its slot, at either end, in token order.

        LocalProtocolError for lists that do not fit the tokens, and for a block outside of its
        memory.
        """
        source, destination = self._source, self._destination
        sources = _checked(source_ids, source, num_tokens)
        destinations = _checked(destination_ids, destination, num_tokens)
        if self.is_staged and num_tokens:
            landing = source.landing(num_tokens)
            places = np.arange(landing.num_blocks, dtype=np.int64)
            staged = Planner(source, landing).plan(sources, places, num_tokens)
            rows, _ = _moves(landing, destination, "each")
            placement = _placement(landing, destination, rows, places, destinations, num_tokens)
            landing_bytes = landing.tensor_bytes()[0]
            return replace(staged, placement=placement, landing_bytes=landing_bytes)
        spans = token_spans(num_tokens, source.block_size, destination.block_size)
        fills = token_spans(num_tokens, destination.block_size, destination.block_size)
        return Plan(
            runs=_runs(source, destination, self._rows, spans, sources, destinations),
            fills=_runs(
                destination, destination, self._fill_rows, fills, destinations, destinations
            ),
        )


def _checked(
    ids: Sequence[int] | NDArray[np.integer], geometry: KvGeometry, num_tokens: int
) -> Ints:
    blocks = as_ids(ids)
    if num_tokens < 0 or len(blocks) != geometry.num_blocks_for(num_tokens):
        raise LocalProtocolError(f"{len(blocks)} blocks for {num_tokens} tokens")
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= geometry.num_blocks):
        raise LocalProtocolError(f"a block outside of a memory of {geometry.num_blocks}")
    return blocks


def _moves(source: KvGeometry, destination: KvGeometry, replicas: Replicas) -> tuple[_Rows, _Rows]:
    """What goes over the link, and what within the destination: (layer, *from, *to)."""
    moves: list[tuple[int, int, int, int, int]] = []
    fills: list[tuple[int, int, int, int, int]] = []
    for senders, receivers in zip(source.holders(), destination.holders(), strict=True):
        # The receivers that a sender serves are neighbours; those it leaves over are spread.
        step = max(1, len(senders) // len(receivers))
        for layer in range(source.num_layers):
            if replicas == "each":
                for i, receiver in enumerate(receivers):
                    moves.append((layer, *senders[i * step % len(senders)], *receiver))
                continue
            turn, first = divmod(layer, len(receivers))
            sender = senders[(first * step + turn % step) % len(senders)]
            moves.append((layer, *sender, *receivers[first]))
            fills += (
                (layer, *receivers[first], *receiver)
                for i, receiver in enumerate(receivers)
                if i != first
            )
    return _as_rows(moves), _as_rows(fills)


def _as_rows(moves: list[tuple[int, int, int, int, int]]) -> _Rows:
    table = np.array(moves, np.int64).reshape(-1, 5).T
    return _Rows(table[0], (table[1], table[2]), (table[3], table[4]))


def _bases(
    geometry: KvGeometry, rows: _Rows, holder: tuple[Ints, Ints], c: int
) -> tuple[Ints, Ints]:
    """The tensor of each row, and its offset there in block 0."""
    rank, place = holder
    offsets = geometry.offsets[rank, rows.layer, c] + place * geometry.strides[c].head
    return geometry.tensors[rank, rows.layer, c], offsets


def _atoms(ours: Strides, theirs: Strides, num_dims: int, dtype: str) -> str | None:
    """What is contiguous at both ends: some tokens' "dims", or the "tokens" of one dim."""
    item = DTYPE_BYTES[dtype]
    if ours.dim == theirs.dim == item or num_dims == 1:
        return "dims"
    return "tokens" if ours.token == theirs.token == item else None


def _runs(
    source: KvGeometry,
    destination: KvGeometry,
    rows: _Rows,
    spans: TokenSpans,
    source_ids: Ints,
    destination_ids: Ints,
) -> Runs:
    parts = [
        part
        for c in (0, 1)
        for part in _parts(source, destination, rows, spans, source_ids, destination_ids, c)
    ]
    table = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    return _fewest(table)


def _parts(
    source: KvGeometry,
    destination: KvGeometry,
    rows: _Rows,
    spans: TokenSpans,
    source_ids: Ints,
    destination_ids: Ints,
    c: int,
) -> list[Ints]:
    """Short runs that together are all bytes of K or V, as columns: tensor and offset of the
    source, tensor and offset of the destination, length."""
    theirs, ours = source.strides[c], destination.strides[c]
    source_tensors, source_rows = _bases(source, rows, rows.source, c)
    destination_tensors, destination_rows = _bases(destination, rows, rows.destination, c)
    item = DTYPE_BYTES[source.dtype]
    source_spans = (
        source_ids[spans.source_blocks] * theirs.block + spans.source_tokens * theirs.token
    )
    destination_spans = (
        destination_ids[spans.destination_blocks] * ours.block
        + spans.destination_tokens * ours.token
    )
    if _atoms(ours, theirs, source.head_dim, source.dtype) == "tokens":
        dims = np.arange(source.head_dim, dtype=np.int64)
        return [
            _grid(
                (source_tensors, _sums(source_rows, dims * theirs.dim), source_spans),
                (destination_tensors, _sums(destination_rows, dims * ours.dim), destination_spans),
                spans.counts * item,
            )
        ]
    # Heads that are neighbours at both ends, token by token, are one wider row.
    widths = np.full(len(source_rows), source.head_dim * item, np.int64)
    if theirs.head == ours.head == source.head_dim * item:
        merged = _fewest(
            np.stack((source_tensors, source_rows, destination_tensors, destination_rows, widths))
        )
        assert merged.source_tensors is not None
        assert merged.destination_tensors is not None
        source_tensors, source_rows = merged.source_tensors, merged.source_offsets
        destination_tensors, destination_rows = (
            merged.destination_tensors,
            merged.destination_offsets,
        )
        widths = merged.lengths
    parts = []
    for width in np.unique(widths):
        own = widths == width
        if width == theirs.token == ours.token:
            starts, ends, lengths = source_spans, destination_spans, spans.counts * width
        else:  # token by token
            first = np.repeat(np.cumsum(spans.counts) - spans.counts, spans.counts)
            token = np.arange(len(first), dtype=np.int64) - first
            starts = np.repeat(source_spans, spans.counts) + token * theirs.token
            ends = np.repeat(destination_spans, spans.counts) + token * ours.token
            lengths = np.full(len(token), width, np.int64)
        parts.append(
            _grid(
                (source_tensors[own], source_rows[own], starts),
                (destination_tensors[own], destination_rows[own], ends),
                lengths,
            )
        )
    return parts


def _sums(rows: Ints, columns: Ints) -> Ints:
    return rows[:, None] + columns


def _grid(
    source: tuple[Ints, Ints, Ints], destination: tuple[Ints, Ints, Ints], lengths: Ints
) -> Ints:
    """Every row with every span."""
    columns = []
    for tensors, rows, spans in (source, destination):
        offsets = rows[..., None] + spans
        columns += [
            np.broadcast_to(tensors.reshape(-1, *(1,) * (offsets.ndim - 1)), offsets.shape),
            offsets,
        ]
    columns.append(np.broadcast_to(lengths, columns[1].shape))
    return np.stack([column.ravel() for column in columns])


def _fewest(table: Ints) -> Runs:
    """The runs in the order of the destination's bytes, neighbours joined: there are no fewer."""
    source_tensors, source_offsets, destination_tensors, destination_offsets, lengths = table[
        :, np.lexsort((table[3], table[2]))
    ]
    return joined(
        Runs(
            source_offsets=source_offsets,
            destination_offsets=destination_offsets,
            lengths=lengths,
            source_tensors=source_tensors,
            destination_tensors=destination_tensors,
        )
    )


def _placement(
    landing: KvGeometry,
    destination: KvGeometry,
    rows: _Rows,
    source_ids: Ints,
    destination_ids: Ints,
    num_tokens: int,
) -> Placement:
    spans = token_spans(num_tokens, landing.block_size, destination.block_size)
    parts = []
    for c, (theirs, ours) in enumerate(zip(landing.strides, destination.strides, strict=True)):
        _, landing_rows = _bases(landing, rows, rows.source, c)
        tensors, destination_rows = _bases(destination, rows, rows.destination, c)
        parts.append(
            PlacementPart(
                landing_spans=source_ids[spans.source_blocks] * theirs.block
                + spans.source_tokens * theirs.token,
                destination_spans=destination_ids[spans.destination_blocks] * ours.block
                + spans.destination_tokens * ours.token,
                span_tokens=spans.counts,
                landing_rows=landing_rows,
                destination_tensors=tensors,
                destination_rows=destination_rows,
                landing_strides=theirs,
                destination_strides=ours,
            )
        )
    return Placement(
        parts=tuple(parts),
        num_dims=landing.head_dim,
        landing_dtype=landing.dtype,
        destination_dtype=destination.dtype,
    )
