"""What a worker's model and KV pool need, said before anything is loaded."""

from dataclasses import dataclass

from neuron_di.errors import ConfigError
from neuron_di.kv import DTYPE_BYTES, KvLayout, segment_bytes
from neuron_di.models import ModelSpec, Shard

_LOGIT_ROWS = 64  # rows of logits alive at once: the largest decode batch with its sampling
_HEAD_BYTES = 2 * 4096  # of a pool: its header, and the counters' last page
_PROCESS_BYTES = 192 << 20  # of a rank's process before it has loaded anything: torch itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose. `pool_bytes` grows with the number of blocks, the rest does not."""

    weights_bytes: int
    pool_bytes: int
    workspace_bytes: int
    num_blocks: int
    block_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.pool_bytes + self.workspace_bytes

    def max_blocks(self, available_bytes: int) -> int:
        """The most blocks that fit; 0 when not even the weights do."""
        fixed_bytes = self.weights_bytes + self.workspace_bytes + _HEAD_BYTES
        return max(0, (available_bytes - fixed_bytes) // (self.block_bytes + 8))  # 8: its counter

    def require_fits(self, available_bytes: int) -> None:
        """Raise ConfigError with the numbers when the plan needs more than there is."""
        if self.total_bytes <= available_bytes:
            return
        most = self.max_blocks(available_bytes)
        mend = (
            f"at most {most} blocks fit"
            if most
            else "the model does not fit whatever the number of blocks"
        )
        raise ConfigError(
            f"not enough memory: weights {_text(self.weights_bytes)}, KV pool of "
            f"{self.num_blocks} blocks {_text(self.pool_bytes)}, workspace "
            f"{_text(self.workspace_bytes)}: {_text(self.total_bytes)} in all, but "
            f"{_text(available_bytes)} are available; {mend}"
        )


def plan_memory(
    spec: ModelSpec, layout: KvLayout, *, num_blocks: int, chunk_tokens: int
) -> MemoryPlan:
    """What serving `spec` takes, on all ranks. `chunk_tokens` is the largest prefill chunk; 0 where
    another device computes: weights and pool pass through this memory all the same.

    The workspace is the peak of one layer's activations for such a chunk, its keys, its mask,
    and the logits: an upper estimate, small beside the rest.
    """
    num_ranks = layout.num_ranks
    shards = [Shard(model=spec, num_ranks=num_ranks, rank=rank).spec for rank in range(num_ranks)]
    context = min(spec.context_tokens, num_blocks * layout.block_size)
    chunk = min(chunk_tokens, context)
    workspace = sum(_rank_workspace(each, layout.dtype, chunk, context) for each in shards)
    if num_ranks > 1:  # what they pass to each other, whole at each of them
        passed = chunk * spec.hidden * 2 * DTYPE_BYTES["float32"]
        workspace += num_ranks * (num_ranks * passed + _LOGIT_ROWS * spec.num_vocab * 4)
        workspace += (num_ranks - 1) * _PROCESS_BYTES
    return MemoryPlan(
        weights_bytes=sum(each.weight_bytes(layout.dtype) for each in shards),
        pool_bytes=segment_bytes(layout, num_blocks),
        workspace_bytes=workspace,
        num_blocks=num_blocks,
        block_bytes=layout.block_bytes,
    )


def _rank_workspace(spec: ModelSpec, dtype: str, chunk: int, context: int) -> int:
    size = DTYPE_BYTES[dtype]
    query = spec.num_heads * spec.head_dim
    widest = max(spec.num_qkv + 3 * query, 3 * spec.intermediate)
    keys = 2 * spec.num_kv_heads * spec.head_dim * context
    angles = spec.head_dim * context * 4
    workspace = chunk * (2 * spec.hidden + widest) * size + keys * size + angles
    return workspace + chunk * context * (1 + size) + _LOGIT_ROWS * spec.num_vocab * 4


def _text(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
