"""From one worker's KV layout into another's: other ranks, block size or number format.

Where both are equal, whole blocks move, straight into the receiver's pool. Else the source's own
bytes move, of the used tokens only and each head once, into landing memory beside the receiver;
there they are verified, and then placed into the pool by a local copy. So links carry the fewest
bytes, transfer engines move byte runs and nothing else, and what was sent can be verified before
it is converted.
"""

import numpy as np

from neuron_di.errors import ConfigError, LocalProtocolError
from neuron_di.kv.layout import DTYPE_BYTES, KvLayout
from neuron_di.kv.runs import BlockIds, Ints, Memory, Runs, as_ids, joined
from neuron_di.kv.token_spans import token_spans
from neuron_di_bindings.block_runs import join_blocks
from neuron_di_bindings.run_copy import Grain, place

_BLOCK_BYTES_MAX = 1 << 40  # offsets of 2^22 such blocks fit into 63 bits


def whole_block_runs(layout: KvLayout, source_ids: BlockIds, destination_ids: BlockIds) -> Runs:
    """Block source_ids[i] of one pool to block destination_ids[i] of another of this layout.

    Blocks that are neighbours at both ends are one run. LocalProtocolError for lists of different
    lengths.
    """
    sources, destinations = as_ids(source_ids), as_ids(destination_ids)
    if len(sources) != len(destinations):
        raise LocalProtocolError(f"{len(sources)} blocks into {len(destinations)}")
    if len(sources) == 0:
        return Runs(source_offsets=sources, destination_offsets=sources, lengths=sources)
    from_, to, lengths = join_blocks(sources, destinations, layout.block_bytes)
    return Runs(source_offsets=from_, destination_offsets=to, lengths=lengths)


class Resharding:
    """From the source's layout into the destination's. Immutable; one serves a pair of workers.

    ConfigError where that cannot be: they are pools of different models.
    """

    def __init__(self, source: KvLayout, destination: KvLayout) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(destination, name), getattr(source, name)
            if ours != theirs:
                raise ConfigError(f"KV of {name} {theirs} cannot be brought into {name} {ours}")
        for layout in (source, destination):
            if layout.num_kv_heads % layout.num_ranks and layout.num_ranks % layout.num_kv_heads:
                raise ConfigError(
                    f"{layout.num_kv_heads} KV heads cannot be shared by {layout.num_ranks} ranks"
                )
            if layout.block_bytes > _BLOCK_BYTES_MAX:
                raise ConfigError(f"KV blocks of {layout.block_bytes} bytes")
        self.source = source
        self.destination = destination
        self._source_token_bytes = source.head_dim * DTYPE_BYTES[source.dtype]
        self._destination_token_bytes = destination.head_dim * DTYPE_BYTES[destination.dtype]
        self.landing = source.without_replicas()
        self._used_rows = _used_rows(source)
        self._used_landing_rows = _used_rows(self.landing)
        self._landing_rows, self._destination_rows = _row_pairs(self.landing, destination)

    def landing_bytes(self, num_tokens: int) -> int:
        """Bytes of landing memory that this many tokens need."""
        return self.landing.num_blocks_for(num_tokens) * self.landing.block_bytes

    def landing_runs(self, source_ids: BlockIds, num_tokens: int) -> Runs:
        """From the source's pool into landing memory: block source_ids[i] as its block i.

        Blocks there are of the layout `landing`. What holds no token, and further replicas of a
        head, stay out. LocalProtocolError for too many or too few blocks.
        """
        layout = self.source
        sources = as_ids(source_ids)
        if len(sources) != layout.num_blocks_for(num_tokens):
            raise LocalProtocolError(f"{len(sources)} blocks for {num_tokens} tokens")
        num_full, num_last = divmod(num_tokens, layout.block_size)
        landings = np.arange(len(sources), dtype=np.int64) * self.landing.block_bytes
        sources = sources * layout.block_bytes
        if layout.num_replicas == 1:
            parts, part_bytes = np.zeros(1, np.int64), layout.block_bytes
        else:
            ranks = np.arange(self.landing.num_ranks, dtype=np.int64)
            parts, part_bytes = ranks * layout.rank_bytes, layout.rank_bytes
        source_parts = parts * layout.num_replicas
        num_parts = num_full * len(parts)
        lengths = np.full(
            num_parts + (len(sources) - num_full) * len(self._used_rows), part_bytes, np.int64
        )
        lengths[num_parts:] = num_last * self._source_token_bytes
        runs = Runs(
            source_offsets=_offsets(sources, num_full, source_parts, self._used_rows),
            destination_offsets=_offsets(landings, num_full, parts, self._used_landing_rows),
            lengths=lengths,
        )
        # Between heads that are moved lie the replicas that are not: then there are no neighbours.
        return joined(runs) if layout.num_replicas == 1 else runs

    def place(
        self,
        landing: Memory,
        pool: Memory,
        destination_ids: BlockIds,
        num_tokens: int,
        *,
        first_token: int = 0,
    ) -> None:
        """From landing memory into the request's blocks, in the destination's form.

        `num_tokens` tokens lie in the landing memory, the first of them at position `first_token`
        of the request; `destination_ids` are the request's blocks, from position 0 on. All ranks
        and replicas are filled. LocalProtocolError for what does not fit, and then nothing was
        written.
        """
        ids = as_ids(destination_ids)
        source_size, destination_size = self.source.block_size, self.destination.block_size
        num_blocks = pool.num_bytes // self.destination.block_bytes
        if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
            raise LocalProtocolError(f"a block outside of a pool of {num_blocks}")
        if (
            first_token < 0
            or num_tokens < 0
            or first_token + num_tokens > len(ids) * destination_size
        ):
            raise LocalProtocolError(f"{num_tokens} tokens from {first_token} in {len(ids)} blocks")
        if self.landing_bytes(num_tokens) > landing.num_bytes:
            raise LocalProtocolError(f"{num_tokens} tokens in {landing.num_bytes} bytes of landing")
        spans = token_spans(num_tokens, source_size, destination_size, first_token=first_token)
        place(
            destination_address=pool.address,
            source_address=landing.address,
            destination_spans=ids[spans.destination_blocks] * self.destination.block_bytes
            + spans.destination_tokens * self._destination_token_bytes,
            source_spans=spans.source_blocks * self.landing.block_bytes
            + spans.source_tokens * self._source_token_bytes,
            span_tokens=spans.counts,
            destination_rows=self._destination_rows,
            source_rows=self._landing_rows,
            num_dims=self.source.head_dim,
            destination=_grain(self.destination),
            source=_grain(self.source),
        )


def _offsets(blocks: Ints, num_full: int, parts: Ints, used_rows: Ints) -> Ints:
    """Of each part of the full blocks, and of each row of the last one where it is not full."""
    num_parts = num_full * len(parts)
    offsets = np.empty(num_parts + (len(blocks) - num_full) * len(used_rows), np.int64)
    full = offsets[:num_parts].reshape(num_full, len(parts))
    for i, part in enumerate(parts):  # few; numpy is slow with short rows
        np.add(blocks[:num_full], part, out=full[:, i])
    offsets[num_parts:] = (blocks[num_full:, None] + used_rows).ravel()
    return offsets


def _grain(layout: KvLayout) -> Grain:
    num_bytes = DTYPE_BYTES[layout.dtype]
    return Grain(layout.head_dim * num_bytes, num_bytes, layout.dtype)


def _row_pairs(source: KvLayout, destination: KvLayout) -> tuple[Ints, Ints]:
    """For each head of K and V of each layer on each rank of the destination, in the order in
    which they lie there: its offset in a block of the source, which has each head once, and of the
    destination."""
    ranks = range(destination.num_ranks)
    heads = np.array([destination.heads_of(rank) for rank in ranks], np.int64)
    layers = np.arange(source.num_layers * 2, dtype=np.int64)  # K and V are like two layers
    in_rank = layers[:, None] * source.num_rank_heads + (heads % source.num_rank_heads)[:, None]
    holder = heads // source.num_rank_heads
    source_rows = holder[:, None] * source.rank_bytes + in_rank * _row_bytes(source)
    num_rows = len(ranks) * len(layers) * destination.num_rank_heads
    destination_rows = np.arange(num_rows, dtype=np.int64) * _row_bytes(destination)
    return source_rows.ravel(), destination_rows


def _row_bytes(layout: KvLayout) -> int:
    """Of one head of K or V of one layer."""
    return layout.block_size * layout.head_dim * DTYPE_BYTES[layout.dtype]


def _used_rows(layout: KvLayout) -> Ints:
    """Offset in a block of each head of K and V of each layer, replicated heads once."""
    num_rows = layout.num_layers * 2 * layout.num_rank_heads
    ranks = np.arange(0, layout.num_ranks, layout.num_replicas, dtype=np.int64)
    rows = np.arange(num_rows, dtype=np.int64) * _row_bytes(layout)
    return (ranks[:, None] * layout.rank_bytes + rows).ravel()
