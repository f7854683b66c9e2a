"""What lies in the blocks of a pool: filled with bytes that repeat nowhere, cleared, digested."""

import ctypes
import secrets
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from neuron_di.kv import Memory

_PIECE_BYTES = 8 << 20
_ODD = 0x9E3779B97F4A7C15


def fill(memory: Memory, block_ids: Sequence[int], block_bytes: int) -> None:
    """Random bytes, no two places alike: a block that came from elsewhere shows."""
    pattern = np.frombuffer(secrets.token_bytes(_PIECE_BYTES), np.uint64)
    number = 0
    for start, num_bytes in _runs(block_ids, block_bytes):
        for offset in range(0, num_bytes, _PIECE_BYTES):
            count = min(_PIECE_BYTES, num_bytes - offset)
            number += 1
            piece = _words(memory.address + start + offset, count // 8)
            key = np.uint64(number * _ODD % (1 << 64))
            np.bitwise_xor(pattern[: count // 8], key, out=piece)


def clear(memory: Memory, block_ids: Sequence[int], block_bytes: int) -> None:
    """Zeros: what is right afterwards was moved there."""
    for address in _addresses(memory, block_ids, block_bytes):
        ctypes.memset(address, 0, block_bytes)


def digest(memory: Memory, block_ids: Sequence[int], block_bytes: int) -> bytes:
    """Of all these blocks' bytes, in this order."""
    state = xxh3_128()
    for address in _addresses(memory, block_ids, block_bytes):
        state.update((ctypes.c_char * block_bytes).from_address(address))
    return state.digest()


def _addresses(memory: Memory, block_ids: Sequence[int], block_bytes: int) -> Iterator[int]:
    num_blocks = memory.num_bytes // block_bytes
    for block_id in block_ids:
        assert 0 <= block_id < num_blocks, "a block outside of the pool"
        yield memory.address + block_id * block_bytes


def _runs(block_ids: Sequence[int], block_bytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each run of neighbours."""
    ids = np.sort(np.asarray(block_ids, np.int64))
    for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
        yield int(run[0]) * block_bytes, len(run) * block_bytes


def _words(address: int, count: int) -> NDArray[np.uint64]:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))
