"""From one worker's KV geometry into another's: the fewest contiguous runs of bytes.

Only tokens that were used move (but see `with_unused`); runs that are neighbours at both ends are
one; each number of the destination is written once. Where a head has replicas, "once" carries it
over the link once, from and to another replica layer by layer, so that all ranks and links share
the work, and the destination fills its further replicas by itself. "each" sends every replica its
own copy, the receivers spread over the senders (N-48): more bytes, but nothing is left to do.

Where a run would be a single number (keys transposed at one end only) or numbers must be
converted, the plan is staged: the source's own form moves into landing memory, which is a geometry
like any other, and a Placement says what goes where from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv.geometry import KvGeometry
from neuron_di.kv.placement import Placement, PlacementPart
from neuron_di.kv.runs import Ints, Runs, as_ids
from neuron_di.kv.sheet import (
    Rows,
    Sheet,
    are_dims_joined,
    bases,
    num_runs_below,
    runs_of,
    sheets_of,
)
from neuron_di.kv.token_spans import token_spans

Replicas = Literal["once", "each"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What moves, and what is left to do where it arrives.

    `runs` go to the destination's tensors, or, where `placement` is not None, to tensor 0: landing
    memory of `landing_bytes`. `fills` then copy within the destination's tensors.
    """

    runs: Runs
    make_fills: Callable[[], Runs]
    placement: Placement | None = None
    landing_bytes: int = 0

    @cached_property
    def fills(self) -> Runs:
        """Reckoned when first asked for: they may be many times the runs, the source needs none of
        them, and the destination none before the runs have arrived."""
        return self.make_fills()


class Planner:
    """Plans for one pair of geometries. Immutable. ConfigError where no exchange can be.

    `with_unused`: where both ends have a dim's tokens together, in blocks that are alike, a head's
    part of a block moves whole, as one run instead of one for each dim. Then what lies behind the
    used tokens of the destination's block is overwritten, too. Fills are of used tokens only.
    """

    def __init__(
        self,
        source: KvGeometry,
        destination: KvGeometry,
        replicas: Replicas = "once",
        *,
        with_unused: bool = False,
    ) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(destination, name), getattr(source, name)
            if ours != theirs:
                raise ConfigError(f"KV of {name} {theirs} cannot be brought into {name} {ours}")
        self._source = source
        self._destination = destination
        self._replicas: Replicas = replicas
        self._with_unused = with_unused
        self._rows = _moves(source, destination, replicas)
        self.is_staged = source.dtype != destination.dtype or any(
            are_dims_joined(ours, theirs, source.head_dim, source.dtype) is None
            for ours, theirs in zip(destination.strides, source.strides, strict=True)
        )

    @cached_property
    def _sheets(self) -> list[Sheet]:
        return sheets_of(self._source, self._destination, self._rows, with_unused=self._with_unused)

    @cached_property
    def _fill_sheets(self) -> list[Sheet]:
        """Reckoned when first asked for: of many replicas they are many times the others."""
        if self._replicas == "each":
            return []
        fills = _fills(self._destination)
        return sheets_of(self._destination, self._destination, fills)

    def num_runs_below(self, num_tokens: int) -> int:
        """A block of so many tokens is no more runs than these. Told before as many are
        made. Not of a staged plan."""
        return num_runs_below(
            self._source,
            self._destination,
            self._rows,
            num_tokens,
            with_unused=self._with_unused,
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
            rows = _moves(landing, destination, "each")
            placement = _placement(landing, destination, rows, places, destinations, num_tokens)
            landing_bytes = landing.tensor_bytes()[0]
            return replace(staged, placement=placement, landing_bytes=landing_bytes)
        own, size = destinations.copy(), destination.block_size  # the caller may change theirs
        return Plan(
            runs=runs_of(
                self._sheets,
                token_spans(num_tokens, source.block_size, size),
                sources,
                destinations,
            ),
            make_fills=lambda: runs_of(
                self._fill_sheets, token_spans(num_tokens, size, size), own, own
            ),
        )


def placement_between(
    source: KvGeometry,
    destination: KvGeometry,
    source_ids: Sequence[int] | NDArray[np.integer],
    destination_ids: Sequence[int] | NDArray[np.integer],
    num_tokens: int,
) -> Placement:
    """A local copy between two memories of the host, the source being one tensor.

    Every replica of the destination is written. LocalProtocolError as from Planner.plan.
    """
    rows = _moves(source, destination, "each")
    sources = _checked(source_ids, source, num_tokens)
    destinations = _checked(destination_ids, destination, num_tokens)
    return _placement(source, destination, rows, sources, destinations, num_tokens)


def _checked(
    ids: Sequence[int] | NDArray[np.integer], geometry: KvGeometry, num_tokens: int
) -> Ints:
    blocks = as_ids(ids)
    if num_tokens < 0 or len(blocks) != geometry.num_blocks_for(num_tokens):
        raise LocalProtocolError(f"{len(blocks)} blocks for {num_tokens} tokens")
    if len(blocks) and (blocks.min() < 0 or blocks.max() >= geometry.num_blocks):
        raise LocalProtocolError(f"a block outside of a memory of {geometry.num_blocks}")
    return blocks


def _moves(source: KvGeometry, destination: KvGeometry, replicas: Replicas) -> Rows:
    """What goes over the link: (layer, *from, *to)."""
    moves: list[tuple[int, int, int, int, int]] = []
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
    return _as_rows(moves)


def _fills(destination: KvGeometry) -> Rows:
    """What then goes within the destination: from the replica that `_moves` brings a head to, to
    its others."""
    fills: list[tuple[int, int, int, int, int]] = []
    for receivers in destination.holders():
        for layer in range(destination.num_layers):
            first = layer % len(receivers)
            fills += (
                (layer, *receivers[first], *receiver)
                for i, receiver in enumerate(receivers)
                if i != first
            )
    return _as_rows(fills)


def _as_rows(moves: list[tuple[int, int, int, int, int]]) -> Rows:
    table = np.array(moves, np.int64).reshape(-1, 5).T
    return Rows(table[0], (table[1], table[2]), (table[3], table[4]))


def _placement(
    landing: KvGeometry,
    destination: KvGeometry,
    rows: Rows,
    source_ids: Ints,
    destination_ids: Ints,
    num_tokens: int,
) -> Placement:
    spans = token_spans(num_tokens, landing.block_size, destination.block_size)
    parts = []
    for c, (theirs, ours) in enumerate(zip(landing.strides, destination.strides, strict=True)):
        _, landing_rows = bases(landing, rows, rows.source, c)
        tensors, destination_rows = bases(destination, rows, rows.destination, c)
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
