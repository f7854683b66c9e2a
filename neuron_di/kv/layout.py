"""The geometry of a KV pool, and the digests by which two workers know whether theirs agree.

Dimensions, everywhere in this project: N blocks, R tensor-parallel ranks, L layers, C = 2 (keys,
values), K KV heads of one rank, S token positions of a block, D head dim. A pool is one array
`kv_NRLCKSD` (`kv_NLCKSD` where R is 1): a block's bytes for all ranks and layers lie together, so
moving a block is one copy, and so is a run of blocks.
"""

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Self

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """What lies where in a block. `num_kv_heads` are the model's, whatever the number of ranks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # token positions
    dtype: str  # a key of DTYPE_BYTES
    num_ranks: int = 1  # divides num_kv_heads, or is a multiple of it: then heads are replicated

    @property
    def num_rank_heads(self) -> int:
        """KV heads that one rank holds."""
        return max(1, self.num_kv_heads // self.num_ranks)

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same heads. They are neighbours."""
        return max(1, self.num_ranks // self.num_kv_heads)

    def without_replicas(self) -> Self:
        """The same with each head once: how KV lies in landing memory."""
        return replace(self, num_ranks=self.num_ranks // self.num_replicas)

    def heads_of(self, rank: int) -> range:
        """The model's KV heads that this rank holds, in their order there."""
        first = rank // self.num_replicas * self.num_rank_heads
        return range(first, first + self.num_rank_heads)

    @property
    def rank_shape(self) -> tuple[int, int, int, int, int]:
        """[L, C, K, S, D] of one rank's part of a block."""
        return (self.num_layers, 2, self.num_rank_heads, self.block_size, self.head_dim)

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's part of a block."""
        elements = self.num_layers * 2 * self.num_rank_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all ranks, all layers."""
        return self.num_ranks * self.rank_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many token positions."""
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Equal exactly when two pools can exchange blocks byte for byte."""
        fields = asdict(self)
        if self.num_ranks == 1:
            del fields["num_ranks"]
        return _digest("NRLCKSD", fields)

    def exchange_digest(self, *, converts: bool) -> str:
        """Equal when one pool's KV can be brought into the other's form.

        Ranks and block sizes may differ. So may number formats, where both ends say that they
        convert: rounding then differs from that of one worker.
        """
        fields: dict[str, object] = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": "any" if converts else self.dtype,
        }
        return _digest("exchange", fields)


def _digest(kind: str, fields: dict[str, object]) -> str:
    text = ",".join(f"{name}={value}" for name, value in sorted(fields.items()))
    return hashlib.sha256(f"{kind};{text}".encode()).hexdigest()[:32]
