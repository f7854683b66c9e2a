"""Which rank holds which KV heads: the kv_map of AWS's document, a JSON file of version "0.1".

    {"version": "0.1", "heads": {"0": [0, 1], "1": [2, -1]}, "seq_ids": {"0": [0, 1], "1": [2, 3]}}

`heads` names the model's KV heads in the order in which a rank holds them, -1 where it holds none
(padding). A head may stand on several ranks, or twice on one: replicas. `seq_ids`, the slots that
a rank holds under data parallelism, may be absent; a KvGeometry cannot have them. Each list is as
long as every other of its kind.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import msgspec

from neuron_di.errors import ConfigError

PADDING = -1
KV_MAP_BYTES_MAX = 1 << 20
RANKS_MAX = 256
_HEADS_MAX = 4096
_SLOTS_MAX = 1 << 16

_Head = Annotated[int, msgspec.Meta(ge=PADDING, lt=_HEADS_MAX)]
_Heads = Annotated[list[_Head], msgspec.Meta(min_length=1, max_length=_HEADS_MAX)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=_SLOTS_MAX)]
_Slots = Annotated[list[_Slot], msgspec.Meta(min_length=1, max_length=_SLOTS_MAX)]
_Rank = Annotated[str, msgspec.Meta(max_length=4)]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: Literal["0.1"]
    heads: Annotated[dict[_Rank, _Heads], msgspec.Meta(min_length=1, max_length=RANKS_MAX)]
    seq_ids: Annotated[dict[_Rank, _Slots], msgspec.Meta(max_length=RANKS_MAX)] | None = None


@dataclass(frozen=True, slots=True)
class KvMap:
    """heads[rank][i] is the model's KV head that the rank holds as its i-th; -1: none."""

    heads: tuple[tuple[int, ...], ...]
    seq_ids: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len({len(row) for row in self.heads}) != 1:
            raise ConfigError("a kv_map in which ranks hold different numbers of KV heads")
        named = {head for row in self.heads for head in row} - {PADDING}
        if not named or named != set(range(len(named))):
            raise ConfigError("a kv_map that does not name the KV heads 0, 1, 2, … without a gap")
        if self.seq_ids is None:
            return
        if len(self.seq_ids) != len(self.heads) or len({len(row) for row in self.seq_ids}) != 1:
            raise ConfigError("a kv_map whose seq_ids do not fit its ranks")

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the model."""
        return max(head for row in self.heads for head in row) + 1

    @classmethod
    def of_tensor_parallel(cls, num_ranks: int, num_kv_heads: int, num_heads: int) -> Self:
        """The map by which NxDI shards a model of `num_heads` attention heads.

        KV heads are divided among the ranks where that is possible without a remainder. Else each
        is held by as many ranks as there are for one head, neighbours; and where that is not
        possible either, each attention head has its own replica, padded to a multiple of ranks.
        """
        if num_ranks < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} heads with {num_kv_heads} KV heads on {num_ranks} ranks"
            )
        if num_kv_heads % num_ranks == 0:
            replicas = 1
        elif num_ranks % num_kv_heads == 0:
            replicas = num_ranks // num_kv_heads
        else:
            replicas = num_heads // num_kv_heads
        slots = [head for head in range(num_kv_heads) for _ in range(replicas)]
        slots += [PADDING] * (-len(slots) % num_ranks)
        size = len(slots) // num_ranks
        return cls(tuple(tuple(slots[i : i + size]) for i in range(0, len(slots), size)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """From the JSON text. ConfigError for anything that is not a whole, consistent map."""
        if len(data) > KV_MAP_BYTES_MAX:
            raise ConfigError(f"a kv_map of {len(data)} bytes: {KV_MAP_BYTES_MAX} are the most")
        try:
            document = msgspec.json.decode(data, type=_Document)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"not a kv_map of version 0.1: {error}") from None
        seq_ids = document.seq_ids
        return cls(_by_rank(document.heads), None if seq_ids is None else _by_rank(seq_ids))

    def encode(self) -> bytes:
        """The JSON text."""
        return msgspec.json.encode(
            {
                "version": "0.1",
                "heads": {str(rank): row for rank, row in enumerate(self.heads)},
                **(
                    {"seq_ids": {str(rank): row for rank, row in enumerate(self.seq_ids)}}
                    if self.seq_ids is not None
                    else {}
                ),
            }
        )


def _by_rank(rows: dict[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    """JSON knows no numbers as keys: "0", "1", … in any order, none missing, none twice."""
    names = [str(rank) for rank in range(len(rows))]
    if set(names) != set(rows):
        raise ConfigError("a kv_map whose ranks are not 0, 1, 2, … without a gap")
    return tuple(tuple(rows[name]) for name in names)
