"""Compiling and driving the stand-in, as its documented callers do."""

from pathlib import Path
from typing import Any

import torch
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from torch import Tensor

from neuron_di.models import ModelSpec

NUM_SLOTS = 3
MAX_LENGTH = 256

DEFAULTS: dict[str, Any] = {
    "tp_degree": 1,
    "batch_size": NUM_SLOTS,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
    "seq_len": MAX_LENGTH,
    "max_context_length": 128,
    "enable_bucketing": True,
    "context_encoding_buckets": [32, 64, 128],
    "token_generation_buckets": [64, 128, MAX_LENGTH],
    "torch_dtype": "float32",
    "apply_seq_ids_mask": True,
}


def configured(folder: Path, **arguments: Any) -> Any:
    """The application over a checkpoint; `arguments` of NeuronConfig replace DEFAULTS."""
    cls = MODEL_TYPES[ModelSpec.from_folder(folder).family]["causal-lm"]
    neuron_config = cls.get_neuron_config_cls()(**(DEFAULTS | arguments))
    load_config = load_pretrained_config(str(folder))
    return cls(str(folder), cls.get_config_cls()(neuron_config, load_config=load_config))


def compile_model(folder: Path, into: Path, **arguments: Any) -> Any:
    """The application over what was compiled: not loaded yet."""
    model = configured(folder, **arguments)
    model.compile(str(into))
    return type(model)(str(into))


def encode(model: Any, slot: int, prompt: list[int]) -> Tensor:
    """The prompt's last logits [V]."""
    out = model(
        input_ids=torch.tensor([prompt]),
        position_ids=torch.arange(len(prompt))[None],
        seq_ids=torch.tensor([slot]),
        sampling_params=prepare_sampling_params(1),
    )
    assert out.logits.shape[:2] == (1, 1)
    return out.logits[0, -1]


def step_arguments(rows: dict[int, tuple[int, int]]) -> dict[str, Tensor]:
    """Of forward, for rows of slot: (token id, its position)."""
    tokens, positions = zip(*rows.values(), strict=True)
    return {
        "input_ids": torch.tensor(tokens)[:, None],
        "position_ids": torch.tensor(positions)[:, None],
        "seq_ids": torch.tensor(list(rows)),
        "sampling_params": prepare_sampling_params(len(rows)),
    }


def step(model: Any, rows: dict[int, tuple[int, int]]) -> Tensor:
    """One next token for each slot: logits [b, V]."""
    logits = model(**step_arguments(rows)).logits
    assert logits.shape[:2] == (len(rows), 1)
    return logits[:, -1]


def nxd_model(model: Any) -> Any:
    return model.context_encoding_model.model.nxd_model


def kv_on_host(model: Any) -> dict[tuple[int, str], Tensor]:
    """Every state tensor, by rank and name."""
    return {
        (rank, name): tensor.to("cpu")
        for rank, tensors in enumerate(nxd_model(model).state)
        for name, tensor in tensors.items()
    }


def key_name(layer: int) -> str:
    return f"kv_mgr.past_key_values.{2 * layer}"


def value_name(layer: int) -> str:
    return f"kv_mgr.past_key_values.{2 * layer + 1}"
