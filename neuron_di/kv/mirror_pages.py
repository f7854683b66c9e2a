"""Gives back pages of a mirror, which has a device's blocks only while they are on their way."""

import contextlib
from collections.abc import Collection
from mmap import MADV_REMOVE, PAGESIZE, mmap

_PIECE_BYTES = 16 << 20  # in one call, which holds the interpreter lock


def drop_blocks(
    view: mmap, block_ids: Collection[int], *, data_offset: int, block_bytes: int
) -> None:
    """The pages that hold nothing else than these blocks, of which block 0 is at `data_offset`.

    They read as zeros then. Pages that blocks share with others stay.
    """
    start = end = -1  # of the neighbours that were found so far
    for block_id in [*sorted(block_ids), -1]:
        if block_id == end:
            end += 1
            continue
        if start >= 0:
            first, last = (data_offset + number * block_bytes for number in (start, end))
            _remove(view, first, last)
        start, end = block_id, block_id + 1


def _remove(view: mmap, start: int, end: int) -> None:
    start, end = -(-start // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    with contextlib.suppress(OSError):  # then they stay
        for first in range(start, end, _PIECE_BYTES):
            view.madvise(MADV_REMOVE, first, min(_PIECE_BYTES, end - first))
