from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from neuron_di.models import ModelSpec, ModelWeights, load_weights
from neuron_di.testing import write_random_checkpoint


def test_every_weight_is_stored_once(family_folder: Path) -> None:
    spec = ModelSpec.from_folder(family_folder)
    weights = ModelWeights.allocate(spec, torch.float32)
    named = list(weights.stored_tensors(spec))
    assert len({name for name, _ in named}) == len(named)
    assert sum(tensor.numel() for _, tensor in named) == spec.num_parameters()
    assert set(dict(named)) == set(load_file(family_folder / "model.safetensors"))


def test_fused_projections_keep_their_order(family_folder: Path) -> None:
    spec = ModelSpec.from_folder(family_folder)
    stored = load_file(family_folder / "model.safetensors")
    layer = load_weights(family_folder, spec, dtype="float32").layers[1]
    prefix = "model.layers.1"
    parts = [stored[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(layer.qkv, torch.cat(parts))
    parts = [stored[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(parts))
    for matrix in (layer.qkv, layer.gate_up, layer.out, layer.down):
        assert matrix.is_contiguous()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_share_memory(tmp_path: Path, tied: bool) -> None:
    write_random_checkpoint(tmp_path, "llama", tied=tied)
    spec = ModelSpec.from_folder(tmp_path)
    weights = load_weights(tmp_path, spec, dtype="float32")
    assert spec.has_tied_embeddings is tied
    assert (weights.lm_head is weights.embedding) is tied
