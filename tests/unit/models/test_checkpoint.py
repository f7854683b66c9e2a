import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from neuron_di.errors import CheckpointError
from neuron_di.models import (
    ModelSpec,
    checkpoint_digest,
    load_weights,
    resolve_checkpoint,
)
from neuron_di.request import Tokenizer
from neuron_di.testing import write_random_checkpoint

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.layers.1.input_layernorm.weight"


def load(folder: Path) -> None:
    load_weights(folder, ModelSpec.from_folder(folder), dtype="float32")


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sharded_equals_single_and_reports_progress(tmp_path: Path, llama_folder: Path) -> None:
    write_random_checkpoint(tmp_path / "sharded", "llama", num_shards=3)
    assert not (tmp_path / "sharded/model.safetensors").exists()
    spec = ModelSpec.from_folder(llama_folder)
    single = load_weights(llama_folder, spec, dtype="float32")
    calls: list[tuple[int, int]] = []
    sharded = load_weights(
        tmp_path / "sharded",
        spec,
        dtype="float32",
        on_progress=lambda done, total: calls.append((done, total)),
    )
    for (name, one), (_, other) in zip(
        single.stored_tensors(spec), sharded.stored_tensors(spec), strict=True
    ):
        assert torch.equal(one, other), name
    assert calls == sorted(calls)
    assert calls[-1] == (spec.weight_bytes("float32"), spec.weight_bytes("float32"))


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_dtype_is_converted(tmp_path: Path, stored: str) -> None:
    write_random_checkpoint(tmp_path, "qwen3", dtype=stored)
    spec = ModelSpec.from_folder(tmp_path)
    assert spec.dtype == stored
    weights = load_weights(tmp_path, spec, dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.stored_tensors(spec):
        assert tensors[name].dtype == getattr(torch, stored)
        assert torch.equal(tensor, tensors[name].float()), name


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_head_that_is_not_the_embedding_it_is_said_to_be(tmp_path: Path, num_shards: int) -> None:
    write_random_checkpoint(tmp_path, "qwen2", tied=True, num_shards=num_shards)
    path = next(path for path in tmp_path.glob("*.safetensors") if EMBEDDING in load_file(path))
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors[EMBEDDING].clone()}, path)
    load(tmp_path)
    other = tensors[EMBEDDING].clone()
    other[-1, -1] += 1
    for head in (other, other[:-1].contiguous()):
        save_file(tensors | {"lm_head.weight": head}, path)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is stored and is not model"):
            load(tmp_path)


def test_missing_tensor_is_named(llama_folder: Path) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.__delitem__(NORM))
    with pytest.raises(CheckpointError, match=rf"lack tensor {NORM} \[128\]"):
        load(llama_folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.3.input_layernorm.weight",
        "lm_head.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ],
)
def test_a_part_that_would_be_left_out_is_named(llama_folder: Path, name: str) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.update({name: torch.ones(128)}))
    with pytest.raises(CheckpointError, match=rf"{name} is stored, but config\.json implies none"):
        load(llama_folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.down_proj.g_idx",  # GPTQ's, and AWQ's but for this one
        "model.layers.0.mlp.down_proj.qzeros",
        "model.layers.0.mlp.down_proj.weight_scale",  # FP8's
        "model.layers.0.mlp.down_proj.weight_scale_inv",
        "model.layers.0.mlp.down_proj.input_scale",
        "model.layers.0.self_attn.k_proj.k_scale",
        "model.layers.0.mlp.down_proj.weight.absmax",  # bitsandbytes'
        "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4",
        "model.layers.0.mlp.down_proj.weight_packed",  # compressed-tensors'
        "lm_head.qweight",
    ],
)
def test_a_quantized_model_is_told_as_one(llama_folder: Path, name: str) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    with pytest.raises(CheckpointError, match=rf"{name} is of a quantized model.*bfloat16"):
        load(llama_folder)


def test_an_adapter_is_told_as_one(llama_folder: Path, tmp_path: Path) -> None:
    (llama_folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shutil.copy(llama_folder / "adapter_config.json", adapter)
    for folder in (llama_folder, adapter):  # beside a model, and alone
        with pytest.raises(CheckpointError, match=r"adapter_config\.json: adapters.*merge_and"):
            resolve_checkpoint(str(folder))


def test_another_form_of_weights_is_told_what_is_read(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").rename(llama_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\.bin.*are not read.*save_pretrained"):
        load(llama_folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.summary.weight"]
)
def test_what_changes_no_token_may_be_stored(llama_folder: Path, name: str) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.update({name: torch.ones(16)}))
    load(llama_folder)


def test_wrong_shape_is_named(llama_folder: Path) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.update({NORM: torch.ones(64)}))
    with pytest.raises(CheckpointError, match=rf"{NORM} has shape \[64\].*\[128\]"):
        load(llama_folder)


def test_wrong_dtype_is_named(llama_folder: Path) -> None:
    edit_tensors(llama_folder, lambda tensors: tensors.update({NORM: torch.ones(128).char()}))
    with pytest.raises(CheckpointError, match=rf"{NORM} is stored as I8"):
        load(llama_folder)


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_what_float16_cannot_hold_is_named(tmp_path: Path, stored: str) -> None:
    write_random_checkpoint(tmp_path, "llama", dtype=stored)
    spec = ModelSpec.from_folder(tmp_path)
    load_weights(tmp_path, spec, dtype="float16")
    edit_tensors(tmp_path, lambda tensors: tensors[NORM].__setitem__(3, 70_000.0))
    with pytest.raises(CheckpointError, match=rf"{NORM} has values beyond float16's range"):
        load_weights(tmp_path, spec, dtype="float16")
    load_weights(tmp_path, spec, dtype="bfloat16")


@pytest.mark.parametrize("keep", [0, 4, 100, -1000])
def test_truncated_weights_are_named(llama_folder: Path, keep: int) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(llama_folder)


def test_damaged_header_is_named(llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[0:8] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(llama_folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_told_as_one(llama_folder: Path, name: str) -> None:
    (llama_folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    read = Tokenizer.load if name == "tokenizer.json" else load
    with pytest.raises(CheckpointError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
        read(llama_folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(llama_folder: Path, name: str) -> None:
    (llama_folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(llama_folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2", num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        load(tmp_path)


def test_weights_that_are_there_twice_are_refused(tmp_path: Path, llama_folder: Path) -> None:
    write_random_checkpoint(tmp_path / "sharded", "llama", num_shards=2, seed=1)
    for file in (tmp_path / "sharded").glob("model*"):
        shutil.copy(file, llama_folder)
    with pytest.raises(CheckpointError, match=r"has model\.safetensors, and .*: remove the one"):
        load(llama_folder)
    (llama_folder / "model-00002-of-00002.safetensors").unlink()  # what is left are no weights
    load(llama_folder)


def test_a_tensor_that_two_shards_hold_is_named(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2", num_shards=2)
    paths = [tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for path in paths:
        save_file({**load_file(path), NORM: torch.ones(128)}, path)
    with pytest.raises(CheckpointError, match=rf"00002-of-00002.safetensors: tensor {NORM} is"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", 7])
def test_index_cannot_point_outside_the_folder(tmp_path: Path, name: object) -> None:
    write_random_checkpoint(tmp_path, "qwen2", num_shards=2)
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is not a file name in this folder"):
        load(tmp_path)


def test_digest_tells_checkpoints_apart(tmp_path: Path, llama_folder: Path) -> None:
    digest = checkpoint_digest(llama_folder)
    shutil.copytree(llama_folder, tmp_path / "copy")
    assert checkpoint_digest(tmp_path / "copy") == digest
    write_random_checkpoint(tmp_path / "other", "llama", seed=1)
    assert checkpoint_digest(tmp_path / "other") != digest
    config = tmp_path / "copy/config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert checkpoint_digest(tmp_path / "copy") != digest


def test_resolve_takes_a_folder(llama_folder: Path) -> None:
    assert resolve_checkpoint(str(llama_folder)) == llama_folder


@pytest.mark.parametrize("model", ["/no/such/folder", "./models/x", "a/b/c"])
def test_resolve_names_a_missing_folder(model: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_checkpoint(model)


def test_resolve_says_when_the_hub_cannot_deliver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="nobody/nothing is neither a folder"):
        resolve_checkpoint("nobody/nothing")
