"""A model behind the backend's interface, with requests of given lengths in its pool."""

import os
import random
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from neuron_di.backends import Backend, BackendOptions, open_backend, plan_device
from neuron_di.config import EngineOptions
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.models import ModelSpec
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import SamplingParams

DECODE_BATCH = 64


@dataclass(slots=True)
class DeviceModel:
    """Owned by `device_model`. Blocks are given out once, and never come back but by `forget`."""

    backend: Backend
    spec: ModelSpec
    chunk_tokens: int
    block_size: int
    num_used: int = field(default=0, init=False)

    def request(self, num_prompt: int, num_new: int, *, seed: int = 0) -> Request:
        """A prompt of random ids, with blocks for `num_new` tokens behind it."""
        source = random.Random(seed)
        request = Request(
            RequestId(f"request-{seed}"),
            0,
            prompt_ids=[source.randrange(3, self.spec.num_vocab) for _ in range(num_prompt)],
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=num_new,
            output=cast("Any", None),  # a backend never looks at text
        )
        num_blocks = -(-(num_prompt + num_new) // self.block_size)
        first, self.num_used = self.num_used, self.num_used + num_blocks
        assert self.num_used <= self.backend.pool.num_blocks, "the pool is large enough"
        request.block_ids = [BlockId(number) for number in range(first, first + num_blocks)]
        return request

    def forget(self) -> None:
        """All blocks may be given out again."""
        self.backend.quiesce([BlockId(number) for number in range(self.num_used)])
        self.num_used = 0

    def prefill(self, request: Request, chunk_tokens: int | None = None) -> Tensor:
        """All of its prompt. Logits [V] of the last position, there when this returns."""
        logits: Tensor | None = None
        while request.num_computed < request.num_prefilled:
            chunk = PrefillChunk.next_of(request, chunk_tokens or self.chunk_tokens)
            logits = self.backend.prefill(chunk)
            chunk.mark_computed()
        assert logits is not None, "the last chunk gives logits"
        self.backend.quiesce(request.block_ids)
        return logits

    def logits(self, batch: DecodeBatch) -> Tensor:
        """Logits [B, V] of one decode step, a copy, there when this returns."""
        logits_BV = self.backend.decode(batch)
        # A device computes on a stream of its own: nothing else may read before it is done.
        self.backend.quiesce([block for each in batch.requests for block in each.block_ids])
        return logits_BV.clone()

    def step(self, batch: DecodeBatch) -> list[int]:
        """One decode step to the next tokens' ids, on the host. The requests stay as they are."""
        logits = self.backend.decode(batch)
        drawn = self.backend.draw(logits, batch.requests)
        if None in drawn:
            self.backend.quiesce([])
        return [
            int(logits[row].argmax()) if token_id is None else token_id
            for row, token_id in enumerate(drawn)
        ]

    def decoding(self, num_requests: int, context_tokens: int) -> DecodeBatch:
        """Requests whose newest token is at position `context_tokens` - 1: KV of all others."""
        requests = []
        for number in range(num_requests):
            request = self.request(context_tokens - 1, 2, seed=number)
            self.prefill(request)
            request.generated.append(3)
            requests.append(request)
        return DecodeBatch(tuple(requests))


@contextmanager
def device_model(
    folder: Path,
    *,
    device: str,
    dtype: str,
    num_tokens: int,
    context_tokens: int,
    decode_batch: int = DECODE_BATCH,
    chunk_tokens: int | None = None,
    batch_invariant: bool = False,
) -> Iterator[DeviceModel]:
    """A model with a pool for so many token positions in all. Raises as a worker would."""
    spec = ModelSpec.from_folder(folder)
    given: dict[str, Any] = {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
    if device == "cuda":
        from neuron_di.config import CudaOptions

        given["cuda"] = CudaOptions(batch_invariant=batch_invariant)
    block_size = EngineOptions().block_size
    num_blocks = -(-num_tokens // block_size) + decode_batch  # each request rounds up
    options = EngineOptions(
        device=cast("Any", device),
        dtype=cast("Any", dtype),
        num_blocks=num_blocks,
        context_tokens=min(context_tokens, spec.context_tokens),
        decode_batch=decode_batch,
        **given,
    )
    plan = plan_device(options, spec, folder)
    layout = spec.kv_layout(block_size=plan.block_size, dtype=plan.dtype, num_ranks=plan.num_ranks)
    backend = open_backend(
        device,
        BackendOptions(
            folder=folder,
            spec=spec,
            layout=layout,
            num_blocks=num_blocks,
            incarnation=Incarnation(secrets.token_hex(16)),
            num_threads=len(os.sched_getaffinity(0)),
            plan=plan,
        ),
    )
    try:
        yield DeviceModel(backend, spec, plan.chunk_tokens, plan.block_size)
    finally:
        backend.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def step_bytes(spec: ModelSpec, lengths: Sequence[int], dtype_bytes: int) -> int:
    """What a decode step reads at least: the weights it multiplies with, and all KV.

    Of an embedding that is no head, a step reads a row for each request, which does not count.
    """
    num_read = spec.num_parameters()
    if not spec.has_tied_embeddings:
        num_read -= spec.num_vocab * spec.hidden
    kv_of_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return (num_read + kv_of_token * sum(lengths)) * dtype_bytes


def prefill_flops(spec: ModelSpec, num_tokens: int) -> float:
    """Multiplications and additions of a prompt: matrices, causal attention, one row of logits."""
    of_layer = spec.hidden * (spec.num_qkv + spec.num_heads * spec.head_dim + 3 * spec.intermediate)
    matrices = 2.0 * spec.num_layers * of_layer * num_tokens
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    return matrices + attention + 2.0 * spec.num_vocab * spec.hidden
