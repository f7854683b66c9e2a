"""What a worker's options become on NeuronCores, and what is refused before anything is loaded."""

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest
from neuron_backend_kit import (
    CONTEXT_TOKENS,
    SLOTS,
    compiled,
    engine_options,
    manifest_for,
    planned,
    simulated,
)

from neuron_di import neuron_cores
from neuron_di.backends import DevicePlan, neuron_packages, plan_device
from neuron_di.backends.neuron_plan import NeuronPlan, compile_command
from neuron_di.config import (
    CompileOptions,
    EngineOptions,
    FlagParser,
    NeuronOptions,
    add_flags,
    load_options,
)
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec
from neuron_di.testing import write_random_checkpoint


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(tmp_path / "root", monkeypatch)


def refusal(folder: Path, options: EngineOptions) -> str:
    with pytest.raises(ConfigError) as refused:
        planned(folder, options)
    return refused.value.message


def test_a_block_is_a_slot_and_a_prompt_one_chunk(llama_folder: Path, tmp_path: Path) -> None:
    options = engine_options(tmp_path, tp=2, block_size=16, chunk_tokens=32, prefill_batch=2)
    made = compiled(llama_folder, options)
    plan = plan_device(options, ModelSpec.from_folder(llama_folder), llama_folder)
    assert isinstance(plan, NeuronPlan)
    assert (plan.block_size, plan.chunk_tokens) == (CONTEXT_TOKENS, CONTEXT_TOKENS)
    assert (plan.num_slots, plan.num_ranks) == (SLOTS, 1)
    assert (plan.artifact, plan.cores) == (made.folder, range(2))
    assert plan.dtype == "float32"


def test_on_a_cpu_everything_is_as_the_options_say(llama_folder: Path) -> None:
    options = EngineOptions(block_size=4, chunk_tokens=16, tp=2)
    assert plan_device(options, ModelSpec.from_folder(llama_folder), llama_folder) == DevicePlan(
        dtype="float32", block_size=4, num_ranks=2, chunk_tokens=16, workspace_tokens=16
    )


def test_defaults_are_bfloat16_and_the_models_context(llama_folder: Path, tmp_path: Path) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    options = engine_options(tmp_path, dtype="auto", context_tokens=None)
    settings = manifest_for(llama_folder, options).settings
    assert settings.dtype == "bfloat16"
    assert settings.context_tokens == spec.context_tokens
    longer = engine_options(tmp_path, context_tokens=spec.context_tokens + 1)
    with pytest.raises(ConfigError, match="more than the model's"):
        manifest_for(llama_folder, longer)


@pytest.mark.parametrize(
    ("context_tokens", "buckets"),
    [(2, (2,)), (128, (128,)), (129, (128, 129)), (600, (128, 256, 512, 600))],
)
def test_prompts_are_padded_to_doubles(
    llama_folder: Path, tmp_path: Path, context_tokens: int, buckets: tuple[int, ...]
) -> None:
    options = engine_options(tmp_path, context_tokens=context_tokens)
    settings = manifest_for(llama_folder, options).settings
    assert settings.prefill_buckets == buckets
    assert settings.decode_buckets == (context_tokens,)


def test_the_last_bucket_is_the_context(llama_folder: Path, tmp_path: Path) -> None:
    options = engine_options(tmp_path, neuron_decode_buckets=("32", "100"))
    assert manifest_for(llama_folder, options).settings.decode_buckets == (32, 100, 256)
    options = engine_options(tmp_path, neuron_decode_buckets=("32", "256"))
    assert manifest_for(llama_folder, options).settings.decode_buckets == (32, 256)
    with pytest.raises(ConfigError, match="goes up to 300, and the context has 256"):
        manifest_for(llama_folder, engine_options(tmp_path, neuron_decode_buckets=("300",)))


@pytest.mark.parametrize(
    "buckets", [("0",), ("2", "2"), ("3", "2"), ("x",), ("-1",), ("1e3",), ("9" * 20,), ("²",)]
)
def test_buckets_that_are_no_lengths(buckets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--neuron-decode-buckets is a list of"):
        NeuronOptions(neuron_decode_buckets=buckets)


def test_logical_cores_are_in_the_key(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = engine_options(tmp_path)
    before = manifest_for(llama_folder, options)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert manifest_for(llama_folder, options).key != before.key
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "two")
    with pytest.raises(ConfigError, match="NEURON_LOGICAL_NC_CONFIG=two is no number"):
        manifest_for(llama_folder, options)


# What is refused.


def test_without_an_artifact_the_command_is_told(llama_folder: Path, tmp_path: Path) -> None:
    words = refusal(llama_folder, engine_options(tmp_path, tp=2))
    assert words == (
        f"{tmp_path} has no compiled model of this checkpoint. Mend: compile it: neuron-di compile "
        f"{llama_folder} --tp 2 --decode-batch 4 --context-tokens 256 --dtype float32 "
        f"--neuron-artifacts {tmp_path}"
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4, "decode_batch": 7, "context_tokens": 300, "dtype": "float16"},
        {"neuron_k_transposed": True, "neuron_decode_buckets": ("64", "128")},
        {"dtype": "auto", "context_tokens": None},
    ],
)
def test_the_command_makes_what_is_missing(
    llama_folder: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    options = engine_options(tmp_path / "with space", **fields)
    words = shlex.split(compile_command(options, llama_folder))
    assert words[:2] == ["neuron-di", "compile"]
    parser = FlagParser(prog="test")
    add_flags(parser, CompileOptions)
    parsed = load_options(CompileOptions, parser.parse_args(words[2:]), {})
    assert manifest_for(Path(parsed.model), parsed.engine()) == manifest_for(llama_folder, options)
    assert parsed.neuron.neuron_artifacts == options.neuron.neuron_artifacts


def test_one_for_another_layout_is_told(llama_folder: Path, tmp_path: Path) -> None:
    compiled(llama_folder, engine_options(tmp_path, tp=4, decode_batch=8))
    words = refusal(llama_folder, engine_options(tmp_path, tp=2))
    assert (
        "has this model compiled for something else: tp is 4, and 2 is wanted; slots is 8" in words
    )


@pytest.mark.parametrize(("name", "value"), [("num_blocks", 10), ("kv_memory", 1 << 30)])
def test_the_number_of_slots_is_compiled(
    llama_folder: Path, tmp_path: Path, name: str, value: int
) -> None:
    words = refusal(llama_folder, engine_options(tmp_path, **{name: value}))
    assert f"--{name.replace('_', '-')} is not for --device neuron" in words


def test_a_short_window_is_refused(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "m", "mistral", config={"sliding_window": 64})
    words = refusal(tmp_path / "m", engine_options(tmp_path))
    assert "sees 64 positions" in words
    assert "--context-tokens 64 or less" in words


@pytest.mark.parametrize(
    ("runner", "lacks"),
    [
        ("transformers-neuronx", "the package transformers-neuronx is not installed"),
        ("torch-neuronx", "nobody has written this project's models as such"),
    ],
)
def test_other_runners_say_what_they_lack_and_what_works(
    llama_folder: Path, tmp_path: Path, runner: str, lacks: str
) -> None:
    words = refusal(llama_folder, engine_options(tmp_path, neuron_runner=runner))
    assert words.startswith(f"--neuron-runner {runner} does not run models here: ")
    assert lacks in words
    assert words.endswith("Use --neuron-runner nxdi, NxD Inference")


@pytest.mark.parametrize("installed", [[], ["torch_neuronx"]])
def test_without_the_packages_their_index_is_named(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: list[str]
) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        is_hidden = "neuronx" in name and name not in installed
        return None if is_hidden else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    words = refusal(llama_folder, engine_options(tmp_path))
    missing = ["neuronx_distributed_inference", "torch_neuronx"]
    needed = " and ".join(name for name in missing if name not in installed)
    assert words.startswith(f"--device neuron needs {needed}: pip install ")
    assert "--extra-index-url https://pip.repos.neuron.amazonaws.com" in words
    assert "empty placeholders" in words


def test_a_placeholder_of_the_package_is_not_taken_for_it(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placeholder = tmp_path / "site" / "neuronx_distributed_inference"
    placeholder.mkdir(parents=True)
    (placeholder / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location(
        placeholder.name, placeholder / "__init__.py", submodule_search_locations=[str(placeholder)]
    )
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: spec if name == placeholder.name else find_spec(name, package),
    )
    assert "needs neuronx_distributed_inference: " in refusal(
        llama_folder, engine_options(tmp_path)
    )


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("0.6.10598+x", False), ("0.4", False), ("0.7.14366", True), ("0.10.1", True), ("?", True)],
)
def test_an_nxd_inference_without_room_behind_its_slots_is_refused(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    is_taken: bool,
) -> None:
    monkeypatch.setattr(neuron_packages, "_version", lambda _: version)
    options = engine_options(tmp_path)
    if is_taken:
        manifest_for(llama_folder, options)
        return
    with pytest.raises(ConfigError, match=r"install neuronx-distributed-inference 0\.7 or newer"):
        manifest_for(llama_folder, options)


@pytest.mark.parametrize(
    ("instance", "tp", "is_taken"),
    [
        ("trn1.32xlarge", 4, False),
        ("trn1n.32xlarge", 24, False),
        ("trn1.32xlarge", 8, True),
        ("inf2.48xlarge", 4, True),
        (None, 4, True),
    ],
)
def test_cores_that_trn1_does_not_join_are_refused_before_compiling(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    instance: str | None,
    tp: int,
    is_taken: bool,
) -> None:
    product = tmp_path / "product_name"
    if instance is not None:
        product.write_text(f"{instance}\n")
    monkeypatch.setattr(neuron_cores, "_INSTANCE", product)
    write_random_checkpoint(tmp_path / "m", "llama", config={"num_attention_heads": 24})
    options = engine_options(tmp_path, tp=tp)
    if is_taken:
        manifest_for(tmp_path / "m", options)
        return
    with pytest.raises(ConfigError, match=f"--tp {tp}: on Trn1 the runtime joins 1, 2, 8 or 16"):
        manifest_for(tmp_path / "m", options)
