"""Requests and steps for the tests of a backend, without an engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from neuron_di.backends import Backend, BackendOptions, open_backend
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.models import ModelSpec
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import SamplingParams

BLOCK_SIZE = 16


@contextmanager
def opened(
    folder: Path,
    *,
    num_blocks: int = 100,
    dtype: str = "float32",
    use_kernels: bool = True,
    num_threads: int = 1,
    num_ranks: int = 1,
) -> Iterator[Backend]:
    spec = ModelSpec.from_folder(folder)
    options = BackendOptions(
        folder=folder,
        spec=spec,
        layout=spec.kv_layout(block_size=BLOCK_SIZE, dtype=dtype, num_ranks=num_ranks),
        num_blocks=num_blocks,
        incarnation=Incarnation("a" * 32),
        num_threads=num_threads,
        use_kernels=use_kernels,
    )
    backend = open_backend("cpu", options)
    try:
        # Whatever was never written must never be read.
        for rank in range(num_ranks):
            backend.pool.tensor(rank).fill_(float("nan"))
        yield backend
    finally:
        backend.close()


def make_request(
    prompt_ids: list[int],
    block_ids: list[int],
    max_tokens: int = 32,
    given: Sequence[int] = (),
) -> Request:
    request = Request(
        RequestId("request"),
        0,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        output=cast("Any", None),  # a backend never looks at text
        given=given,
    )
    request.block_ids = [BlockId(block_id) for block_id in block_ids]
    return request


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 2048, (length,), generator=generator).tolist()
    return ids


def prefill(backend: Backend, request: Request, chunk_tokens: int = 256) -> None:
    """Run the whole prompt and append the greedy first token."""
    logits = None
    while request.num_computed < request.num_prompt:
        chunk = PrefillChunk.next_of(request, chunk_tokens)
        logits = backend.prefill(chunk)
        chunk.mark_computed()
    assert logits is not None
    request.generated.append(int(logits.argmax()))


def decode(backend: Backend, *requests: Request) -> torch.Tensor:
    """One step for all; appends each one's greedy token and returns the logits."""
    batch = DecodeBatch(requests)
    logits = backend.decode(batch)
    batch.mark_computed()
    for request, row in zip(requests, logits, strict=True):
        request.generated.append(int(row.argmax()))
    return logits
