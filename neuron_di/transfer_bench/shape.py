"""How much a transfer moves, and in which pieces: `64KiB`, `1GiB`, `4096x16KiB`."""

import re
from dataclasses import dataclass

from neuron_di.errors import ConfigError
from neuron_di.kv import KvLayout

BLOCK_BYTES_MULTIPLE = 256
_HEAD_DIM = 64  # of bfloat16 numbers: a token's keys and values are 256 bytes
_TOKENS_MAX = 1 << 20  # of a block, as the wire allows
_LAYERS_MAX = 1 << 12
_BLOCKS_MAX = 1 << 18
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9}
_FORM = re.compile(r"(?:(?P<count>[0-9]{1,9})x)?(?P<size>[0-9]{1,9})(?P<unit>[kmg]?i?b)")


@dataclass(frozen=True, slots=True)
class Shape:
    """So many blocks of so many bytes each, anywhere in a pool. One block: contiguous."""

    num_blocks: int
    block_bytes: int

    @classmethod
    def of(cls, text: str) -> "Shape":
        """ConfigError where it is none, or none that a KV pool can have."""
        found = _FORM.fullmatch(text.strip().lower())
        unit = _UNITS.get(found["unit"]) if found else None
        if found is None or unit is None:
            raise ConfigError(f"a shape is like 64KiB, 1GiB or 4096x16KiB, not {text[:40]!r}")
        shape = cls(int(found["count"] or 1), int(found["size"]) * unit)
        if not 1 <= shape.num_blocks <= _BLOCKS_MAX:
            raise ConfigError(f"shape {text}: 1 to {_BLOCKS_MAX:,} blocks")
        shape.layout()
        return shape

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def layout(self) -> KvLayout:
        """A geometry whose blocks are of this size. ConfigError where there is none."""
        num_tokens, rest = divmod(self.block_bytes, BLOCK_BYTES_MULTIPLE)
        num_layers = 1
        while num_tokens % 2 == 0 and num_tokens > _TOKENS_MAX and num_layers < _LAYERS_MAX:
            num_tokens, num_layers = num_tokens // 2, num_layers * 2
        if rest or not 1 <= num_tokens <= _TOKENS_MAX:
            raise ConfigError(
                f"blocks of {self.block_bytes:,} bytes cannot be: they have multiples of "
                f"{BLOCK_BYTES_MULTIPLE} bytes, and above 256 MiB of more"
            )
        return KvLayout(
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim=_HEAD_DIM,
            block_size=num_tokens,
            dtype="bfloat16",
        )

    def pool_blocks(self, pool_bytes_min: int) -> int:
        """Blocks of a pool that is at least so large and has room for the shape."""
        return max(self.num_blocks, min(-(-pool_bytes_min // self.block_bytes), _BLOCKS_MAX))

    def pool_bytes(self, pool_bytes_min: int) -> int:
        """Bytes of that pool."""
        return self.pool_blocks(pool_bytes_min) * self.block_bytes

    def __str__(self) -> str:
        size = _size(self.block_bytes)
        return size if self.num_blocks == 1 else f"{self.num_blocks}x{size}"


def _size(num_bytes: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        size = _UNITS[unit.lower()]
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes}B"
