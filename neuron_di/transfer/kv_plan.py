"""What both ends of a transfer must reckon alike: which bytes, in which order, under which tag."""

import hashlib
from functools import lru_cache

import numpy as np

from neuron_di.errors import LocalProtocolError
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
# Of one layer's and head's tokens in the last block. A block of few tokens moves as it is: one run
# with its unused tail costs less than many short ones without. In a block that holds a whole
# request the tail may be most of it.
UNUSED_BYTES_MAX = 32 << 10


def transfer_tag(
    connection: str, request_id: RequestId, attempt: int, piece: int | None = None
) -> int:
    """64 bits for one attempt's transfer, or for a piece of it that is streamed.

    `connection` is the signal link's name.
    """
    which = f"{attempt}" if piece is None else f"{attempt}/{piece}"
    text = f"{which} {connection} {request_id}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def block_ids_of(ids: BlockIds) -> Ints | None:
    """A peer's ids as an array, by which a list is read once; None where they cannot be ids of
    blocks at all. Of which pool, engines know."""
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

    Blocks from pool to pool where that `is_direct`; else the tokens' bytes, from a pool into
    landing memory, from its first byte on.
    """
    if is_direct(source, destination):
        return _block_runs(source, source_ids, destination_ids, num_tokens)
    return resharding(source, destination).landing_runs(source_ids, num_tokens)


def _block_runs(
    layout: KvLayout, source_ids: BlockIds, destination_ids: BlockIds, num_tokens: int
) -> Runs:
    """Whole blocks; of the last one the used tokens only, where its rows are long."""
    row_bytes = layout.rank_bytes // (layout.num_layers * 2 * layout.num_rank_heads)
    num_full, num_last = divmod(num_tokens, layout.block_size)
    used_bytes = row_bytes // layout.block_size * num_last
    if not num_last or row_bytes - used_bytes < UNUSED_BYTES_MAX:
        return whole_block_runs(layout, source_ids, destination_ids)
    sources, destinations = as_ids(source_ids), as_ids(destination_ids)
    if not len(sources) == len(destinations) == num_full + 1:
        raise LocalProtocolError(
            f"{len(sources)} blocks into {len(destinations)} for {num_tokens} tokens"
        )
    whole = whole_block_runs(layout, sources[:-1], destinations[:-1])
    rows = np.arange(0, layout.block_bytes, row_bytes, dtype=np.int64)
    from_, to = (ids[-1] * layout.block_bytes + rows for ids in (sources, destinations))
    return Runs(
        source_offsets=np.concatenate((whole.source_offsets, from_)),
        destination_offsets=np.concatenate((whole.destination_offsets, to)),
        lengths=np.concatenate((whole.lengths, np.full(len(rows), used_bytes, np.int64))),
    )


def layer_runs(layout: KvLayout, layer: int, source_ids: BlockIds, first_block: int) -> Runs:
    """One layer of these blocks, replicated heads once, from a pool into landing memory.

    Block source_ids[i] is the landing memory's block `first_block` + i.
    """
    sources, landing = as_ids(source_ids), layout.without_replicas()
    layer_bytes = layout.rank_bytes // layout.num_layers
    ranks = np.arange(landing.num_ranks, dtype=np.int64)
    source_parts = ranks * layout.num_replicas * layout.rank_bytes + layer * layer_bytes
    parts = ranks * layout.rank_bytes + layer * layer_bytes
    landings = np.arange(first_block, first_block + len(sources), dtype=np.int64)
    return Runs(
        source_offsets=(sources[:, None] * layout.block_bytes + source_parts).ravel(),
        destination_offsets=(landings[:, None] * landing.block_bytes + parts).ravel(),
        lengths=np.full(len(sources) * len(parts), layer_bytes, np.int64),
    )
