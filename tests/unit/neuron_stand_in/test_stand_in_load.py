"""Compile, load, warm up: files, configurations, cores, and what fails."""

import ctypes
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_neuronx
from backend_kit import random_prompt
from neuronx_distributed_inference.models.config import NeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from safetensors import safe_open
from stand_in.kv_state import GARBAGE
from stand_in_kit import compile_model, configured, encode, key_name, kv_on_host, nxd_model, step

Make = Callable[..., Any]


def fail_calls(function: str, status: int, times: int) -> None:
    """The simulator that this process has loaded fails the next calls of a function."""
    steering = ctypes.CDLL(os.environ["NEURON_DI_LIBNRT"])
    assert steering.nrt_sim_fault(function.encode(), status, times) == 0


def test_compiling_writes_the_documented_files_and_needs_no_device(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    device(NEURON_DI_LIBNRT=str(tmp_path / "none.so"))
    configured(tiny_folder, tp_degree=2).compile(str(tmp_path / "plain"))
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == [
        "model.pt",
        "neuron_config.json",
    ]
    model = configured(tiny_folder, tp_degree=2, save_sharded_checkpoint=True)
    model.compile(str(tmp_path / "sharded"))
    assert sorted(path.name for path in (tmp_path / "sharded/weights").iterdir()) == [
        "tp0_sharded_checkpoint.safetensors",
        "tp1_sharded_checkpoint.safetensors",
    ]
    saved = json.loads((tmp_path / "sharded/neuron_config.json").read_text())
    assert saved["neuron_config"]["tp_degree"] == 2
    assert saved["neuron_config"]["torch_dtype"] == "float32"
    assert saved["hidden_size"] == 128
    work = [path.parent.name for path in (tmp_path / "work").rglob("neuron_config.json")]
    assert len(work) == 6  # three buckets of each model
    with safe_open(tmp_path / "sharded/weights/tp0_sharded_checkpoint.safetensors", "pt") as file:
        assert file.get_slice("model.norm.weight").get_shape() == [64]


def test_a_sharded_artifact_needs_no_checkpoint(
    tiny_folder: Path, tmp_path: Path, make_model: Make
) -> None:
    copied = tmp_path / "checkpoint"
    copied.mkdir()
    for path in tiny_folder.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    expected = encode(make_model(copied, tp_degree=2), 0, random_prompt(20))
    out = tmp_path / "out"
    model = compile_model(copied, out, tp_degree=2, save_sharded_checkpoint=True)
    for path in copied.iterdir():
        path.unlink()
    model.load(str(out), skip_warmup=True)
    assert torch.equal(encode(model, 0, random_prompt(20)), expected)
    (out / "weights/tp1_sharded_checkpoint.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        type(model)(str(out)).load(str(out))


def test_a_configuration_survives_its_file(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sampling = OnDeviceSamplingConfig(dynamic=True, global_topk=64)
    model = configured(tiny_folder, on_device_sampling_config=sampling, torch_dtype="bfloat16")
    model.config.save(str(tmp_path))
    loaded = type(model).get_config_cls().load(str(tmp_path))
    assert loaded.to_json_string() == model.config.to_json_string()
    assert loaded.neuron_config.torch_dtype == torch.bfloat16
    assert loaded.neuron_config.on_device_sampling_config.global_topk == 64
    assert caplog.text == ""


def test_a_misspelt_argument_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = NeuronConfig(apply_seq_id_mask=True)
    assert "apply_seq_id_mask" in caplog.text
    assert not config.apply_seq_ids_mask


def test_the_dtype_comes_from_the_checkpoint_unless_told(tales_folder: Path) -> None:
    cls = MODEL_TYPES["llama"]["causal-lm"]
    load_config = load_pretrained_config(str(tales_folder))
    for arguments, dtype in (({}, torch.bfloat16), ({"torch_dtype": "float32"}, torch.float32)):
        config = cls.get_config_cls()(NeuronConfig(**arguments), load_config=load_config)
        assert config.neuron_config.torch_dtype == dtype


@pytest.mark.parametrize(
    ("arguments", "buckets"),
    [
        ({"enable_bucketing": False}, ([128], [256])),
        (
            {"context_encoding_buckets": None, "token_generation_buckets": None},
            ([128], [128, 256]),
        ),
        (
            {
                "seq_len": 1000,
                "max_context_length": 600,
                "context_encoding_buckets": None,
                "token_generation_buckets": None,
            },
            ([128, 256, 600], [128, 256, 512, 1000]),
        ),
        (
            {"context_encoding_buckets": [100, 50], "token_generation_buckets": [200]},
            ([50, 100], [200]),
        ),
    ],
)
def test_buckets(
    tiny_folder: Path, arguments: dict[str, Any], buckets: tuple[list[int], list[int]]
) -> None:
    models = configured(tiny_folder, **arguments).models
    assert tuple(model.neuron_config.buckets for model in models) == buckets


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_context_length": 300}, AssertionError),
        ({"context_encoding_buckets": [129]}, AssertionError),
        ({"token_generation_buckets": [257]}, AssertionError),
        ({"torch_dtype": "int8"}, AssertionError),
        ({"ctx_batch_size": 3}, AssertionError),  # continuous batching encodes one sequence
        ({"tp_degree": 3}, ValueError),  # the stand-in has no padding heads
        ({"is_block_kv_layout": True}, NotImplementedError),
        ({"padding_side": "left"}, NotImplementedError),
        ({"is_continuous_batching": False}, NotImplementedError),
        ({"kv_cache_batch_size": 8}, NotImplementedError),
        ({"local_ranks_size": 4, "tp_degree": 2}, NotImplementedError),
        ({"kv_cache_tiling": True, "seq_len": 200}, NotImplementedError),
    ],
    ids=str,
)
def test_what_cannot_be_compiled(
    tiny_folder: Path, tmp_path: Path, arguments: dict[str, Any], error: type[Exception]
) -> None:
    sizes = {"token_generation_buckets": [200]} if arguments.get("seq_len") == 200 else {}
    with pytest.raises(error):
        configured(tiny_folder, **sizes, **arguments).compile(str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp_degree": 4, "world_size": 4, "local_ranks_size": 4}, "tp_degree is 2, not 4"),
        ({"max_length": 192, "token_generation_buckets": [64]}, "max_length is 256, not 192"),
        ({"apply_seq_ids_mask": False}, "apply_seq_ids_mask is True, not False"),
        ({"logical_nc_config": 2}, "logical_nc_config is 1, not 2"),
    ],
    ids=str,
)
def test_a_graph_compiled_for_something_else_is_refused(
    tiny_folder: Path, tmp_path: Path, device: Make, change: dict[str, Any], said: str
) -> None:
    out = tmp_path / "out"
    compile_model(tiny_folder, out, tp_degree=2)
    saved = json.loads((out / "neuron_config.json").read_text())
    saved["neuron_config"].update(change)
    (out / "neuron_config.json").write_text(json.dumps(saved))
    cls = MODEL_TYPES["qwen2"]["causal-lm"]
    with pytest.raises(RuntimeError, match=said):
        cls(str(out)).load(str(out))


def test_the_environments_core_size_wins_over_the_configurations(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    model = compile_model(tiny_folder, tmp_path / "out")
    device(NEURON_LOGICAL_NC_CONFIG="2")
    with pytest.raises(RuntimeError, match="logical_nc_config is 1, not 2"):
        type(model)(str(tmp_path / "out")).load(str(tmp_path / "out"))


def test_an_artifact_that_is_not_there_or_damaged(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    out = tmp_path / "out"
    model = compile_model(tiny_folder, out)
    with pytest.raises(FileNotFoundError):
        type(model)(str(tmp_path / "nothing"))
    (out / "model.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(RuntimeError, match="PytorchStreamReader"):
        model.load(str(out))
    (out / "model.pt").unlink()
    with pytest.raises(ValueError, match="does not exist"):
        model.load(str(out))
    with pytest.raises(RuntimeError, match="forward before load"):
        step(model, {0: (7, 5)})


@pytest.mark.parametrize("variable", ["NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES"])
def test_a_model_of_more_ranks_than_cores_is_refused(
    tiny_folder: Path,
    tmp_path: Path,
    device: Make,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    model = compile_model(tiny_folder, tmp_path / "out", tp_degree=2)
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    device(None, **{variable: "1"})
    with pytest.raises(RuntimeError, match="NRT_LOAD_NOT_ENOUGH_NC"):
        model.load(str(tmp_path / "out"))
    assert not model.is_loaded_to_neuron


def test_cores_are_numbered_from_0_wherever_they_are(
    tiny_folder: Path, tmp_path: Path, device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_RT_NUM_CORES")
    device(None, NEURON_RT_VISIBLE_CORES="6-7")
    model = compile_model(tiny_folder, tmp_path / "out", tp_degree=2)
    model.load(str(tmp_path / "out"), skip_warmup=True)
    places = [state[key_name(0)].device.index for state in nxd_model(model).state]
    assert places == [0, 1]


def test_too_little_memory_is_a_runtime_error(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    device(NRT_SIM_HBM_BYTES=str(1 << 20))
    model = compile_model(tiny_folder, tmp_path / "out")
    with pytest.raises(RuntimeError, match=r"nrt_tensor_allocate status=4 \(NRT_RESOURCE\)"):
        model.load(str(tmp_path / "out"))


def test_a_runtime_that_does_not_start_is_a_runtime_error(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    device(4096)  # more cores than the instance has
    model = compile_model(tiny_folder, tmp_path / "out")
    with pytest.raises(RuntimeError, match="could not be initialised"):
        model.load(str(tmp_path / "out"))


def test_a_warm_up_runs_every_graph_and_leaves_garbage(
    tiny_folder: Path, tmp_path: Path, device: Make
) -> None:
    model = compile_model(tiny_folder, tmp_path / "out")
    model.load(str(tmp_path / "out"))
    runs = dict.fromkeys([("context", bucket) for bucket in (32, 64, 128)], 1)
    runs |= dict.fromkeys([("token", bucket) for bucket in (64, 128, 256)], 1)
    assert nxd_model(model).num_runs == runs
    for tensor in kv_on_host(model).values():
        assert (tensor[0, :, :128] == GARBAGE).all()
        assert (tensor[1:, :, 1] == GARBAGE).all()
        assert (tensor[1:, :, 2:] == 0).all()
    # What is written before it is read is right all the same.
    model_of_its_own = compile_model(tiny_folder, tmp_path / "other")
    model_of_its_own.load(str(tmp_path / "other"), skip_warmup=True)
    prompt = random_prompt(20)
    assert torch.equal(encode(model, 0, prompt), encode(model_of_its_own, 0, prompt))
    rows = {0: (5, 20)}
    assert torch.equal(step(model, rows), step(model_of_its_own, rows))


@pytest.mark.parametrize("skips", ["argument", "configuration"])
def test_a_warm_up_can_be_skipped(
    tiny_folder: Path, tmp_path: Path, device: Make, skips: str
) -> None:
    model = compile_model(tiny_folder, tmp_path / "out", skip_warmup=skips == "configuration")
    model.load(str(tmp_path / "out"), skip_warmup=skips == "argument")
    assert not nxd_model(model).num_runs


def test_errors_of_a_warm_up_are_logged_and_ignored(
    tiny_folder: Path,
    tmp_path: Path,
    make_model: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_model(tiny_folder)
    fail_calls("nrt_tensor_write_batch", 1004, 2)
    model = compile_model(tiny_folder, tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        model.load(str(tmp_path / "out"))
    ignored = [record.getMessage() for record in caplog.records]
    assert len(ignored) == 2
    assert "status=1004" in ignored[0]
    encode(model, 0, random_prompt(20))


def test_a_failing_device_is_a_runtime_error_of_forward(
    tiny_folder: Path, make_model: Make
) -> None:
    model = make_model(tiny_folder)
    encode(model, 0, random_prompt(20))
    fail_calls("nrt_tensor_read_batch", 1203, 1)
    with pytest.raises(RuntimeError, match=r"status=1203 \(NRT_EXEC_HW_ERR_DMA_ABORT\)"):
        step(model, {0: (5, 20)})


def test_the_platform_is_the_instances_family(
    device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    device(NRT_SIM_INSTANCE="inf2.48xlarge")
    assert torch_neuronx.utils.get_platform_target() == "inf2"
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")
    assert torch_neuronx.utils.get_platform_target() == "trn2"
