"""What both ends of a transfer must reckon alike: which bytes, in which order, under which tag."""

import hashlib
from functools import lru_cache

import numpy as np

from neuron_di.kv import (
    BlockIds,
    KvLayout,
    Resharding,
    Runs,
    as_ids,
    ids_below,
    whole_block_runs,
)
from neuron_di.kv.runs import Ints
from neuron_di.types import RequestId

BLOCK_ID_MAX = (1 << 31) - 1


def transfer_tag(
    connection: str, request_id: RequestId, attempt: int, piece: int | None = None
) -> int:
    """64 bits for one attempt's transfer, or for a piece of it that is streamed.

    `connection` is the signal link's name.
    """
    which = f"{attempt}" if piece is None else f"{attempt}/{piece}"
    text = f"{which} {connection} {request_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def are_block_ids(ids: BlockIds) -> bool:
    """Whether a peer's numbers can be ids of blocks at all. Of which pool, engines know."""
    return block_ids_of(ids) is not None


def block_ids_of(ids: BlockIds) -> Ints | None:
    """A peer's ids as an array, by which a list is read once; None where they can be none."""
    return ids_below(ids, BLOCK_ID_MAX + 1)


@lru_cache(maxsize=256)
def resharding(source: KvLayout, destination: KvLayout) -> Resharding:
    """The one of this pair of layouts."""
    return Resharding(source, destination)


def is_direct(source: KvLayout, destination: KvLayout) -> bool:
    """Whether whole blocks move from pool to pool.

    Not where ranks hold replicas of a head: digests cover the first of them, and so placing what
    was verified fills the others.
    """
    return source == destination and source.num_replicas == 1


def kv_runs(
    source: KvLayout,
    destination: KvLayout,
    source_ids: BlockIds,
    destination_ids: BlockIds,
    num_tokens: int,
) -> Runs:
    """What moves for this many tokens, which fill the source's blocks from the first on.

    Whole blocks from pool to pool where that `is_direct`; else the tokens' bytes, from a pool into
    landing memory, from its first byte on.
    """
    if is_direct(source, destination):
        return whole_block_runs(source, source_ids, destination_ids)
    return resharding(source, destination).landing_runs(source_ids, num_tokens)


def layer_runs(layout: KvLayout, layer: int, source_ids: BlockIds, first_block: int) -> Runs:
    """One layer of these blocks, replicated heads once, from a pool into landing memory.

    Block source_ids[i] is the landing memory's block `first_block` + i, and bytes keep their place
    in the block.
    """
    sources = as_ids(source_ids)
    layer_bytes = layout.rank_bytes // layout.num_layers
    ranks = np.arange(0, layout.num_ranks, layout.num_replicas, dtype=np.int64)
    parts = ranks * layout.rank_bytes + layer * layer_bytes
    landings = np.arange(first_block, first_block + len(sources), dtype=np.int64)
    return Runs(
        source_offsets=(sources[:, None] * layout.block_bytes + parts).ravel(),
        destination_offsets=(landings[:, None] * layout.block_bytes + parts).ravel(),
        lengths=np.full(len(sources) * len(parts), layer_bytes, np.int64),
    )
