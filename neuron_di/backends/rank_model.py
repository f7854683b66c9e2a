"""One rank's weights and what computes with them, in whichever process the rank is."""

from pathlib import Path

from torch import Tensor

from neuron_di.backends.backend import LayerHook
from neuron_di.backends.cpu_numerics import set_threads
from neuron_di.backends.rank_messages import RunChunk
from neuron_di.models import (
    Gather,
    JointRank,
    LoadProgress,
    ReadLogits,
    Shard,
    TorchAttention,
    Transformer,
    load_weights,
)
from neuron_di.types import BlockId


class RankModel:
    """Loads its part when it is made, blocking. CheckpointError where that cannot be loaded."""

    def __init__(
        self,
        shard: Shard,
        *,
        folder: Path,
        dtype: str,
        num_threads: int,
        on_progress: LoadProgress | None = None,
    ) -> None:
        set_threads(num_threads)
        self._shard = shard
        self._spec = shard.spec
        self._weights = load_weights(
            folder, self._spec, dtype=dtype, on_progress=on_progress, shard=shard
        )
        self._transformer: Transformer | None = None

    def bind(self, pool_NLCKSD: Tensor, num_positions: int, gather: Gather) -> None:
        """Compute on this pool from now on."""
        spec = self._spec
        self._transformer = Transformer(
            spec,
            self._weights,
            spec.rope.angle_tables(spec.head_dim, num_positions),
            pool_NLCKSD,
            TorchAttention(pool_NLCKSD, spec.sliding_window),
            JointRank(self._shard, gather),
        )

    def unbind(self) -> None:
        """Let go of the pool."""
        self._transformer = None

    def run(
        self,
        order: RunChunk,
        after_layer: LayerHook | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        """Take this rank's part in a chunk: `Transformer.run_chunk`, which all ranks run."""
        assert self._transformer is not None, "there is no pool"
        return self._transformer.run_chunk(
            order.token_ids,
            start=order.start,
            block_ids=[BlockId(block_id) for block_id in order.block_ids],
            with_logits=order.with_logits,
            after_layer=after_layer,
            read_logits=read_logits or _read_nothing if order.reads_logits else None,
        )


def _read_nothing(_first: int, _logits: Tensor) -> None:
    """The first rank reads them."""
