"""The KV of a loaded model: a device tensor per rank, layer, and keys or values.

Dimensions: B slots with their padding, H heads of one rank, T heads of all ranks (replicas count),
S positions, D head dim, L layers, C = 2 (keys, values).

    keys     (B, H, S, D), or (B, H, D, S) when transposed
    values   (B, H, S, D)
    tiled    S is two dimensions, (128, S / 128): the same bytes
"""

import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuron_di_bindings.nrt import NrtRuntime, NrtTensor, read_tensors, write_tensors
from stand_in.device_tensor import DeviceTensor, host_bytes

_KEY = "kv_mgr.past_key_values"
_TILE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The geometry of one rank's tensors."""

    num_layers: int
    num_slots: int  # B
    num_heads: int  # H
    num_positions: int  # S, with its padding
    head_dim: int
    dtype: torch.dtype
    is_transposed: bool
    is_tiled: bool

    def of(self, c: int) -> tuple[int, ...]:
        """The shape that a tensor of keys (0) or values (1) shows."""
        size = self.num_positions
        positions = (_TILE, size // _TILE) if self.is_tiled else (size,)
        inner = (*positions, self.head_dim)
        if c == 0 and self.is_transposed:
            inner = (self.head_dim, *positions)
        return (self.num_slots, self.num_heads, *inner)

    @property
    def head_bytes(self) -> int:
        """Of one head of one slot."""
        return self.num_positions * self.head_dim * self.dtype.itemsize

    @property
    def tensor_bytes(self) -> int:
        return self.num_slots * self.num_heads * self.head_bytes


class KvState:
    """Owns the device tensors. `ranks` is what the model shows as its state."""

    def __init__(self, runtime: NrtRuntime, shape: StateShape, num_ranks: int) -> None:
        self.shape = shape
        self._tensors: list[list[tuple[NrtTensor, NrtTensor]]] = []  # [rank][layer][c]
        self.ranks: list[dict[str, DeviceTensor]] = []
        is_combined = os.environ.get("NEURON_COMBINE_KV_ALLOCATIONS") == "1"
        for rank in range(num_ranks):
            self._tensors.append([])
            shown: dict[str, DeviceTensor] = {}
            for layer in range(shape.num_layers):
                if is_combined:
                    pair = self._allocate_combined(runtime, rank, layer, shown)
                else:
                    pair = (
                        self._allocate(runtime, rank, 2 * layer),
                        self._allocate(runtime, rank, 2 * layer + 1),
                    )
                self._tensors[-1].append(pair)
                for c, tensor in enumerate(pair):
                    shown[f"{_KEY}.{2 * layer + c}"] = DeviceTensor(
                        tensor, shape.of(c), shape.dtype
                    )
            # The order of the real one is no promise either.
            self.ranks.append({name: shown[name] for name in sorted(shown, reverse=True)})

    def _allocate(self, runtime: NrtRuntime, rank: int, number: int) -> NrtTensor:
        tensor = runtime.allocate(self.shape.tensor_bytes, rank, f"rank{rank}.{_KEY}.{number}")
        tensor.fill(0)
        return _freed_with(tensor)

    def _allocate_combined(
        self, runtime: NrtRuntime, rank: int, layer: int, shown: dict[str, DeviceTensor]
    ) -> tuple[NrtTensor, NrtTensor]:
        size, name = self.shape.tensor_bytes, f"{_KEY}.combined.{layer}"
        both = runtime.allocate(2 * size, rank, f"rank{rank}.{name}")
        both.fill(0)
        _freed_with(both)
        shown[name] = DeviceTensor(both, (2, *self.shape.of(1)), self.shape.dtype)
        keys = both.slice(0, size, f"rank{rank}.{_KEY}.{2 * layer}")
        values = both.slice(size, size, f"rank{rank}.{_KEY}.{2 * layer + 1}")
        return _freed_with(keys), _freed_with(values)

    def read_prefix(self, slot: int, num_positions: int, into_LCTSD: Tensor) -> None:
        """Read the slot's first positions from every rank into dense host memory.

        What lies behind them there may change, too.
        """
        shape = self.shape
        num_bytes = num_positions * shape.head_dim * shape.dtype.itemsize
        slot_THDS = torch.empty(0)
        if shape.is_transposed:
            slot_THDS = torch.empty(
                (len(self._tensors), shape.num_layers, *shape.of(0)[1:3], shape.num_positions),
                dtype=shape.dtype,
            )
        parts = []
        for rank, layer, heads, (keys, values) in self._places():
            keys_HSD, values_HSD = into_LCTSD[layer, 0, heads], into_LCTSD[layer, 1, heads]
            if shape.is_transposed:
                at = slot * shape.num_heads * shape.head_bytes
                parts.append((keys, [(at, host_bytes(slot_THDS[rank, layer]))]))
            else:
                parts.append((keys, self._prefixes(slot, num_bytes, keys_HSD)))
            parts.append((values, self._prefixes(slot, num_bytes, values_HSD)))
        read_tensors(parts)
        if shape.is_transposed:
            keys_TLHSD = slot_THDS[..., :num_positions].transpose(-1, -2)
            for rank, layer, heads, _ in self._places():
                into_LCTSD[layer, 0, heads, :num_positions] = keys_TLHSD[rank, layer]

    def write(self, slot: int, start: int, kv_LCTND: Tensor) -> None:
        """Write positions [start, start + N) of a slot, on every rank, and no other byte.

        Another slot, or this one elsewhere, may be receiving at this moment.
        """
        if kv_LCTND.shape[3] == 0:
            return
        shape = self.shape
        row_bytes = shape.num_positions * shape.dtype.itemsize
        parts = []
        for _, layer, heads, (keys, values) in self._places():
            keys_HND, values_HND = kv_LCTND[layer, 0, heads], kv_LCTND[layer, 1, heads]
            if shape.is_transposed:  # dims are the rows, each a run of positions
                runs = self._segments(slot, start, keys_HND.transpose(1, 2), row_bytes)
            else:
                runs = self._segments(slot, start, keys_HND[:, None], None)
            parts.append((keys, runs))
            parts.append((values, self._segments(slot, start, values_HND[:, None], None)))
        write_tensors(parts)

    def _places(self) -> Iterator[tuple[int, int, slice, tuple[NrtTensor, NrtTensor]]]:
        """Rank, layer, which of all heads it has, its keys and values."""
        for rank, layers in enumerate(self._tensors):
            heads = slice(rank * self.shape.num_heads, (rank + 1) * self.shape.num_heads)
            for layer, pair in enumerate(layers):
                yield rank, layer, heads, pair

    def _prefixes(
        self, slot: int, num_bytes: int, into_HSD: Tensor
    ) -> list[tuple[int, memoryview]]:
        first = slot * self.shape.num_heads
        return [
            ((first + head) * self.shape.head_bytes, host_bytes(into_SD)[:num_bytes])
            for head, into_SD in enumerate(into_HSD)
        ]

    def _segments(
        self, slot: int, start: int, rows: Tensor, row_bytes: int | None
    ) -> list[tuple[int, memoryview]]:
        """`rows` [H, R, …]: R runs of each head, `row_bytes` apart; None: one run, from `start`."""
        shape = self.shape
        item = shape.dtype.itemsize
        begin = start * item * (1 if row_bytes is not None else shape.head_dim)
        dense = rows.contiguous()
        data = host_bytes(dense)
        num_heads, num_rows = dense.shape[:2]
        size = len(data) // (num_heads * num_rows)
        first = slot * shape.num_heads
        return [
            (
                (first + head) * shape.head_bytes + row * (row_bytes or 0) + begin,
                data[(number := head * num_rows + row) * size : (number + 1) * size],
            )
            for head in range(num_heads)
            for row in range(num_rows)
        ]


GARBAGE = 992.0  # exact in bfloat16 and float16


def garbage(num_positions: int, like: StateShape, num_heads: int) -> Tensor:
    """KV [L, C, T, N, D] that shows when it is read: large, and finite as a device's would be."""
    shape = (like.num_layers, 2, num_heads, num_positions, like.head_dim)
    return torch.full(shape, GARBAGE, dtype=like.dtype)


def _freed_with(tensor: NrtTensor) -> NrtTensor:
    """Give its memory back when nobody has it any more: neither the model nor a view."""
    weakref.finalize(tensor, tensor.handle.close).atexit = False
    return tensor
