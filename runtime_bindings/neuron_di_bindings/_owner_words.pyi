from typing import Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

class Map(Buffer):
    def __new__(cls, fd: int, num_bytes: int, writable: bool = True) -> Self: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def populate(self, offset: int, length: int, /) -> None: ...

def swap(
    words: NDArray[np.uint64],
    ids: NDArray[np.int64],
    expected: NDArray[np.uint64],
    desired: NDArray[np.uint64],
    swapped: NDArray[np.bool_],
    /,
) -> int: ...
def load(words: NDArray[np.uint64], ids: NDArray[np.int64], out: NDArray[np.uint64], /) -> None: ...
def release(fd: int, offset: int, length: int, /) -> None: ...
