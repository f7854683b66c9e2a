"""The decoder of all four families: one request's chunk of positions, from token ids to logits.

Dimensions: T positions of the chunk, E hidden, H query heads, K KV heads, D head dim, R = D / 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_di.models.attention import AttendChunk
from neuron_di.models.rope import rotate_
from neuron_di.models.shard import JointRank
from neuron_di.models.spec import ModelSpec
from neuron_di.models.weights import LayerWeights, ModelWeights
from neuron_di.types import BlockId

# Called with a position and the logits [T, V], float32, of that position and those after it.
ReadLogits = Callable[[int, Tensor], None]

# Rows of logits that are made at once when all of a chunk are read: a wide vocabulary's are large.
_READ_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What all layers of one chunk share: its angles, and where its KV goes."""

    start: int
    table_N: Tensor  # the request's blocks up to the chunk's end, int32
    cos_TR: Tensor
    sin_TR: Tensor
    block_T: Tensor  # pool block of each position
    slot_T: Tensor  # its place in that block


class Transformer:
    """Computes with one worker's weights on its KV pool; owns neither.

    `angle_tables` are `RopeSpec.angle_tables` for every position a request can reach.
    `pool_NLCKSD` has the weights' dtype. `attend` is how a chunk's queries read it. `joint` is for
    one rank of several: `spec`, weights and pool are then its part, and each rank runs the same
    chunks. Called by one thread.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        angle_tables: tuple[Tensor, Tensor],
        pool_NLCKSD: Tensor,
        attend: AttendChunk,
        joint: JointRank | None = None,
    ) -> None:
        assert pool_NLCKSD.dtype == weights.embedding.dtype, "KV is kept in the compute dtype"
        self._spec = spec
        self._weights = weights
        self._pool_NLCKSD = pool_NLCKSD
        self._attend = attend
        self._joint = joint
        self._block_size = pool_NLCKSD.shape[4]
        self._cos_XR, self._sin_XR = angle_tables

    @torch.inference_mode()
    def run_chunk(
        self,
        token_ids: Sequence[int],
        *,
        start: int,
        block_ids: Sequence[BlockId],
        with_logits: bool,
        after_layer: Callable[[int, Sequence[BlockId]], None] | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        """Run positions [start, start + len(token_ids)) of one request.

        `block_ids` are the request's blocks in order: the chunk's KV is written there, and the
        KV of [0, start) must be there. `after_layer(layer, blocks)` is called once the chunk's KV
        of that layer is in those blocks. `read_logits` gets the logits of all positions, a few at
        a time and in order. Returns the last position's logits [V] in float32, or None when they
        are not wanted: the same bits whether or not all are read.
        """
        end = start + len(token_ids)
        chunk = self._plan_chunk(start, end, block_ids)
        written = block_ids[start // self._block_size : -(-end // self._block_size)]
        hidden_TE = self._embed(torch.tensor(token_ids))
        for number, layer in enumerate(self._weights.layers):
            self._add_attention_(hidden_TE, number, layer, chunk)
            if after_layer is not None:
                after_layer(number, written)
            self._add_mlp_(hidden_TE, layer)
        if read_logits is not None:
            for first in range(0, len(hidden_TE), _READ_ROWS):
                read_logits(start + first, self._logits(hidden_TE[first : first + _READ_ROWS]))
        if not with_logits:
            return None
        # One position only: the vocabulary's projection costs as much as several layers.
        return self._logits(hidden_TE[-1])

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self._joint is not None:
            return self._joint.embed(token_ids, self._weights.embedding)
        return F.embedding(token_ids, self._weights.embedding)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, self._weights.final_norm)
        logits = F.linear(normed, self._weights.lm_head).float()
        return logits if self._joint is None else self._joint.join_vocab(logits)

    def _plan_chunk(self, start: int, end: int, block_ids: Sequence[BlockId]) -> _Chunk:
        """Work out once what is the same for every layer."""
        size = self._block_size
        positions_T = torch.arange(start, end)
        dtype = self._pool_NLCKSD.dtype
        table_N = torch.tensor(block_ids[: -(-end // size)], dtype=torch.int32)
        return _Chunk(
            start=start,
            table_N=table_N,
            cos_TR=self._cos_XR[start:end].to(dtype),
            sin_TR=self._sin_XR[start:end].to(dtype),
            block_T=table_N[positions_T // size],
            slot_T=positions_T % size,
        )

    def _add_attention_(
        self, hidden_TE: Tensor, number: int, layer: LayerWeights, chunk: _Chunk
    ) -> None:
        """Write the chunk's KV of this layer into the pool, attend, add to `hidden_TE`."""
        spec = self._spec
        normed_TE = self._norm(hidden_TE, layer.input_norm)
        qkv_TXD = F.linear(normed_TE, layer.qkv, layer.qkv_bias).view(
            len(normed_TE), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
        )
        query_THD = qkv_TXD[:, : spec.num_heads]
        kv_TCKD = qkv_TXD[:, spec.num_heads :].view(-1, 2, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            query_THD.copy_(self._norm(query_THD, layer.q_norm))
            kv_TCKD[:, 0].copy_(self._norm(kv_TCKD[:, 0], layer.k_norm))
        rotate_(qkv_TXD[:, : spec.num_heads + spec.num_kv_heads], chunk.cos_TR, chunk.sin_TR)

        pool_NSCKD = self._pool_NLCKSD[:, number].permute(0, 3, 1, 2, 4)
        pool_NSCKD[chunk.block_T, chunk.slot_T] = kv_TCKD
        attended_TX = self._attend(number, query_THD, chunk.start, chunk.table_N)
        self._add_product_(hidden_TE, attended_TX, layer.out, layer.out_bias)

    def _add_mlp_(self, hidden_TE: Tensor, layer: LayerWeights) -> None:
        normed_TE = self._norm(hidden_TE, layer.post_norm)
        gate, up = F.linear(normed_TE, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        self._add_product_(hidden_TE, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._spec.rms_eps)

    def _add_product_(
        self, hidden_TE: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> None:
        """hidden += x @ matrix.T + bias. Of several ranks each has some columns of the matrix."""
        if self._joint is None:
            hidden_TE.addmm_(x, matrix.t())  # without a temporary of its size
        else:
            hidden_TE.add_(self._joint.sum(F.linear(x, matrix)))
        if bias is not None:
            hidden_TE.add_(bias)
