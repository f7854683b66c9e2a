"""A CUDA backend of a tiny model, whose pool is all NaN: what was never written is never read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from neuron_di.backends import BackendOptions, open_backend, plan_device
from neuron_di.backends.cuda import CudaBackend
from neuron_di.config import CudaOptions, EngineOptions
from neuron_di.models import ModelSpec
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId, Incarnation

IS_GPU = torch.cuda.is_available()
BLOCK_SIZE = 16
NUM_BLOCKS = 24
ROWS_MAX = 4

# Of a model whose products take little time in the interpreter.
NUM_VOCAB = 96
SHAPE = {
    "vocab_size": NUM_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def write_small(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A checkpoint of SHAPE."""
    write_random_checkpoint(folder, family, config={**SHAPE, **config})
    return folder


def engine_options(*, cuda: CudaOptions | None = None, **changes: Any) -> EngineOptions:
    values: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "decode_batch": ROWS_MAX,
        "chunk_tokens": 32,
        "threads": 1,
    }
    return EngineOptions(**(values | changes), cuda=cuda or CudaOptions())


@contextmanager
def opened_cuda(
    folder: Path, *, is_invariant: bool = False, **changes: Any
) -> Iterator[CudaBackend]:
    engine = engine_options(cuda=CudaOptions(batch_invariant=is_invariant), **changes)
    spec = ModelSpec.from_folder(folder)
    plan = plan_device(engine, spec, folder)
    backend = open_backend(
        "cuda",
        BackendOptions(
            folder=folder,
            spec=spec,
            layout=spec.kv_layout(block_size=engine.block_size, dtype=plan.dtype),
            num_blocks=engine.num_blocks or NUM_BLOCKS,
            incarnation=Incarnation("b" * 32),
            num_threads=1,
            plan=plan,
        ),
    )
    assert isinstance(backend, CudaBackend)
    try:
        with backend._device.computing():  # what the test reads comes after what was launched
            pool_of(backend).fill_(float("nan"))
            yield backend
    finally:
        backend.close()


def pool_of(backend: CudaBackend) -> torch.Tensor:
    """kv_NLCKSD, as it lies on the device."""
    layout = backend.layout
    return backend._device.tensor_at(
        backend._blocks.device_address,
        (backend._options.num_blocks, *layout.rank_shape),
        getattr(torch, layout.dtype),
    )


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]
