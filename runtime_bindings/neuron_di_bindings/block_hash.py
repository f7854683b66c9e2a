"""XXH3, 64 bits, of many blocks in one call, during which, if it is long, other threads go on.

xxhash's Python functions keep the interpreter: a step that is computed meanwhile would wait for a
whole transfer's digests. Compiled where it could be built (_kv_copy.c), which calls xxhash's C
function for each block; else Python.
"""

import ctypes
import sys

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

try:
    from neuron_di_bindings import _kv_copy
except ImportError:
    _kv_copy = None  # type: ignore[assignment]

_IS_COMPILED: bool = _kv_copy is not None

# So many take a tenth of a millisecond. To get the interpreter back may take longer than that.
_SHORT_BYTES_MAX = 1 << 20
_SEED_MASK = (1 << 64) - 1
_PROBE = bytes(range(256)) * 2


def _found_hash() -> int | None:
    """The address of XXH3_64bits_withSeed, of the library that Python's xxhash is made of."""
    try:
        path = sys.modules[xxh3_64_intdigest.__module__].__file__
        found = ctypes.CDLL(path or "").XXH3_64bits_withSeed
    except (AttributeError, KeyError, OSError):  # another build, which shows what Python needs
        return None
    found.argtypes = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64
    found.restype = ctypes.c_uint64
    for length in (0, 17, len(_PROBE)):
        if found(_PROBE, length, _SEED_MASK) != xxh3_64_intdigest(_PROBE[:length], _SEED_MASK):
            return None
    return ctypes.cast(found, ctypes.c_void_p).value


def hash_blocks(
    address: int, block_ids: NDArray[np.int64], block_bytes: int, seed: int
) -> list[int]:
    """XXH3 of each block's bytes, in order: with `seed` for the first, one more for each next one.

    Block n lies at address + n * block_bytes. The caller has checked that all of them are there,
    and that they stay. Seeds are of 64 bits: the largest is followed by 0.
    """
    if _IS_COMPILED and _HASH is not None:
        hashes = np.empty(len(block_ids), np.uint64)
        ids = np.ascontiguousarray(block_ids)
        is_long = len(ids) * block_bytes > _SHORT_BYTES_MAX
        _kv_copy.hash_blocks(_HASH, address, block_bytes, seed & _SEED_MASK, ids, hashes, is_long)
        return hashes.tolist()
    found = []
    for place, block_id in enumerate(block_ids.tolist()):
        block = (ctypes.c_uint8 * block_bytes).from_address(address + block_id * block_bytes)
        found.append(xxh3_64_intdigest(memoryview(block), (seed + place) & _SEED_MASK))
    return found


_HASH = _found_hash()
