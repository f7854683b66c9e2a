import json
from pathlib import Path

import pytest

from neuron_di.errors import CheckpointError, ConfigError
from neuron_di.models import ModelSpec

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def read(changes: dict[str, object]) -> ModelSpec:
    config = {**LLAMA, **changes}
    return ModelSpec.from_config(config, eos_token_id=config["eos_token_id"], source="config.json")


def of_family(name: str, **changes: object) -> ModelSpec:
    return read({"architectures": [f"{name}ForCausalLM"], **changes})


def test_llama_defaults() -> None:
    spec = read({})
    assert spec.family == "llama"
    assert spec.head_dim == 16
    assert spec.num_qkv == (4 + 2 + 2) * 16
    assert spec.context_tokens == 512
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids == (2,)
    assert spec.rope.kind == "default"
    assert spec.sliding_window is None
    assert not spec.has_tied_embeddings
    assert not spec.has_qkv_bias
    assert not spec.has_qk_norm


def test_the_context_is_what_an_operator_wants_up_to_the_models_own() -> None:
    spec = read({})
    assert [spec.context_of(wanted) for wanted in (None, 1, 512)] == [512, 1, 512]
    with pytest.raises(ConfigError, match="--context-tokens 513 is more than the model's 512"):
        spec.context_of(513)


def test_families_differ_where_they_should() -> None:
    assert of_family("Qwen2").has_qkv_bias
    assert not of_family("Qwen2").has_out_bias
    assert of_family("Qwen3").has_qk_norm
    assert of_family("Qwen3").head_dim == 128
    assert of_family("Qwen3", head_dim=32).head_dim == 32
    llama = read({"attention_bias": True, "mlp_bias": True})
    assert llama.has_qkv_bias
    assert llama.has_out_bias
    assert llama.has_mlp_bias
    assert not of_family("Mistral", attention_bias=True).has_qkv_bias


def test_kv_heads_default_to_heads() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    spec = ModelSpec.from_config(config, eos_token_id=None, source="config.json")
    assert spec.num_kv_heads == 4
    assert spec.eos_token_ids == ()


def test_sliding_windows() -> None:
    assert of_family("Mistral", sliding_window=128).sliding_window == 128
    assert of_family("Mistral", sliding_window=None).sliding_window is None
    assert of_family("Mistral").sliding_window == 4096
    assert read({"sliding_window": 128}).sliding_window is None
    unused = {"sliding_window": 128, "use_sliding_window": False}
    assert of_family("Qwen2", **unused).sliding_window is None
    used = {"sliding_window": 128, "use_sliding_window": True}
    assert of_family("Qwen3", **used, max_window_layers=0).sliding_window == 128
    assert of_family("Qwen3", **used, max_window_layers=2).sliding_window is None
    named = {"use_sliding_window": True, "max_window_layers": 0}
    assert of_family("Qwen2", **named).sliding_window == 4096
    assert of_family("Qwen2", **named, sliding_window=None).sliding_window is None
    kinds = ["sliding_attention", "sliding_attention"]
    assert of_family("Qwen2", **used, layer_types=kinds).sliding_window == 128
    for_all = {"sliding_window": 128, "layer_types": kinds}
    assert of_family("Mistral", **for_all).sliding_window == 128
    full = ["full_attention", "full_attention"]
    assert of_family("Mistral", sliding_window=128, layer_types=full).sliding_window is None
    with pytest.raises(CheckpointError, match="a sliding window on some layers"):
        of_family("Qwen2", **used, max_window_layers=1)
    with pytest.raises(CheckpointError, match="a sliding window on some layers"):
        of_family("Mistral", sliding_window=128, layer_types=[kinds[0], full[0]])
    for other in ("linear_attention", "chunked_attention", ["full_attention"]):
        with pytest.raises(CheckpointError, match=r"layer_types .* is not supported"):
            of_family("Qwen3", layer_types=[full[0], other])


def test_a_type_of_another_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model_type 'mistral' is not that of LlamaFor"):
        read({"model_type": "mistral"})
    assert of_family("Qwen2", model_type="qwen2").family == "qwen2"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Mistral"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu.*supported: silu"),
        ({"is_causal": False}, "is_causal"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": "many"}, "vocab_size.*'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.*0"),
        ({"hidden_size": True}, "hidden_size.*True"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "even head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"torch_dtype": "int8"}, "int8.*float32, bfloat16, float16"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*default, linear, llama3"),
    ],
)
def test_unusable_configs_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config.json.*{named}"):
        read(changes)


def test_generation_config_overrides_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert ModelSpec.from_folder(tmp_path).eos_token_ids == (2,)


def test_bad_end_tokens_are_named_by_their_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        ModelSpec.from_folder(tmp_path)


def test_an_end_token_of_minus_one_is_none() -> None:
    assert read({"eos_token_id": -1}).eos_token_ids == ()
    assert read({"eos_token_id": [-1, 2]}).eos_token_ids == (2,)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"3"])
def test_bad_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        ModelSpec.from_folder(tmp_path)


def test_kv_layout_and_weight_bytes() -> None:
    spec = read({})
    layout = spec.kv_layout(block_size=16, dtype="float16")
    assert layout.rank_shape == (2, 2, 2, 16, 16)
    assert spec.weight_bytes("float16") * 2 == spec.weight_bytes("float32")
