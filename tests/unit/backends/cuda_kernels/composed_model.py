"""A model's step out of the kernels alone, as the backend composes them, without a backend."""

import torch
from kernel_kit import DEVICE, int32
from torch import Tensor

from neuron_di.backends.cuda_model import CudaModel
from neuron_di.models import ModelSpec, ModelWeights
from neuron_di.types import BlockId


class ComposedModel:
    """Float32, in the batch-invariant mode. Owns its pool, all of it NaN at first."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, num_blocks: int, block_size: int
    ) -> None:
        shape = spec.kv_layout(block_size=block_size, dtype="float32").rank_shape
        self.pool = torch.full((num_blocks, *shape), torch.nan, device=DEVICE)
        cosines, sines = spec.rope.angle_tables(spec.head_dim, num_blocks * block_size)
        self._model = CudaModel(
            spec,
            weights,
            (cosines.to(DEVICE), sines.to(DEVICE)),
            self.pool,
            is_invariant=True,
            num_multiprocessors=1,
        )

    def prefill(self, token_ids: list[int], start: int, table_N: Tensor) -> Tensor:
        """Logits [T, V] of one request's chunk, on the host."""
        rows: list[Tensor] = []
        self._model.run_chunk(
            token_ids,
            start=start,
            block_ids=[BlockId(number) for number in table_N.tolist()],
            with_logits=False,
            read_logits=lambda _, logits_TV: rows.append(logits_TV),
        )
        return torch.cat(rows)

    def decode(self, token_ids: list[int], positions: list[int], table_BN: Tensor) -> Tensor:
        """Logits [B, V] of one position of each row. A position of -1 only fills a bucket."""
        return self._model.decode_rows(int32(token_ids), int32(positions), table_BN)
