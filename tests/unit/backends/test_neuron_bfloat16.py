"""The Neuron backend in bfloat16, on the simulator and the stand-in: the CPU backend's numbers.

Of the CPU backend without its kernels, that is: those sum in float32 and round once where torch,
with which the stand-in computes, rounds after each operation.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from backend_kit import opened as opened_on_cpu
from neuron_backend_kit import CHUNK, NUM_TOKENS, engine_options, opened, request_of, simulated

from neuron_di.backends import Backend
from neuron_di.backends.neuron import NeuronBackend
from neuron_di.core import DecodeBatch, PrefillChunk
from neuron_di.kv import NeuronPool
from neuron_di.request import Request
from neuron_di.types import BlockId

LENGTHS = (1, 40, 127, 128, 200)  # either side of a bucket's border
SOURCE, TARGET = BlockId(0), BlockId(3)


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "root", monkeypatch)


def greedy(
    backend: Backend, request: Request, hand_over: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """The logits of a request's tokens, each the best of its row; `hand_over` after the first."""
    chunk = PrefillChunk.next_of(request, CHUNK)
    logits_V = backend.prefill(chunk)
    assert logits_V is not None
    chunk.mark_computed()
    rows = [logits_V.clone()]
    request.generated.append(int(logits_V.argmax()))
    hand_over()
    while len(request.generated) < NUM_TOKENS:
        batch = DecodeBatch((request,))
        (logits_V,) = backend.decode(batch)
        batch.mark_computed()
        rows.append(logits_V.clone())
        request.generated.append(int(logits_V.argmax()))
    return rows


def on_cpu(folder: Path, length: int) -> tuple[list[int], list[torch.Tensor]]:
    request = request_of(length, 0)
    request.block_ids = [BlockId(block_id) for block_id in range(20)]
    with opened_on_cpu(folder, dtype="bfloat16", use_kernels=False) as backend:
        rows = greedy(backend, request)
    return request.generated, rows


def move(backend: NeuronBackend, request: Request) -> None:
    """To another slot by way of the mirror, as between two workers of a host."""
    pool = backend.pool
    assert isinstance(pool, NeuronPool)
    pool.to_host(SOURCE, request.num_computed)
    pool.view(TARGET)[:] = pool.view(SOURCE)
    pool.retire([SOURCE, TARGET])  # the target's was the last request's
    request.block_ids = [TARGET]


@pytest.mark.parametrize(("tp", "transposed"), [(1, False), (2, True)])
def test_tokens_are_those_of_the_cpu_in_bfloat16(
    llama_folder: Path, tmp_path: Path, tp: int, transposed: bool
) -> None:
    """Before and after a hand-over. No bit is lost between device, mirror and device."""
    options = engine_options(
        tmp_path / "artifacts", tp=tp, neuron_k_transposed=transposed, dtype="bfloat16"
    )
    with opened(llama_folder, options) as backend:
        for length in LENGTHS:
            request = request_of(length, SOURCE)
            rows = greedy(backend, request, lambda request=request: move(backend, request))
            tokens, expected = on_cpu(llama_folder, length)
            assert request.generated == tokens
            for found, wanted in zip(rows, expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-2, rtol=0)
