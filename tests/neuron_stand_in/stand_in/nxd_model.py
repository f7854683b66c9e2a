"""The compiled graphs of one model, its weights and its KV: what a loaded `model.pt` is.

Graphs take exactly the shapes and number formats they were compiled for; `ModelWrapper` pads and
casts before. There are two kinds, each with one graph per bucket of positions:

    context encoding   one sequence from position 0: ids, mask, positions [1, bucket], slot [1]
    token generation   row i is slot i: ids, positions [B, 1], mask [B, bucket], slots [B]; -1 where
                       the row is idle (only with apply_seq_ids_mask)

A graph reads the slots' KV from the device before it computes and writes new positions afterwards.
Dimensions: B rows, V vocabulary, the others as in kv_state.
"""

from collections import Counter
from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from neuron_di.models import ModelSpec, ModelWeights, TorchAttention, Transformer
from neuron_di.types import BlockId
from neuron_di_bindings.nrt import NrtError
from stand_in.artifact import Compiled
from stand_in.cores import require_cores
from stand_in.device_tensor import DeviceTensor
from stand_in.kv_state import KvState, StateShape, garbage
from stand_in.rules import RuleBroken
from stand_in.sampling import sample
from stand_in.sharding import kv_map_of, replicated_spec, replicated_weights

SEQ_IDS_PAD = 128  # positions behind max_length that idle rows write to, with the mask


class NxdModel:
    """`state` is a dictionary per rank, from the tensors' names to device tensors."""

    def __init__(self, compiled: Compiled, global_topk: int, is_greedy: bool) -> None:
        self.compiled = compiled
        self.state: list[dict[str, DeviceTensor]] = []
        self.is_warming_up = False
        self.num_runs: Counter[tuple[str, int]] = Counter()  # of each graph, by kind and bucket
        self._global_topk, self._is_greedy = global_topk, is_greedy
        self._kv: KvState | None = None
        self._pool_NLCTSD = torch.empty(0)
        self._transformer: Transformer | None = None

    def initialize(self, weights: ModelWeights, spec: ModelSpec) -> None:
        """Put the model on the cores. RuntimeError when there are too few, or too little memory."""
        compiled = self.compiled
        runtime = require_cores(compiled.tp_degree)
        kv_map = kv_map_of(spec, compiled.tp_degree)
        whole = replicated_spec(spec, kv_map)
        dtype: torch.dtype = getattr(torch, compiled.torch_dtype)
        pad = SEQ_IDS_PAD if compiled.apply_seq_ids_mask else 0
        shape = StateShape(
            num_layers=spec.num_layers,
            num_slots=compiled.num_slots,
            num_heads=len(kv_map.heads[0]),
            num_positions=compiled.max_length + pad,
            head_dim=spec.head_dim,
            dtype=dtype,
            is_transposed=compiled.k_cache_transposed,
            is_tiled=compiled.kv_cache_tiling,
        )
        try:
            self._kv = KvState(runtime, shape, compiled.tp_degree)
        except NrtError as error:
            raise _device_error(error) from error
        self.state = self._kv.ranks
        # Where a slot's KV is while a row computes with it. It keeps nothing from row to row.
        self._pool_NLCTSD = torch.empty(
            whole.kv_layout(block_size=compiled.max_length, dtype=compiled.torch_dtype).rank_shape,
            dtype=dtype,
        )[None]
        self._transformer = Transformer(
            whole,
            replicated_weights(weights, spec, kv_map),
            spec.rope.angle_tables(spec.head_dim, compiled.max_length),
            self._pool_NLCTSD,
            TorchAttention(self._pool_NLCTSD, None),
        )

    def forward(self, inputs: Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Run the graph that these inputs fit: ids, attention mask, positions, slots, sampling.

        Returns logits [B, 1, V] float32, or with on-device sampling token ids [B] int32, or with
        output_logits both. RuntimeError when the device fails.
        """
        if self._transformer is None:
            raise RuntimeError("the model's weights are not on the device yet")
        ids, mask, positions, slots, params = inputs[:5]
        self._check_formats(ids, mask, positions, slots, params)
        kind = "context" if ids.shape[1] > 1 else "token"
        bucket = mask.shape[1]
        self._check_shapes(kind, bucket, inputs)
        self.num_runs[kind, bucket] += 1
        try:
            if kind == "context":
                logits_BV = self._encode(ids[0], mask[0], positions[0], int(slots[0]))
            else:
                logits_BV = self._generate(ids[:, 0], mask, positions[:, 0], slots)
        except NrtError as error:
            raise _device_error(error) from error
        if not self.compiled.on_device_sampling:
            return logits_BV[:, None]
        tokens = sample(logits_BV, params, self._global_topk, is_greedy=self._is_greedy)
        return [tokens, logits_BV[:, None]] if self.compiled.output_logits else tokens

    def _check_formats(self, *inputs: Tensor) -> None:
        names = ("input_ids", "attention_mask", "position_ids", "seq_ids", "sampling_params")
        for name, tensor in zip(names, inputs, strict=True):
            wanted = torch.float32 if name == "sampling_params" else torch.int32
            if tensor.dtype != wanted:
                raise RuleBroken(f"{name} is {tensor.dtype}, the graph takes {wanted}")

    def _check_shapes(self, kind: str, bucket: int, inputs: Sequence[Tensor]) -> None:
        compiled = self.compiled
        rows, width = (1, bucket) if kind == "context" else (compiled.batch_size, 1)
        buckets = compiled.context_buckets if kind == "context" else compiled.token_buckets
        wanted = [(rows, width), (rows, bucket), (rows, width), (rows,), (rows, 3)]
        shapes = [tuple(tensor.shape) for tensor in inputs[:5]]
        if bucket not in buckets or shapes != wanted:
            raise RuleBroken(f"no {kind} graph takes {shapes}: {rows} rows, buckets {buckets}")

    def _encode(self, ids: Tensor, mask: Tensor, positions: Tensor, slot: int) -> Tensor:
        """Context encoding of one padded sequence: its last token's logits [1, V]."""
        assert self._transformer is not None
        assert self._kv is not None
        bucket, num_real = len(ids), 0
        logits_V = torch.full((self._num_vocab,), nan)
        if not self.is_warming_up:
            num_real = _num_prompt_tokens(mask, positions)
            found = self._transformer.run_chunk(
                ids[:num_real].tolist(), start=0, block_ids=_ONE_BLOCK, with_logits=True
            )
            assert found is not None
            logits_V = found
            self._kv.write(slot, 0, self._pool_NLCTSD[0, :, :, :, :num_real])
        # The graph writes its whole bucket, padding too.
        self._kv.write(slot, num_real, self._garbage(bucket - num_real))
        return logits_V[None]

    def _generate(self, ids: Tensor, mask: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Token generation: logits [B, V], NaN in idle rows."""
        logits_BV = torch.full((len(ids), self._num_vocab), nan)
        assert self._kv is not None
        for row, slot in enumerate(slots.tolist()):
            position = int(positions[row])
            if slot < 0:
                self._kv.write(row, self.compiled.max_length, self._garbage(1))
            elif self.is_warming_up:
                self._kv.write(row, position, self._garbage(1))
            else:
                _check_row(row, slot, position, mask[row], self.compiled.max_length)
                logits_BV[row] = self._generate_row(row, int(ids[row]), position)
        return logits_BV

    def _generate_row(self, slot: int, token_id: int, position: int) -> Tensor:
        assert self._transformer is not None
        assert self._kv is not None
        self._kv.read_prefix(slot, position, self._pool_NLCTSD[0])
        logits_V = self._transformer.run_chunk(
            [token_id], start=position, block_ids=_ONE_BLOCK, with_logits=True
        )
        self._kv.write(slot, position, self._pool_NLCTSD[0, :, :, :, position : position + 1])
        assert logits_V is not None
        return logits_V

    def _garbage(self, num_positions: int) -> Tensor:
        assert self._kv is not None
        return garbage(num_positions, self._kv.shape, self._pool_NLCTSD.shape[3])

    @property
    def _num_vocab(self) -> int:
        return int(self.compiled.model["vocab_size"])


_ONE_BLOCK = [BlockId(0)]


def _num_prompt_tokens(mask: Tensor, positions: Tensor) -> int:
    """Tokens in front of the padding. RuleBroken where the graph would take padding for tokens."""
    num_real = int(mask.sum())
    if not mask[:num_real].all() or mask[num_real:].any():
        raise RuleBroken("the attention mask is no run of ones, then zeros: pad on the right")
    if not torch.equal(positions[:num_real], torch.arange(num_real, dtype=torch.int32)):
        raise RuleBroken(f"the positions of a prompt of {num_real} tokens are not 0, 1, 2, …")
    # The graph takes the logits where the position is greatest, and padding has position 1: of a
    # prompt of one token that is the padding behind it.
    if int(positions.argmax()) != num_real - 1:
        raise RuleBroken(
            f"a prompt of {num_real} tokens: the logits would be those of a padding position; "
            "NxD Inference pads position_ids with 1, and infers no mask from one position"
        )
    return num_real


def _check_row(row: int, slot: int, position: int, mask: Tensor, max_length: int) -> None:
    if slot != row:
        raise RuleBroken(f"row {row} has slot {slot}: a full batch is not sorted, rows are slots")
    if position >= max_length:
        raise RuleBroken(f"position {position} of a cache of {max_length}")
    if int(mask.sum()) != position or not mask[:position].all():
        raise RuleBroken(f"the attention mask of position {position} is not {position} ones first")


def _device_error(error: NrtError) -> RuntimeError:
    """What torch shows of a failed call of libnrt."""
    return RuntimeError(f"{error.function} status={int(error.status)} ({error.name})")
