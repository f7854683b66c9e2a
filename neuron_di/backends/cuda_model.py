"""The decoder of all four families on a GPU: rows of token positions, from ids to logits.

Weights, pool and results lie on the device. Nothing here waits for it.

Dimensions: T or B rows, E hidden, H query heads, K KV heads, D head dim, N blocks, V vocabulary.

Run on one GPU so far (docs/cuda.md).
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from neuron_di.backends.cuda_kernels import (
    INVARIANT_SPLITS,
    add_and_norm_,
    attend_decode,
    attend_prefill,
    invariant_linear,
    num_decode_splits,
    rms_norm,
    silu_and_multiply,
    write_kv_,
)
from neuron_di.kv.runs import as_ids
from neuron_di.models import ModelSpec, ModelWeights, ReadLogits
from neuron_di_bindings.block_runs import join_blocks

# Layer, queries -> attended, both [T, H, D].
_Attend = Callable[[int, Tensor], Tensor]
AfterLayer = Callable[[int], None]

_READ_ROWS = 32  # of logits that are made at once when all of a chunk are read


class CudaModel:
    """Computes with one worker's weights on its KV pool; owns neither.

    `angle_tables` are `RopeSpec.angle_tables`, on the device, for every position a request can
    reach. `is_invariant`: each row is summed in one order, whatever the batch, by kernels of our
    own. Else cuBLAS multiplies, whose rounding depends on the number of rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        angle_tables: tuple[Tensor, Tensor],
        pool_NLCKSD: Tensor,
        *,
        is_invariant: bool,
        num_multiprocessors: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._pool_NLCKSD = pool_NLCKSD
        self._cos_PR, self._sin_PR = angle_tables
        self._linear = invariant_linear if is_invariant else F.linear
        self._is_invariant = is_invariant
        self._num_multiprocessors = num_multiprocessors
        self._device = pool_NLCKSD.device

    def run_chunk(
        self,
        token_ids: Sequence[int],
        *,
        start: int,
        block_ids: Sequence[int],
        with_logits: bool,
        after_layer: AfterLayer | None = None,
        read_logits: ReadLogits | None = None,
    ) -> Tensor | None:
        """Positions [start, start + T) of one request, as `Transformer.run_chunk`.

        `after_layer` is called once the layer's work is launched. `read_logits` gets its rows on
        the host.
        """
        num_rows, end = len(token_ids), start + len(token_ids)
        size = self._pool_NLCKSD.shape[4]
        num_blocks = -(-end // size)
        assert len(block_ids) >= num_blocks, "a kernel would take what lies behind for a block"
        table_N = self._int32(block_ids[:num_blocks])
        bounds = self._int32([0, num_rows, end])

        def attend(layer: int, query_THD: Tensor) -> Tensor:
            return attend_prefill(
                query_THD,
                self._pool_NLCKSD,
                layer,
                table_N[None],
                bounds[:2],
                bounds[2:],
                rows_max=num_rows,
                window=self._spec.sliding_window,
            )

        positions_T = torch.arange(start, end, dtype=torch.int32, device=self._device)
        ids_T = self._int32(token_ids)
        hidden_TE, last_product_TE = self._run(
            ids_T, positions_T, table_N.expand(num_rows, -1), attend, after_layer
        )
        if read_logits is not None:
            for first in range(0, num_rows, _READ_ROWS):
                rows = slice(first, min(first + _READ_ROWS, num_rows))
                logits_TV = self._logits(hidden_TE[rows].clone(), last_product_TE[rows])
                read_logits(start + first, logits_TV.cpu())
        if not with_logits:
            return None
        return self._logits(hidden_TE[-1:], last_product_TE[-1:])[0]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Whole blocks of the pool, as many of either and none of both. Takes no memory meanwhile:
        the plan has no room for a piece of a long prompt."""
        runs = join_blocks(as_ids(sources), as_ids(targets), 1)
        for source, target, num_blocks in zip(*(row.tolist() for row in runs), strict=True):
            copied = self._pool_NLCKSD[source : source + num_blocks]
            self._pool_NLCKSD[target : target + num_blocks].copy_(copied)

    def decode_rows(self, id_B: Tensor, position_B: Tensor, table_BN: Tensor) -> Tensor:
        """Logits [B, V], float32, of one position of each row. All are on the device, int32.

        A row at position -1 only fills a bucket: it writes no KV, and its logits mean nothing. What
        is launched depends on shapes only, so a CUDA graph can hold it.
        """
        num_splits = INVARIANT_SPLITS
        if not self._is_invariant:
            num_splits = num_decode_splits(
                len(id_B), self._spec.num_kv_heads, self._num_multiprocessors
            )
        length_B = position_B + 1

        def attend(layer: int, query_BHD: Tensor) -> Tensor:
            return attend_decode(
                query_BHD,
                self._pool_NLCKSD,
                layer,
                table_BN,
                length_B,
                num_splits=num_splits,
                window=self._spec.sliding_window,
            )

        return self._logits(*self._run(id_B, position_B, table_BN, attend))

    def _run(
        self,
        id_T: Tensor,
        position_T: Tensor,
        table_TN: Tensor,
        attend: _Attend,
        after_layer: AfterLayer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden rows before the last product was added, and that product, both [T, E]."""
        weights, spec = self._weights, self._spec
        hidden_TE = F.embedding(id_T, weights.embedding)
        normed_TE = rms_norm(hidden_TE, weights.layers[0].input_norm, spec.rms_eps)
        add_and_norm = partial(add_and_norm_, rms_eps=spec.rms_eps)
        product_TE = normed_TE  # of no layer yet
        for number, layer in enumerate(weights.layers):
            if number > 0:
                normed_TE = add_and_norm(hidden_TE, product_TE, layer.input_norm)
            qkv_TX = self._linear(normed_TE, layer.qkv, layer.qkv_bias)
            query_THD = write_kv_(
                qkv_TX.view(len(qkv_TX), -1, spec.head_dim),
                self._pool_NLCKSD,
                number,
                table_TN,
                position_T,
                self._cos_PR,
                self._sin_PR,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                rms_eps=spec.rms_eps,
            )
            attended_TX = attend(number, query_THD).flatten(1)
            product_TE = self._linear(attended_TX, layer.out, layer.out_bias)
            if after_layer is not None:
                after_layer(number)
            normed_TE = add_and_norm(hidden_TE, product_TE, layer.post_norm)
            gate_up_TI = self._linear(normed_TE, layer.gate_up, layer.gate_up_bias)
            product_TE = self._linear(silu_and_multiply(gate_up_TI), layer.down, layer.down_bias)
        return hidden_TE, product_TE

    def _logits(self, hidden_TE: Tensor, product_TE: Tensor) -> Tensor:
        """Of these rows only: the vocabulary's projection costs as much as several layers. Adds the
        product to the hidden rows in place."""
        weights, eps = self._weights, self._spec.rms_eps
        normed_TE = add_and_norm_(hidden_TE, product_TE, weights.final_norm, eps)
        return self._linear(normed_TE, weights.lm_head, None).float()

    def _int32(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self._device)
