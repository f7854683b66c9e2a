"""Steps of a real model on the CPU backend, each the same as the one before."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from neuron_di.backends import Backend, BackendOptions, open_backend
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.models import ModelSpec
from neuron_di.request import Request
from neuron_di.types import BlockId, Incarnation, RequestId
from neuron_di.wire import SamplingParams

BATCH = 8
CONTEXT_TOKENS = 512
CHUNK_TOKENS = 128
_BLOCK_SIZE = 16

Step = Callable[[], object]


@contextmanager
def model_steps(folder: Path) -> Iterator[tuple[Step, Step]]:
    """A decode step of 8 requests at a context of 512, and a prefill step of 128 tokens."""
    spec = ModelSpec.from_folder(folder)
    blocks_each = CONTEXT_TOKENS // _BLOCK_SIZE + 1
    backend = open_backend(
        "cpu",
        BackendOptions(
            folder=folder,
            spec=spec,
            layout=spec.kv_layout(block_size=_BLOCK_SIZE, dtype="float32"),
            num_blocks=blocks_each * (BATCH + 1),
            incarnation=Incarnation("a" * 32),
            num_threads=1,
        ),
    )
    try:
        requests = [_request(spec, index, blocks_each) for index in range(BATCH + 1)]
        for request in requests[:BATCH]:
            _prefill(backend, request)
        batch = DecodeBatch(tuple(requests[:BATCH]))
        chunk = PrefillChunk(requests[BATCH], 0, CHUNK_TOKENS)
        yield lambda: backend.decode(batch), lambda: backend.prefill(chunk)
    finally:
        backend.close()


def _request(spec: ModelSpec, index: int, num_blocks: int) -> Request:
    source = random.Random(index)
    request = Request(
        RequestId(f"request-{index}"),
        0,
        prompt_ids=[source.randrange(3, spec.num_vocab) for _ in range(CONTEXT_TOKENS)],
        sampling=SamplingParams(),
        max_tokens=16,
        output=cast("Any", None),  # a backend never looks at text
    )
    first = index * num_blocks
    request.block_ids = [BlockId(first + number) for number in range(num_blocks)]
    return request


def _prefill(backend: Backend, request: Request) -> None:
    while request.num_computed < request.num_prompt:
        chunk = PrefillChunk.next_of(request, CHUNK_TOKENS)
        backend.prefill(chunk)
        chunk.mark_computed()
    request.generated.append(3)
