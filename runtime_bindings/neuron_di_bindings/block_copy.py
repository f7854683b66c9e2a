"""Copying scattered blocks between two mapped regions."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from neuron_di_bindings import cpu_kernels


def copy_blocks(
    *,
    destination_address: int,
    source_address: int,
    destination_ids: NDArray[np.int32],
    source_ids: NDArray[np.int32],
    block_bytes: int,
) -> None:
    """Copy block source_ids[i] to destination_ids[i] for each i. The caller checked the bounds.

    Uses the compiled copy where it was built, which frees the interpreter meanwhile.
    """
    assert len(destination_ids) == len(source_ids)
    if cpu_kernels.is_available():
        cpu_kernels.load().copy_blocks(
            destination_address, source_address, destination_ids, source_ids, block_bytes
        )
        return
    for destination_id, source_id in zip(destination_ids, source_ids, strict=True):
        ctypes.memmove(
            destination_address + int(destination_id) * block_bytes,
            source_address + int(source_id) * block_bytes,
            block_bytes,
        )
