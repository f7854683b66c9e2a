"""What a GPU is asked before a model is loaded onto it, and what is refused.

A GPU that is too old, and PyTorch that finds none, are played by replacing what PyTorch says of
them.
"""

import pytest

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib import import_module

import torch
from contract.fake_cuda import Steering
from cuda_backend_kit import BLOCK_SIZE, IS_GPU, engine_options

from neuron_di.backends import plan_device
from neuron_di.backends.cuda_plan import CudaPlan
from neuron_di.config import CudaOptions
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec
from neuron_di.worker import load_model
from neuron_di.worker.model import renewed, why_impossible
from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

GIB = 1 << 30

needs_simulator = pytest.mark.skipif(IS_GPU, reason="it plays a machine without what this one has")


def planned(folder, *, cuda=None, **changes) -> CudaPlan:
    plan = plan_device(engine_options(cuda=cuda, **changes), ModelSpec.from_folder(folder), folder)
    assert isinstance(plan, CudaPlan)
    return plan


def refusal(folder, *, cuda=None, **changes) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        planned(folder, cuda=cuda, **changes)
    return refused.value


def test_what_follows_from_the_options(llama_folder):
    plan = planned(llama_folder, dtype="auto", chunk_tokens=48)
    assert (plan.dtype, plan.block_size, plan.num_ranks) == ("bfloat16", BLOCK_SIZE, 1)
    assert (plan.chunk_tokens, plan.workspace_tokens, plan.num_slots) == (48, 0, None)
    assert planned(llama_folder, chunk_tokens=None).chunk_tokens == 2048
    assert (plan.has_graphs, plan.is_invariant, plan.num_sharing) == (True, False, 1)
    other = planned(
        llama_folder,
        dtype="float16",
        cuda=CudaOptions(cuda_graphs=False, batch_invariant=True, cuda_share=3),
    )
    assert (other.dtype, other.has_graphs, other.is_invariant) == ("float16", False, True)
    assert other.num_sharing == 3


@needs_simulator
def test_the_first_of_the_named_gpus_is_taken(llama_folder):
    steering = Steering.of()
    steering.devices(4)
    try:
        assert planned(llama_folder).device.index == 0
        named = CudaOptions(cuda_devices=("3", "1"))
        assert planned(llama_folder, cuda=named).device.index == 3
    finally:
        steering.devices(1)


def test_ranks_are_refused(llama_folder):
    refused = refusal(llama_folder, tp=2)
    assert refused.param == "tp"
    assert "one GPU" in refused.message


@pytest.mark.parametrize("wanted", ["99", "x", "-1", "", "²"])
def test_what_is_no_gpu_of_this_process_is_refused(llama_folder, wanted):
    refused = refusal(llama_folder, cuda=CudaOptions(cuda_devices=(wanted,)))
    assert refused.param == "cuda_devices"


def test_a_head_that_no_kernel_does_is_refused(llama_folder):
    spec = replace(ModelSpec.from_folder(llama_folder), head_dim=512)
    with pytest.raises(ConfigError, match=r"heads have 512 dims.* at most 256"):
        plan_device(engine_options(), spec, llama_folder)


def test_a_machine_without_the_runtime_library(llama_folder, monkeypatch):
    monkeypatch.setenv(PATH_VARIABLE, "/nowhere/libcudart.so")
    assert "pip install '.[cuda]'" in refusal(llama_folder).message


@needs_simulator
def test_a_machine_without_a_gpu(llama_folder):
    steering = Steering.of()
    steering.devices(0)
    try:
        assert "there is no GPU 0 among the 0" in refusal(llama_folder).message
    finally:
        steering.devices(1)


@pytest.fixture
def compiled(monkeypatch):
    """As if kernels were compiled for a GPU, which PyTorch then has to find."""
    monkeypatch.setattr("neuron_di.backends.cuda_device._is_interpreted", lambda: False)


@needs_simulator
def test_pytorch_without_cuda(llama_folder, compiled, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "needs PyTorch built for CUDA" in refusal(llama_folder).message


@needs_simulator
def test_pytorch_that_finds_no_gpu(llama_folder, compiled, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    message = refusal(llama_folder).message
    assert "finds no NVIDIA GPU" in message
    assert "CUDA 12.8" in message


@needs_simulator
def test_a_gpu_that_is_too_old(llama_folder, compiled, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    message = refusal(llama_folder).message
    assert r"GPU 0 (Tesla T4) has compute capability 7.5" in message
    assert "needs 8.0" in message


@needs_simulator
def test_what_triton_builds_its_launchers_with(llama_folder, compiled, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "a C compiler" in refusal(llama_folder).message
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert "Python's headers" in refusal(llama_folder).message


def test_a_machine_without_triton(llama_folder):
    script = f"""
import sys
import sysconfig
sys.modules["triton"] = None  # importing it fails
from pathlib import Path
from neuron_di.backends import plan_device
from neuron_di.config import EngineOptions
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec
folder = Path({str(llama_folder)!r})
try:
    plan_device(EngineOptions(device="cuda"), ModelSpec.from_folder(folder), folder)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=dict(os.environ),
    )
    assert "--device cuda needs Triton" in done.stdout
    assert "pip install '.[cuda]'" in done.stdout


# Memory.


def test_a_pool_takes_nine_tenths_of_what_weights_and_workspace_leave(llama_folder):
    plan, spec = planned(llama_folder, dtype="bfloat16"), ModelSpec.from_folder(llama_folder)
    fixed = spec.weight_bytes("bfloat16") + plan.workspace_bytes
    assert plan.pool_bytes(spec, fixed + 10 * GIB) == 9 * GIB
    assert plan.pool_bytes(spec, fixed - 1) == 0


def test_the_workspace_has_room_for_a_chunk_and_for_the_logits_of_a_batch(llama_folder):
    spec = ModelSpec.from_folder(llama_folder)
    small = planned(llama_folder, dtype="bfloat16", chunk_tokens=64, decode_batch=1)
    long = planned(llama_folder, dtype="bfloat16", chunk_tokens=164, decode_batch=1)
    wide = planned(llama_folder, dtype="bfloat16", chunk_tokens=64, decode_batch=51)
    # What is alive at once: two hidden rows, the queries' product, both halves of the MLP's.
    row = 2 * spec.hidden + spec.num_qkv + 2 * spec.intermediate
    assert long.workspace_bytes - small.workspace_bytes >= 100 * row * 2
    # A row of logits in its graph's buffer, and the candidates of its draw.
    assert wide.workspace_bytes - small.workspace_bytes >= 50 * spec.num_vocab * (4 + 8)


def test_the_plan_says_what_the_gpu_must_have(llama_folder):
    plan, spec = planned(llama_folder, dtype="float16"), ModelSpec.from_folder(llama_folder)
    layout = spec.kv_layout(block_size=BLOCK_SIZE, dtype="float16")
    memory = plan.memory_plan(spec, layout, 7)
    assert memory.weights_bytes == spec.weight_bytes("float16")
    assert memory.pool_bytes == 7 * layout.block_bytes
    assert memory.workspace_bytes == plan.workspace_bytes
    assert memory.num_blocks == 7


@pytest.fixture
def free_bytes(monkeypatch):
    """A GPU with 4 GiB free, on a host that has nothing to spare."""
    monkeypatch.setattr(
        "neuron_di.backends.cuda_device.CudaDevice.free_bytes", lambda self: 4 * GIB
    )
    host = import_module("neuron_di.backends.open_backend")  # the package has a function so named
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 0)
    return 4 * GIB


def test_workers_divide_the_gpus_memory_not_the_hosts(llama_folder, free_bytes):
    options = engine_options(num_blocks=None, cuda=CudaOptions(cuda_share=2))
    model = load_model(str(llama_folder), None, "decode", options, num_siblings=7)
    try:
        assert model.pool_plan.available_bytes == free_bytes // 2
        # A batch of full contexts fits, and more is of no use.
        layout = model.backend.layout
        num_blocks = options.decode_batch * layout.num_blocks_for(model.context_tokens)
        assert model.backend.pool.num_blocks == num_blocks
    finally:
        model.backend.close()


def test_too_many_blocks_are_refused_before_anything_is_loaded(
    llama_folder, free_bytes, monkeypatch
):
    def never(*_args: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("neuron_di.worker.model.open_backend", never)
    with pytest.raises(ConfigError, match=r"not enough memory: .* at most \d+ blocks fit"):
        load_model(str(llama_folder), None, "decode", engine_options(num_blocks=1 << 30))
    with pytest.raises(ConfigError, match=r"but 4\.00 GiB are available"):
        load_model(
            str(llama_folder), None, "decode", engine_options(num_blocks=None, kv_memory=5 * GIB)
        )


def test_a_change_of_role_counts_the_gpus_memory(llama_folder, free_bytes, monkeypatch):
    options = engine_options(num_blocks=None, prefill_batch=1, decode_batch=3)
    model = load_model(str(llama_folder), None, "prefill", options)
    try:
        assert why_impossible(model, "decode") == ""
        before = model.backend.pool
        changed = renewed(model, "decode")
        assert changed.backend.pool.num_blocks == 3 * before.num_blocks
        assert changed.backend.pool.incarnation == changed.incarnation != model.incarnation
        monkeypatch.setattr(
            "neuron_di.backends.cuda_device.CudaDevice.free_bytes", lambda self: -(1 << 40)
        )
        assert "takes" in why_impossible(changed, "prefill")
    finally:
        model.backend.close()
