"""Where a model's own configuration comes from: a Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from neuronx_distributed_inference.models.config import InferenceConfig, to_torch_dtype

# What transformers' configuration classes add to a file that lacks it.
_DEFAULTS: dict[str, Any] = {
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "output_attentions": False,
    "output_hidden_states": False,
}


def load_pretrained_config(
    model_path_or_name: str | Path | None = None, hf_config: Any = None
) -> Callable[[InferenceConfig], None]:
    """A hook for InferenceConfig(load_config=…). The stand-in takes folders only."""
    if (model_path_or_name is None) == (hf_config is None):
        raise ValueError('Please provide only one of "model_path_or_name" or "hf_config"')

    def load_config(config: InferenceConfig) -> None:
        if hf_config is not None:
            fields: dict[str, Any] = hf_config.to_dict()
        else:
            assert model_path_or_name is not None
            folder = Path(model_path_or_name)
            fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            fields["_name_or_path"] = str(folder)
        rope: dict[str, Any] = fields.get("rope_parameters") or {}
        fields.setdefault("rope_theta", rope.get("rope_theta", 10_000.0))
        fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
        dtype = fields.pop("dtype", None) or fields.pop("torch_dtype", None)
        fields.pop("torch_dtype", None)
        if dtype is not None and not config.neuron_config.overrides_torch_dtype:
            is_name = isinstance(dtype, str)
            config.neuron_config.torch_dtype = to_torch_dtype(dtype) if is_name else dtype
        for name, value in (_DEFAULTS | fields).items():
            setattr(config, name, value)

    return load_config
