from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

_Ints: TypeAlias = NDArray[np.int64]
# What is no list is refused: TypeError or ValueError.
_Numbers: TypeAlias = Sequence[int] | NDArray[np.integer]

def copy(
    destination: int,
    source: int,
    destination_offsets: _Ints,
    source_offsets: _Ints,
    lengths: _Ints,
    /,
) -> None: ...
def copy_promised(
    destination: int,
    source: int,
    destination_offsets: _Ints,
    source_offsets: _Ints,
    lengths: _Ints,
    words: NDArray[np.uint64],
    ids: _Numbers,
    numbers: _Numbers,
    tag: int,
    number_max: int,
    /,
) -> bool: ...
def place(placing: Buffer, /) -> None: ...
def read(items: Sequence[int], out: _Ints, /) -> None: ...
def join_blocks(
    source_ids: _Ints,
    destination_ids: _Ints,
    source_offsets: _Ints,
    destination_offsets: _Ints,
    lengths: _Ints,
    block_bytes: int,
    /,
) -> int: ...
def are_below(ids: _Numbers, end: int, /) -> bool: ...
def are_sound(
    source_offsets: _Ints,
    destination_offsets: _Ints,
    lengths: _Ints,
    ids: _Numbers,
    source_bytes: int,
    destination_bytes: int,
    ids_end: int,
    /,
) -> bool: ...
def are_words(
    words: NDArray[np.uint64], ids: _Numbers, numbers: _Numbers, tag: int, number_max: int, /
) -> bool: ...
def hash_blocks(
    hash_function: int,
    address: int,
    block_bytes: int,
    seed: int,
    ids: _Ints,
    hashes: NDArray[np.uint64],
    is_long: bool,
    /,
) -> None: ...
