"""KV in host memory, number by number: what the planners' tests compare with."""

import numpy as np
import torch

from neuron_di.kv import DTYPE_BYTES, KvGeometry, KvLayout, KvMap, Memory, Runs
from neuron_di_bindings.run_copy import copy_runs

NUM_BLOCKS = 24
SLOT = {"block_size": 16, "num_blocks": 3}  # blocks as contiguous slots
BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
SIGNED = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}


def memory_of(array: np.ndarray) -> Memory:
    return Memory(array.ctypes.data, array.nbytes)


def noise(num_bytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Random numbers, as their bits; none that is not a number, so that bits can be compared."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 100
    return converted(values.view(np.uint32), "float32", dtype)


def converted(bits: np.ndarray, source: str, destination: str) -> np.ndarray:
    """By torch."""
    signed = torch.from_numpy(np.ascontiguousarray(bits).view(f"i{DTYPE_BYTES[source]}"))
    values = signed.view(getattr(torch, source)).to(getattr(torch, destination))
    return values.view(SIGNED[destination]).numpy().view(BITS[destination])


def pool_numbers(layout: KvLayout, pool: np.ndarray) -> np.ndarray:
    """[N, R, L, C, K, S, D], the pool's own memory."""
    return pool.view(BITS[layout.dtype]).reshape(-1, layout.num_ranks, *layout.rank_shape)


def move(runs: Runs, source: list[np.ndarray], destination: list[np.ndarray]) -> None:
    """What a transfer engine does, tensor by tensor. Fails for a byte outside of its tensor."""
    pairs = zip(runs.source_tensors, runs.destination_tensors, strict=True)
    for i, (start, end) in enumerate(pairs):
        length = int(runs.lengths[i])
        first, last = int(runs.source_offsets[i]), int(runs.destination_offsets[i])
        taken = source[start][first : first + length]
        assert first >= 0
        assert last >= 0
        assert len(taken) == length > 0
        target = destination[end][last : last + length]
        assert len(target) == length
        target[:] = taken


def move_flat(runs: Runs, source: np.ndarray, destination: np.ndarray) -> None:
    assert runs.source_tensors is runs.destination_tensors is None
    assert (runs.source_offsets >= 0).all()
    assert (runs.destination_offsets >= 0).all()
    assert (runs.source_offsets + runs.lengths <= len(source)).all()
    assert (runs.destination_offsets + runs.lengths <= len(destination)).all()
    copy_runs(
        destination_address=destination.ctypes.data,
        source_address=source.ctypes.data,
        destination_offsets=runs.destination_offsets,
        source_offsets=runs.source_offsets,
        lengths=runs.lengths,
    )


def tensors_of(geometry: KvGeometry, seed: int) -> list[np.ndarray]:
    sizes = geometry.tensor_bytes()
    assert sorted(sizes) == list(range(len(sizes)))
    return [noise(sizes[number], seed + number) for number in range(len(sizes))]


def view(geometry: KvGeometry, tensors: list[np.ndarray], rank: int, layer: int, c: int):
    """[blocks, heads, tokens, dims] of one rank's keys or values, the tensor's own memory."""
    strides = geometry.strides[c]
    return np.ndarray(
        (geometry.num_blocks, len(geometry.heads[rank]), geometry.block_size, geometry.head_dim),
        BITS[geometry.dtype],
        tensors[geometry.tensors[rank, layer, c]],
        int(geometry.offsets[rank, layer, c]),
        (strides.block, strides.head, strides.token, strides.dim),
    )


def write_request(
    geometry: KvGeometry, tensors: list[np.ndarray], block_ids: list[int], kv: np.ndarray
) -> None:
    """Where attention reads it. `kv` is [L, C, heads, tokens, D] of the geometry's numbers."""
    for rank, heads in enumerate(geometry.heads):
        for layer in range(geometry.num_layers):
            for c in (0, 1):
                part = view(geometry, tensors, rank, layer, c)
                for token in range(kv.shape[3]):
                    block, position = divmod(token, geometry.block_size)
                    for place, head in enumerate(heads):
                        if head != -1:
                            part[block_ids[block], place, position] = kv[layer, c, head, token]


def rank_tensors(num_ranks: int, num_kv_heads: int = 2, **changed) -> KvGeometry:
    """A tensor per rank, layer and K or V, as NxDI has them."""
    fields = {
        "num_layers": 2,
        "head_dim": 4,
        "block_size": 4,
        "num_blocks": NUM_BLOCKS,
        "dtype": "bfloat16",
        **changed,
    }
    kv_map = KvMap.of_tensor_parallel(num_ranks, num_kv_heads, 4 * num_kv_heads)
    return KvGeometry.of_rank_tensors(kv_map, **fields)
