"""The files of a compiled model, in their documented places.

    neuron_config.json                               by InferenceConfig.save
    model.pt                                         here JSON: what the graphs were compiled for
    weights/tp{rank}_sharded_checkpoint.safetensors  with save_sharded_checkpoint

A rank's weights are some of the rows of every tensor: how real ones share them does not matter
to who only passes the folder on.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from neuron_di.models import ModelSpec, ModelWeights, load_weights

COMPILED_MODEL_FILE_NAME = "model.pt"
_FORMAT = "neuron stand-in: no TorchScript"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What is fixed once the graphs are compiled; what is loaded with other values fails."""

    tp_degree: int
    batch_size: int  # of token generation
    num_slots: int  # with their padding
    max_length: int
    context_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    torch_dtype: str
    k_cache_transposed: bool
    kv_cache_tiling: bool
    apply_seq_ids_mask: bool
    async_mode: bool
    on_device_sampling: bool
    output_logits: bool
    logical_nc_config: int
    model: dict[str, Any]  # the model's part of the configuration


def write_graphs(folder: Path, compiled: Compiled) -> None:
    text = json.dumps({"format": _FORMAT, **asdict(compiled)}, sort_keys=True)
    (folder / COMPILED_MODEL_FILE_NAME).write_text(text)


def read_graphs(folder: Path) -> Compiled:
    """ValueError where torch.jit.load would find no file, RuntimeError for a damaged one."""
    path = folder / COMPILED_MODEL_FILE_NAME
    if not path.is_file():
        raise ValueError(f"The provided filename {path} does not exist")
    try:
        fields = json.loads(path.read_text())
        if fields.pop("format") != _FORMAT:
            raise ValueError("not written by the stand-in")
        for name in ("context_buckets", "token_buckets"):
            fields[name] = tuple(fields[name])
        return Compiled(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"PytorchStreamReader failed reading {path}: {error}") from error


def write_shards(folder: Path, weights: ModelWeights, spec: ModelSpec, num_ranks: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(num_ranks):
        parts = {
            name: tensor.tensor_split(num_ranks)[rank].contiguous()
            for name, tensor in weights.stored_tensors(spec)
        }
        save_file(parts, _shard_path(folder, rank))


def read_shards(folder: Path, spec: ModelSpec, dtype: torch.dtype, num_ranks: int) -> ModelWeights:
    """FileNotFoundError when a rank's file is missing."""
    weights = ModelWeights.allocate(spec, dtype)
    shards = [load_file(_shard_path(folder, rank)) for rank in range(num_ranks)]
    for name, tensor in weights.stored_tensors(spec):
        tensor.copy_(torch.cat([shard[name] for shard in shards]))
    return weights


def read_checkpoint(folder: Path, spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """From a Hugging Face checkpoint: sharding on load."""
    return load_weights(folder, spec, dtype=str(dtype).removeprefix("torch."))


def _shard_path(folder: Path, rank: int) -> Path:
    return folder / f"tp{rank}_sharded_checkpoint.safetensors"
