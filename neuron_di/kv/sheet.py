"""The runs of a request's blocks, from what is the same in every block.

Requests differ in their block ids only. What lies in a span of so many tokens is reckoned, sorted
and joined once, as a template; then the offsets of all spans are added to it. Work and memory are
in proportion to the number of runs.

A table has a column per run: tensor and offset of the source, tensor and offset of the destination,
length.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from neuron_di.kv.geometry import KvGeometry, Strides
from neuron_di.kv.layout import DTYPE_BYTES
from neuron_di.kv.runs import Ints, Runs, joined
from neuron_di.kv.token_spans import TokenSpans


@dataclass(frozen=True, slots=True)
class Rows:
    """Heads of layers, row by row: who holds it at either end."""

    layer: Ints
    source: tuple[Ints, Ints]  # rank, place among its heads
    destination: tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows with common strides: what of one token is contiguous at both ends."""

    rows: Ints  # a table, for token 0 of block 0, by the destination's bytes
    source: Strides
    destination: Strides
    has_unused: bool  # rows are all tokens of a block, however many are used


def bases(geometry: KvGeometry, rows: Rows, holder: tuple[Ints, Ints], c: int) -> tuple[Ints, Ints]:
    """The tensor of each row of K or V, and its offset there in block 0."""
    rank, place = holder
    offsets = geometry.offsets[rank, rows.layer, c] + place * geometry.strides[c].head
    return geometry.tensors[rank, rows.layer, c], offsets


def are_dims_joined(ours: Strides, theirs: Strides, num_dims: int, dtype: str) -> bool | None:
    """Whether a token's dims are contiguous at both ends. If not, a dim's tokens are; None: neither
    are, every number would be a run of its own."""
    item = DTYPE_BYTES[dtype]
    if ours.dim == theirs.dim == item or num_dims == 1:
        return True
    return False if ours.token == theirs.token == item else None


def _are_heads_joined(source: KvGeometry, destination: KvGeometry, c: int) -> bool:
    """Whether a head's part of a block, all dims of all its tokens, is one run of the same order at
    both ends: dim by dim."""
    theirs, ours = source.strides[c], destination.strides[c]
    return (
        are_dims_joined(ours, theirs, source.head_dim, source.dtype) is False
        and source.block_size == destination.block_size
        and ours.dim == theirs.dim
        and ours.head == theirs.head == ours.dim * source.head_dim
    )


def num_runs_below(
    source: KvGeometry, destination: KvGeometry, rows: Rows, num_tokens: int, *, with_unused: bool
) -> int:
    """So many runs, or fewer, are these rows of a block of so many tokens. Told before as many are
    made."""
    num_runs = 0
    for c, (theirs, ours) in enumerate(zip(source.strides, destination.strides, strict=True)):
        is_by_head = with_unused and _are_heads_joined(source, destination, c)
        if not is_by_head and not are_dims_joined(ours, theirs, source.head_dim, source.dtype):
            num_runs += source.head_dim * len(rows.layer)
            continue
        is_whole = _are_tokens_joined(_sheet(source, destination, rows, c, with_unused))
        num_whole = int(is_whole.sum())
        num_runs += num_whole + (len(is_whole) - num_whole) * num_tokens
    return num_runs


def sheets_of(
    source: KvGeometry, destination: KvGeometry, rows: Rows, *, with_unused: bool = False
) -> list[Sheet]:
    """Of keys and of values; one of both where strides are equal, for then they may be joined.

    `with_unused`: heads whose parts of a block are alike at both ends are a run each, not one for
    each dim.
    """
    if len(rows.layer) == 0:
        return []
    keys, values = (_sheet(source, destination, rows, c, with_unused) for c in (0, 1))
    if (keys.source, keys.destination) != (values.source, values.destination):
        return [keys, values]
    return [replace(keys, rows=_sorted(np.concatenate((keys.rows, values.rows), axis=1)))]


def _sheet(
    source: KvGeometry, destination: KvGeometry, rows: Rows, c: int, with_unused: bool
) -> Sheet:
    theirs, ours = source.strides[c], destination.strides[c]
    num_dims, item = source.head_dim, DTYPE_BYTES[source.dtype]
    has_unused = with_unused and _are_heads_joined(source, destination, c)
    num_bytes = num_dims * (theirs.dim if has_unused else item)
    table = np.stack(
        (
            *bases(source, rows, rows.source, c),
            *bases(destination, rows, rows.destination, c),
            np.full(len(rows.layer), num_bytes, np.int64),
        )
    )
    if not has_unused and not are_dims_joined(ours, theirs, num_dims, source.dtype):
        dims = np.tile(np.arange(num_dims, dtype=np.int64), len(rows.layer))
        table = np.repeat(table, num_dims, axis=1)
        table[1] += dims * theirs.dim
        table[3] += dims * ours.dim
        table[4] = item
    table = _sorted(table)
    if theirs.head == ours.head == num_bytes:
        # Heads that are neighbours at both ends, token by token, are one wider row.
        table = _joined(table)
    return Sheet(table, theirs, ours, has_unused)


def runs_of(
    sheets: list[Sheet], spans: TokenSpans, source_ids: Ints, destination_ids: Ints
) -> Runs:
    """The fewest runs, those of one tensor of the destination together, by its blocks."""
    if len(spans.counts) == 0:
        sheets = []
    parts = [part for sheet in sheets for part in _parts(sheet, spans, source_ids, destination_ids)]
    if not parts:
        return _as_runs(np.zeros((5, 0), np.int64))
    return joined(_as_runs(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)))


def _parts(sheet: Sheet, spans: TokenSpans, source_ids: Ints, destination_ids: Ints) -> list[Ints]:
    """Tables that together are all bytes of the sheet's rows. Runs that are neighbours at both
    ends follow each other."""
    theirs, ours = sheet.source, sheet.destination
    from_ = source_ids[spans.source_blocks] * theirs.block + spans.source_tokens * theirs.token
    to = destination_ids[spans.destination_blocks] * ours.block
    to += spans.destination_tokens * ours.token
    from_, to, counts = _joined_spans(from_, to, spans.counts, theirs.token, ours.token)
    sizes, template_of = np.unique(counts, return_inverse=True)
    templates = [_template(sheet, size) for size in sizes.tolist()]
    # An area is what lies in one block of one tensor: its last run can only be the neighbour of the
    # next block's first. So one area comes after the other, and each block by block. (Where heads
    # have another order at the other end, others may be neighbours by chance; they stay two runs.)
    table = np.concatenate(templates, axis=1)
    template = np.repeat(np.arange(len(templates)), [one.shape[1] for one in templates])
    areas = np.stack((table[2], table[3] // ours.block))
    if len(templates) > 1:
        order = np.lexsort((template, areas[1], areas[0]))
        table, template, areas = table[:, order], template[order], areas[:, order]
    area = np.cumsum(np.append(False, (areas[:, 1:] != areas[:, :-1]).any(axis=0)))
    cells = (int(area[-1]) + 1, len(templates))
    num_runs = np.bincount(area * cells[1] + template, minlength=cells[0] * cells[1])
    num_runs = num_runs.reshape(cells)  # of each area in each template
    patterns, pattern_of = num_runs[:1], None
    if (num_runs != patterns).any():
        patterns, pattern_of = np.unique(num_runs, axis=0, return_inverse=True)
    parts = []
    for i, pattern in enumerate(patterns):
        own = table if pattern_of is None else table[:, pattern_of[area] == i]
        # For each run of an area: of which span it is, and which run of the area's templates.
        each = pattern[template_of]
        span = np.repeat(np.arange(len(counts)), each)
        first = np.cumsum(pattern) - pattern
        run = np.arange(len(span)) + np.repeat(first[template_of] - np.cumsum(each) + each, each)
        part = np.take(own.reshape(5, -1, int(pattern.sum())), run, axis=2)
        part[1] += from_[span]
        part[3] += to[span]
        parts.append(part.reshape(5, -1))
    return parts


def _joined_spans(
    from_: Ints, to: Ints, counts: Ints, source_token: int, destination_token: int
) -> tuple[Ints, Ints, Ints]:
    """Spans in the order of the destination's bytes; neighbours, token by token, are one."""
    order = np.argsort(to)
    from_, to, counts = from_[order], to[order], counts[order]
    is_start = np.ones(len(to), np.bool_)
    is_start[1:] = from_[1:] - from_[:-1] != counts[:-1] * source_token
    is_start[1:] |= to[1:] - to[:-1] != counts[:-1] * destination_token
    starts = np.flatnonzero(is_start)
    return from_[starts], to[starts], np.add.reduceat(counts, starts)


def _are_tokens_joined(sheet: Sheet) -> NDArray[np.bool_]:
    """Of which rows the tokens of a block are one run."""
    num_bytes = sheet.rows[4]
    are_joined: NDArray[np.bool_] = num_bytes == sheet.source.token
    are_joined &= num_bytes == sheet.destination.token
    return are_joined | sheet.has_unused


def _template(sheet: Sheet, num_tokens: int) -> Ints:
    """The runs of a span of so many tokens that begins with token 0 of block 0 at both ends."""
    rows = sheet.rows
    if sheet.has_unused:
        return rows
    is_whole = _are_tokens_joined(sheet)
    if is_whole.all():
        table = rows.copy()
        table[4] *= num_tokens
        return _joined(table)
    whole = rows[:, is_whole]
    whole[4] *= num_tokens
    tokens = np.repeat(rows[:, ~is_whole], num_tokens, axis=1)
    token = np.arange(tokens.shape[1], dtype=np.int64) % num_tokens
    tokens[1] += token * sheet.source.token
    tokens[3] += token * sheet.destination.token
    return _joined(_sorted(np.concatenate((whole, tokens), axis=1)))


def _sorted(table: Ints) -> Ints:
    """In the order of the destination's bytes."""
    return table[:, np.lexsort((table[3], table[2]))]


def _joined(table: Ints) -> Ints:
    """Neighbours joined: sorted, there are no fewer."""
    runs = joined(_as_runs(table))
    if len(runs) == table.shape[1]:
        return table
    assert runs.source_tensors is not None
    assert runs.destination_tensors is not None
    return np.stack(
        (
            runs.source_tensors,
            runs.source_offsets,
            runs.destination_tensors,
            runs.destination_offsets,
            runs.lengths,
        )
    )


def _as_runs(table: Ints) -> Runs:
    return Runs(
        source_tensors=table[0],
        source_offsets=table[1],
        destination_tensors=table[2],
        destination_offsets=table[3],
        lengths=table[4],
    )
