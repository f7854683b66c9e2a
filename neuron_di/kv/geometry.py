"""Where each number of a worker's KV lies: in one pool, or in many tensors of many ranks.

A KvLayout is the one form of the host's pools. Devices have others: a tensor per rank, layer and
K or V; blocks that hold a whole request (a slot); keys transposed, dims before tokens. All of
them are this: strides within a block, and where the first block of a rank's layer begins.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from neuron_di.errors import ConfigError
from neuron_di.kv.kv_map import PADDING, KvMap
from neuron_di.kv.layout import DTYPE_BYTES, KvLayout
from neuron_di.kv.runs import Ints

# What a block of one rank's keys or values is an array of: heads, tokens, dims, outermost first.
Order = Literal["HSD", "SHD", "HDS"]


@dataclass(frozen=True, slots=True)
class Strides:
    """Bytes from one block, head, token or dim to the next."""

    block: int
    head: int
    token: int
    dim: int

    @classmethod
    def of(cls, order: Order, num_heads: int, block_size: int, head_dim: int, item: int) -> Self:
        """Of a dense array of blocks; `item` is the bytes of one number."""
        sizes = {"H": num_heads, "S": block_size, "D": head_dim}
        strides = {}
        for name in reversed(order):
            strides[name] = item
            item *= sizes[name]
        return cls(item, strides["H"], strides["S"], strides["D"])

    @property
    def order(self) -> Order:
        """Which dense array has these strides."""
        if self.dim > self.token:
            return "HDS"
        return "SHD" if self.token > self.head else "HSD"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvGeometry:
    """The number of head heads[rank][i], layer l, K or V c, block b, token s, dim d lies in tensor
    tensors[rank, l, c] at the byte offsets[rank, l, c] + b, i, s and d times strides[c]."""

    num_layers: int
    num_kv_heads: int  # the model's
    head_dim: int
    block_size: int  # token positions; of contiguous slots the longest request's
    num_blocks: int
    dtype: str  # a key of DTYPE_BYTES
    heads: tuple[tuple[int, ...], ...]  # of each rank; -1: room for a head that there is not
    strides: tuple[Strides, Strides]  # of keys, of values
    tensors: Ints  # [ranks, layers, 2]
    offsets: Ints  # [ranks, layers, 2]

    @classmethod
    def of_layout(cls, layout: KvLayout, num_blocks: int) -> Self:
        """A pool: one tensor, number 0."""
        item = DTYPE_BYTES[layout.dtype]
        inner = Strides.of("HSD", layout.num_rank_heads, layout.block_size, layout.head_dim, item)
        strides = Strides(layout.block_bytes, inner.head, inner.token, inner.dim)
        shape = (layout.num_ranks, layout.num_layers, 2)
        return cls(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            num_blocks=num_blocks,
            dtype=layout.dtype,
            heads=tuple(tuple(layout.heads_of(rank)) for rank in range(layout.num_ranks)),
            strides=(strides, strides),
            tensors=np.zeros(shape, np.int64),
            offsets=np.arange(np.prod(shape), dtype=np.int64).reshape(shape) * inner.block,
        )

    @classmethod
    def of_rank_tensors(
        cls,
        kv_map: KvMap,
        *,
        num_layers: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        dtype: str,
        keys: Order = "HSD",
        values: Order = "HSD",
    ) -> Self:
        """A tensor per rank, layer and K or V, numbered in the order in which NxDI lists them:
        [dev0_l0_k, dev1_l0_k, …, dev0_l0_v, dev1_l0_v, …, dev0_l1_k, …] (N-48).

        Contiguous slots are blocks of the longest request's size, slot ids their ids. ConfigError
        for a map with seq_ids: which rank holds a head would then be another for each slot.
        """
        if kv_map.seq_ids is not None:
            raise ConfigError("a kv_map with seq_ids: data parallelism is not supported")
        num_ranks, num_heads = len(kv_map.heads), len(kv_map.heads[0])
        numbers = np.arange(num_layers * 2 * num_ranks, dtype=np.int64)
        tensors = numbers.reshape(num_layers, 2, num_ranks).transpose(2, 0, 1)
        item = DTYPE_BYTES[dtype]
        return cls(
            num_layers=num_layers,
            num_kv_heads=kv_map.num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=dtype,
            heads=kv_map.heads,
            strides=(
                Strides.of(keys, num_heads, block_size, head_dim, item),
                Strides.of(values, num_heads, block_size, head_dim, item),
            ),
            tensors=tensors,
            offsets=np.zeros_like(tensors),
        )

    @property
    def token_bytes(self) -> int:
        """KV of one token: all layers, each of the model's heads once."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many token positions."""
        return -(-num_tokens // self.block_size)

    def holders(self) -> list[list[tuple[int, int]]]:
        """For each of the model's heads who holds it: (rank, place among the rank's heads), …

        ConfigError when nobody does.
        """
        holders: list[list[tuple[int, int]]] = [[] for _ in range(self.num_kv_heads)]
        for rank, heads in enumerate(self.heads):
            for place, head in enumerate(heads):
                if head != PADDING:
                    holders[head].append((rank, place))
        if not all(holders):
            raise ConfigError("a KV head that no rank holds")
        return holders

    def rank_of_tensor(self) -> dict[int, int]:
        """Which rank's device a tensor lies on. The first, where several ranks share one."""
        ranks: dict[int, int] = {}
        for rank in range(len(self.heads)):
            for number in np.unique(self.tensors[rank]).tolist():
                ranks.setdefault(number, rank)
        return ranks

    def tensor_bytes(self) -> dict[int, int]:
        """The size of each tensor: to its last block's end."""
        sizes: dict[int, int] = {}
        item = DTYPE_BYTES[self.dtype]
        for rank, heads in enumerate(self.heads):
            for c, strides in enumerate(self.strides):
                last = (
                    (self.num_blocks - 1) * strides.block
                    + (len(heads) - 1) * strides.head
                    + (self.block_size - 1) * strides.token
                    + (self.head_dim - 1) * strides.dim
                    + item
                )
                rows = zip(self.tensors[rank, :, c], self.offsets[rank, :, c], strict=True)
                for number, offset in rows:
                    sizes[int(number)] = max(sizes.get(int(number), 0), int(offset) + last)
        return sizes

    def landing(self, num_tokens: int) -> "KvGeometry":
        """Memory for this geometry's KV of one request: one tensor, each head once.

        Numbers lie in their blocks as they do here, so that blocks arrive whole; block i is the
        request's i-th. A slot is as long as the request.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        block_size = min(self.block_size, num_tokens)
        covered: set[int] = {PADDING}
        heads = []
        for row in self.heads:
            own = tuple(head for head in dict.fromkeys(row) if head not in covered)
            covered.update(own)
            heads += [own] if own else []
        most = max(map(len, heads))
        item = DTYPE_BYTES[self.dtype]
        keys, values = (
            Strides.of(strides.order, most, block_size, self.head_dim, item)
            for strides in self.strides
        )
        shape = (len(heads), self.num_layers, 2)
        numbers = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
        return KvGeometry(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            dtype=self.dtype,
            heads=tuple(heads),
            strides=(keys, values),
            tensors=np.zeros(shape, np.int64),
            offsets=numbers * (num_blocks * keys.block),
        )
