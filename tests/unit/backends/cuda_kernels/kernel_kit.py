"""A KV pool in which only what a kernel may read is a number, and how close results must be."""

from dataclasses import dataclass

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A result is rounded once; weights of values and what lies between two steps are rounded, too.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NOWHERE = 1 << 28  # a block id that no pool has: reading there is a fault


def assert_close(got: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCES[wanted.dtype]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def assert_same_bits(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.contiguous().view(torch.uint8).equal(wanted.contiguous().view(torch.uint8))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass
class PagedKv:
    """Requests of these lengths in shuffled blocks of a pool whose other slots are all NaN."""

    lengths: list[int]
    dtype: torch.dtype = torch.float32
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_layers: int = 2
    layer: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        num_needed = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(num_needed) + 3
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        self.pool = torch.full(shape, torch.nan, dtype=self.dtype, device=DEVICE)
        generator = torch.Generator().manual_seed(self.seed)
        free = torch.randperm(num_blocks, generator=generator).tolist()
        rows = [[free.pop() for _ in range(num)] for num in num_needed]
        width = max(num_needed) + 2
        self.table = torch.full((len(rows), width), NOWHERE, dtype=torch.int32, device=DEVICE)
        for number, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            self.table[number, : len(row)] = int32(row)
            kv_shape = (length, 2, self.num_kv_heads, self.head_dim)
            kv = randn(*kv_shape, dtype=self.dtype, seed=self.seed + 1 + number)
            for position in range(length):
                slot = self.pool[row[position // self.block_size], self.layer]
                slot[:, :, position % self.block_size] = kv[position]
        self.length = int32(self.lengths)
