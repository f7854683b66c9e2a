"""One kind of graph of a model: makes any batch fit its shapes, and takes the answer apart."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from stand_in.rules import RuleBroken
from torch import Tensor

CONTEXT_ENCODING_MODEL_TAG = "context_encoding_model"
TOKEN_GENERATION_MODEL_TAG = "token_generation_model"

Output = Tensor | list[Tensor]


class ModelWrapper:
    """`config` is this graph's own copy; `model` is what was loaded, the same for all graphs."""

    def __init__(self, config: Any, tag: str) -> None:
        self.config = config
        self.neuron_config = config.neuron_config
        self.tag = tag
        self.model: Any = None
        if config.pad_token_id is None:
            config.pad_token_id = 0

    def is_neuron(self) -> bool:
        return self.model is not None

    def input_generator(self) -> list[tuple[Tensor, ...]]:
        """An example for each bucket: what the graphs are compiled and warmed up with."""
        config = self.neuron_config
        rows = config.batch_size
        examples = []
        for bucket in config.buckets:
            width = bucket if self._is_context else 1
            positions = torch.arange(width) if self._is_context else torch.ones(1)
            examples.append(
                (
                    torch.ones((rows, width), dtype=torch.int32),
                    torch.ones((rows, bucket), dtype=torch.int32),
                    positions.to(torch.int32).repeat(rows, 1),
                    torch.arange(rows, dtype=torch.int32),
                    torch.ones((rows, 3), dtype=torch.float32),
                )
            )
        return examples

    def __call__(self, *args: Tensor) -> Output:
        """Ids [b, n], attention mask, positions [b, n], slots [b], sampling [b, 3] → as the graph.

        Rows of the answer are those of the batch.
        """
        if self.model is None:
            raise RuntimeError("forward before load")
        inputs = self.pad_inputs(*self.convert_int64_to_int32(*args))
        slots = inputs[3]
        self._check_slots(slots)
        rows, rows_compiled = len(slots), self.neuron_config.batch_size
        if rows > rows_compiled:
            raise RuleBroken(
                f"{rows} sequences in one call of {self.tag}, which is compiled for {rows_compiled}"
            )
        if rows == rows_compiled:
            return self.model(*inputs)
        output = self.model(*self._pad_batch(*inputs))
        chosen = slots.long()
        if isinstance(output, list):
            return [tensor.index_select(0, chosen) for tensor in output]
        return output.index_select(0, chosen)

    def convert_int64_to_int32(self, *args: Tensor) -> list[Tensor]:
        return [each.to(torch.int32) if each.dtype == torch.int64 else each for each in args]

    def pad_inputs(self, *args: Tensor) -> tuple[Tensor, ...]:
        """On the right, to the bucket; of token generation only the mask has a bucket's width."""
        ids, mask, positions, *others = args
        bucket = self.get_target_bucket(mask.shape[1])
        if not self._is_context:
            return (ids, self._pad(mask, bucket, 0), positions, *others)
        return (
            self._pad(ids, bucket, self.config.pad_token_id),
            self._pad(mask, bucket, 0),
            self._pad(positions, bucket, 1),
            *others,
        )

    def get_target_bucket(self, input_len: int) -> int:
        """The first bucket that is longer; the last one also takes what is just as long."""
        buckets: Sequence[int] = self.neuron_config.buckets
        longer = [bucket for bucket in buckets if input_len < bucket]
        if longer:
            return longer[0]
        if input_len == buckets[-1] or self.neuron_config.allow_input_truncation:
            return buckets[-1]
        raise ValueError(f"{input_len} tokens: the largest bucket of {self.tag} is {buckets[-1]}")

    def _pad(self, tensor: Tensor, width: int, value: int) -> Tensor:
        missing = width - tensor.shape[1]
        if missing < 0:
            if not self.neuron_config.allow_input_truncation:
                raise ValueError(f"{tensor.shape[1]} tokens are more than the bucket's {width}")
            warnings.warn(f"input of {tensor.shape[1]} tokens cut to {width}", stacklevel=2)
        return F.pad(tensor, (0, missing), "constant", value)

    def _check_slots(self, slots: Tensor) -> None:
        listed = slots.tolist()
        num_slots = self.neuron_config.kv_cache_batch_size
        if any(not 0 <= slot < num_slots for slot in listed):
            raise IndexError(f"seq_ids {listed} out of range: there are {num_slots} slots")
        if listed != sorted(set(listed)):
            raise RuleBroken(f"seq_ids {listed} are not sorted, or one is there twice")

    def _pad_batch(self, *args: Tensor) -> list[Tensor]:
        """The compiled number of rows: row i is slot i, and idle rows repeat the first one.

        With apply_seq_ids_mask idle rows have slot -1. Without, they are as good as the others:
        the graph writes what it computes into their slots.
        """
        ids, mask, positions, slots, params = args
        rows = self.neuron_config.batch_size
        source = torch.zeros(rows, dtype=torch.long)
        source[slots.long()] = torch.arange(len(slots))
        padded = torch.arange(rows, dtype=slots.dtype)
        if self.neuron_config.apply_seq_ids_mask:
            is_idle = torch.ones(rows, dtype=torch.bool)
            is_idle[slots.long()] = False
            padded[is_idle] = -1
        if len(params) != rows:
            params = params[source]
        return [ids[source], mask[source], positions[source], padded, params]

    @property
    def _is_context(self) -> bool:
        return self.tag == CONTEXT_ENCODING_MODEL_TAG
