"""What is reckoned for every transfer of blocks: its runs, whether they may be, and whose they are.

Compiled where it could be built (_kv_copy.c), in a fraction of the time; else numpy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

try:
    from neuron_di_bindings import _kv_copy
except ImportError:
    _kv_copy = None  # type: ignore[assignment]

_IS_COMPILED: bool = _kv_copy is not None

Ints = NDArray[np.int64]
Numbers = Sequence[int] | NDArray[np.integer]

_LISTS = (list, tuple)
UNSUITABLE = (TypeError, ValueError, BufferError, OverflowError)  # for what is compiled


class Words(NamedTuple):
    """A table of words, each `tag` | a number of at most `number_max`, which has no bit of it."""

    table: NDArray[np.uint64]
    tag: int = 0
    number_max: int = (1 << 64) - 1


def as_int64(numbers: Numbers) -> Ints:
    """As an array. OverflowError, TypeError or ValueError where one is no number of 64 bits."""
    if _IS_COMPILED and isinstance(numbers, _LISTS):
        found = np.empty(len(numbers), np.int64)
        try:
            _kv_copy.read(numbers, found)
        except TypeError:  # numpy's numbers, or none at all
            pass
        else:
            return found
    return np.asarray(numbers, np.int64)


def are_below(ids: Ints, end: int) -> bool:
    """Whether each id is of 0 … end - 1."""
    if _IS_COMPILED and ids.flags.c_contiguous:
        return _kv_copy.are_below(ids, end)
    # As unsigned numbers the negative ones are the largest.
    return not len(ids) or int(ids.astype(np.uint64).max()) < end


def join_blocks(sources: Ints, destinations: Ints, block_bytes: int) -> tuple[Ints, Ints, Ints]:
    """Source offsets, destination offsets and lengths of the runs of whole blocks.

    Blocks sources[i] and destinations[i] of two pools, one id each at least, as many of either;
    those that are neighbours at both ends are one run.
    """
    if not _IS_COMPILED:
        return _join_blocks(sources, destinations, block_bytes)
    count = len(sources)
    rows = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    ids = np.ascontiguousarray(sources), np.ascontiguousarray(destinations)
    num_runs = _kv_copy.join_blocks(*ids, *rows, block_bytes)
    if num_runs == count:
        return rows
    return rows[0][:num_runs], rows[1][:num_runs], rows[2][:num_runs]


def _join_blocks(sources: Ints, destinations: Ints, block_bytes: int) -> tuple[Ints, Ints, Ints]:
    is_start = np.ones(len(sources), np.bool_)
    np.not_equal(sources[1:] - sources[:-1], 1, out=is_start[1:])
    is_start[1:] |= destinations[1:] - destinations[:-1] != 1
    starts = is_start.nonzero()[0]
    counts = np.diff(starts, append=len(sources))
    return sources[starts] * block_bytes, destinations[starts] * block_bytes, counts * block_bytes


def are_sound(
    source_offsets: Ints,
    destination_offsets: Ints,
    lengths: Ints,
    ids: Numbers,
    source_bytes: int,
    destination_bytes: int,
    ids_end: int,
) -> bool:
    """Whether these are surely runs that a transfer may have, and ids of 0 … ids_end - 1.

    At least one run, each of at least one byte, within memories of these sizes, and none writes to
    another's bytes. Anything may be passed. False: it must be looked at more closely.
    """
    if not _IS_COMPILED:
        return False
    rows = source_offsets, destination_offsets, lengths
    try:
        listed = as_int64(ids) if isinstance(ids, _LISTS) else ids
        return _kv_copy.are_sound(*rows, listed, source_bytes, destination_bytes, ids_end)
    except UNSUITABLE:
        return False


def are_words(words: Words, ids: Numbers, numbers: Numbers) -> bool:
    """Whether word ids[i] of the table is now of numbers[i], for each. Numbers may be anybody's.

    False where the lists differ in length. IndexError: the table has no such word.
    """
    table, tag, number_max = words
    if _IS_COMPILED:
        try:
            return _kv_copy.are_words(table, ids, numbers, tag, number_max)
        except UNSUITABLE:
            pass
    rows = as_int64(ids)
    if len(rows) and int(rows.min()) < 0:
        raise IndexError("no such word")
    found: list[int] = table[rows].tolist()
    return found == [tag | int(n) if 0 <= n <= number_max else -1 for n in numbers]
