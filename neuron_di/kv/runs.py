"""What a transfer moves: runs of bytes, each contiguous at both ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuron_di_bindings.block_runs import are_below, as_int64

Ints = NDArray[np.int64]
BlockIds = Sequence[int] | NDArray[np.integer]

_FEW = 16  # so many numbers Python adds in less time than one call of numpy's takes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of this process that a transfer may write to or read from. Somebody else owns them."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs in the order in which their bytes travel. All arrays int64, one row per run.

    Offsets and lengths are bytes. Offsets count from the first byte of block 0 of a pool, or,
    where a worker's KV lies in several tensors, of the tensor that the tensor number names (the
    number's meaning is the geometry's). Two-sided engines use the source at one end and the
    destination at the other: only the order of the bytes must agree.
    """

    source_offsets: Ints
    destination_offsets: Ints
    lengths: Ints
    source_tensors: Ints | None = None  # None: there is one tensor
    destination_tensors: Ints | None = None

    @property
    def num_bytes(self) -> int:
        if len(self.lengths) <= _FEW:
            return sum(self.lengths.tolist())
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)


def as_ids(ids: BlockIds) -> Ints:
    """Block ids or the like as int64. OverflowError where one is beyond 63 bits."""
    return as_int64(ids)


def ids_below(ids: BlockIds, end: int) -> Ints | None:
    """These ids as int64; None where one of them is not of 0 … end - 1, or is no number at all."""
    try:
        found = as_ids(ids)
    except (OverflowError, TypeError, ValueError):
        return None
    if found.ndim != 1:
        return None
    return found if are_below(found, end) else None


def neighbours(ids: Ints) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of neighbours, in order."""
    ordered: Ints = np.sort(ids)
    cuts = np.flatnonzero(np.diff(ordered) != 1) + 1
    for run in np.split(ordered, cuts):
        if len(run):
            yield int(run[0]), len(run)


def joined(runs: Runs) -> Runs:
    """These runs, each that begins where the one before it ended, at both ends, joined to that."""
    lengths = runs.lengths
    if len(lengths) == 0:
        return runs
    is_start = np.zeros(len(lengths), np.bool_)
    is_start[0] = True
    for offsets in (runs.source_offsets, runs.destination_offsets):
        is_start[1:] |= offsets[1:] != offsets[:-1] + lengths[:-1]
    for tensors in (runs.source_tensors, runs.destination_tensors):
        if tensors is not None:
            is_start[1:] |= tensors[1:] != tensors[:-1]
    if is_start.all():
        return runs
    starts = np.flatnonzero(is_start)
    return Runs(
        source_offsets=runs.source_offsets[starts],
        destination_offsets=runs.destination_offsets[starts],
        lengths=np.add.reduceat(lengths, starts),
        source_tensors=None if runs.source_tensors is None else runs.source_tensors[starts],
        destination_tensors=(
            None if runs.destination_tensors is None else runs.destination_tensors[starts]
        ),
    )
