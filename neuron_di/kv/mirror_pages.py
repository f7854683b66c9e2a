"""Gives back pages of a mirror, which has a device's blocks only while they are on their way."""

import contextlib
from collections.abc import Sequence
from mmap import MADV_REMOVE, PAGESIZE, mmap

from neuron_di.kv.runs import as_ids, neighbours

_PIECE_BYTES = 16 << 20  # in one call, which holds the interpreter lock


def drop_blocks(
    view: mmap, block_ids: Sequence[int], *, data_offset: int, block_bytes: int
) -> None:
    """The pages that hold nothing else than these blocks, of which block 0 is at `data_offset`.

    They read as zeros then. Pages that blocks share with others stay.
    """
    for first, count in neighbours(as_ids(block_ids)):
        start = data_offset + first * block_bytes
        _remove(view, start, start + count * block_bytes)


def _remove(view: mmap, start: int, end: int) -> None:
    start, end = -(-start // PAGESIZE) * PAGESIZE, end // PAGESIZE * PAGESIZE
    with contextlib.suppress(OSError):  # then they stay
        for first in range(start, end, _PIECE_BYTES):
            view.madvise(MADV_REMOVE, first, min(_PIECE_BYTES, end - first))
