"""Random checkpoints in the shapes of real models, written where the check runs.

Values are drawn on the GPU where there is one: a processor takes minutes for eight billion.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.device_check.record import Skip
from neuron_di.models import ModelSpec, ModelWeights
from neuron_di.testing import write_random_checkpoint

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
}
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# As the config.json of Llama 3.2 1B and of Llama 3.1 8B. toy: for rehearsals.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_scaling": {**_ROPE, "factor": 32.0},
    },
    "8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_scaling": {**_ROPE, "factor": 8.0},
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
}
_LOGIT_STD, _QUERY_SCALE, _TIED_EMBEDDING_STD = 3.0, 3.0, 0.05  # as in neuron_di.testing
_SPARE_BYTES = 2 << 30
_SHARD_NAME = "model-{:05}-of-{:05}.safetensors"


def checkpoint(shape: str, folder: Path) -> Path:
    """The model of this shape in `folder`, written there if it is not. Skip where it cannot be."""
    path = folder / shape
    if not path.exists():
        new = folder / f".{shape}.{os.getpid()}"
        try:
            _write(shape, new)
            os.replace(new, path)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return path


def _write(shape: str, folder: Path) -> None:
    is_toy = shape == "toy"
    config = SHAPES["toy"] if is_toy else None
    write_random_checkpoint(folder, "llama", dtype="bfloat16", config=config)
    if is_toy:
        return
    # Of the small one the tokenizer stays, and what is said of it.
    (folder / "model.safetensors").unlink()
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8")) | SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    _name_all_tokens(folder / "tokenizer.json", fields["vocab_size"])
    spec = ModelSpec.from_folder(folder)
    wanted, free = spec.weight_bytes("bfloat16") + _SPARE_BYTES, shutil.disk_usage(folder).free
    if free < wanted:
        raise Skip(f"{shape} takes {wanted >> 30} GiB of disk, and {free >> 30} are free")
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    parts = list(_parts(spec))
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = _SHARD_NAME.format(number, len(parts))
        tensors = {key: _draw(key, shape_of, spec, generator) for key, shape_of in part.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": spec.weight_bytes("bfloat16")}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _name_all_tokens(path: Path, num_vocab: int) -> None:
    """Give every id a text, also those that no text is cut into: a client sees what it gets."""
    size = Tokenizer.from_file(str(path)).get_vocab_size()
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["model"]["vocab"] |= {f"t{number}": number for number in range(size, num_vocab)}
    path.write_text(json.dumps(fields), encoding="utf-8")


def _parts(spec: ModelSpec) -> Iterator[dict[str, torch.Size]]:
    """Shapes by name: one part for each layer, and one for the rest."""
    with torch.device("meta"):
        weights = ModelWeights.allocate(spec, torch.bfloat16)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in weights.stored_tensors(spec):
        words = name.split(".")
        parts.setdefault(words[2] if words[1] == "layers" else "", {})[name] = tensor.shape
    yield from parts.values()


def _draw(name: str, shape: torch.Size, spec: ModelSpec, generator: torch.Generator) -> Tensor:
    """So that activations keep their size, and logits have that of a trained model."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    tied = spec.has_tied_embeddings
    embedding_std = _TIED_EMBEDDING_STD if tied else 1.0
    if name == "model.embed_tokens.weight":
        drawn *= embedding_std
    elif len(shape) == 1:
        drawn = 1.0 + 0.1 * drawn
    else:
        drawn *= shape[1] ** -0.5
    if name == "model.norm.weight":
        head_std = embedding_std if tied else spec.hidden**-0.5
        drawn *= _LOGIT_STD / (head_std * math.sqrt(spec.hidden))
    elif name.endswith("q_proj.weight"):
        drawn *= _QUERY_SCALE
    return drawn.to(torch.bfloat16).cpu()
