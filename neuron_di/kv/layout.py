"""The geometry of a KV pool, and the digest by which two workers know that theirs agree.

Dimensions, everywhere in this project: N blocks, L layers, C = 2 (keys, values), K KV heads,
S token positions of a block, D head dim. A pool is one array `kv_NLCKSD`: a block's bytes
for all layers lie together, so moving a block is one copy, and so is a run of blocks.
"""

import hashlib
from dataclasses import asdict, dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # token positions
    dtype: str  # a key of DTYPE_BYTES

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[L, C, K, S, D]"""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many token positions."""
        return -(-num_tokens // self.block_size)

    def digest(self) -> str:
        """Equal exactly when two pools can exchange blocks byte for byte."""
        fields = ",".join(f"{name}={value}" for name, value in sorted(asdict(self).items()))
        return hashlib.sha256(f"NLCKSD;{fields}".encode()).hexdigest()[:32]
