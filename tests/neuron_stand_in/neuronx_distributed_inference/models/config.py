"""What a model is compiled for, and what it is: the configuration that compile() saves.

As in the real package an unknown argument is only logged: a misspelt one has no effect.
"""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

CONFIG_FILE = "neuron_config.json"

LoadConfig = Callable[[Any], None]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What the real package can and the stand-in can't: each with the value that it has to keep.
_NOT_HERE: dict[str, Any] = {
    "padding_side": "right",
    "is_block_kv_layout": False,
    "is_prefix_caching": False,
    "chunked_prefill_config": None,
    "kv_cache_quant": False,
    "kv_quant_config": None,
    "attention_dp_degree": 1,
    "cp_degree": 1,
    "pp_degree": 1,
    "ep_degree": 1,
    "flash_decoding_enabled": False,
    "speculation_length": 0,
    "enable_fused_speculation": False,
    "is_medusa": False,
    "quantized": False,
    "lora_config": None,
    "token_generation_batches": None,
}
_IGNORED: dict[str, Any] = {  # has no effect on what this project sees
    "fused_qkv": False,
    "sequence_parallel_enabled": False,
    "enable_output_completion_notifications": False,
    "target": None,
    "cc_pipeline_tiling_factor": 2,
    "attn_kernel_enabled": None,
    "qkv_kernel_enabled": False,
    "mlp_kernel_enabled": False,
}


def to_torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise AssertionError(f"Unsupported dtype: {name}")
    return _DTYPES[name]


def to_dict(value: Any) -> Any:
    """As JSON takes it: objects become dictionaries of their attributes."""
    if isinstance(value, dict):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return to_dict(vars(value)) if hasattr(value, "__dict__") else value


class OnDeviceSamplingConfig:
    """Sampling is part of the graphs: they return token ids."""

    def __init__(self, **kwargs: Any) -> None:
        self.do_sample = kwargs.pop("do_sample", False)
        self.top_k = kwargs.pop("top_k", 1)
        self.top_p = kwargs.pop("top_p", 1.0)
        self.temperature = kwargs.pop("temperature", 1.0)
        self.dynamic = kwargs.pop("dynamic", False)
        self.deterministic = kwargs.pop("deterministic", False)
        self.global_topk = kwargs.pop("global_topk", 256)


class NeuronConfig:
    """What a model is compiled for. Every argument is optional."""

    def __init__(self, **kwargs: Any) -> None:
        take = kwargs.pop
        self.batch_size = take("batch_size", 1)
        self._set_lengths(take)
        self._set_dtype(kwargs)
        self.ctx_batch_size = take("ctx_batch_size", self.batch_size)
        self.tkg_batch_size = take("tkg_batch_size", self.batch_size)
        self.max_batch_size = take("max_batch_size", self.batch_size)
        self.is_continuous_batching = take("is_continuous_batching", False)
        self.kv_cache_batch_size = take("kv_cache_batch_size", self.batch_size)
        self.kv_cache_padding_size = take("kv_cache_padding_size", 0)
        self.k_cache_transposed = take("k_cache_transposed", False)
        # The real package sets this one by itself, for some models.
        self.kv_cache_tiling = take("kv_cache_tiling", False)
        self.apply_seq_ids_mask = take("apply_seq_ids_mask", False)
        sampling = take("on_device_sampling_config", None)
        if isinstance(sampling, dict):
            sampling = OnDeviceSamplingConfig(**sampling)
        self.on_device_sampling_config: OnDeviceSamplingConfig | None = sampling
        self.output_logits = take("output_logits", False)
        self.async_mode = take("async_mode", False)
        self._set_ranks(take)
        self.save_sharded_checkpoint = take("save_sharded_checkpoint", False)
        self.skip_sharding = take("skip_sharding", False)
        self.skip_warmup = take("skip_warmup", False)
        for name, value in (_NOT_HERE | _IGNORED).items():
            setattr(self, name, take(name, value))
        if kwargs:
            logging.getLogger().warning("NeuronConfig: unexpected arguments %s", sorted(kwargs))

    def _set_lengths(self, take: Callable[..., Any]) -> None:
        self.seq_len = take("seq_len", 128)
        self.n_positions = take("n_positions", self.seq_len)
        self.n_active_tokens = take("n_active_tokens", self.seq_len)
        self.max_context_length = take("max_context_length", self.seq_len)
        self.max_length = take("max_length", self.seq_len)
        self.max_new_tokens = take("max_new_tokens", self.seq_len - self.max_context_length) or None
        if self.max_context_length > self.max_length:
            raise AssertionError("max_context_length cannot be more than max_length")
        self.allow_input_truncation = take("allow_input_truncation", False)
        self.enable_bucketing = take("enable_bucketing", False)
        self.buckets = take("buckets", [self.seq_len])
        self.context_encoding_buckets = take("context_encoding_buckets", None)
        self.token_generation_buckets = take("token_generation_buckets", None)
        for buckets, most in (
            (self.context_encoding_buckets, self.max_context_length),
            (self.token_generation_buckets, self.max_length),
        ):
            if buckets is not None:
                buckets.sort()
                if buckets[-1] > most:
                    raise AssertionError(f"a bucket of {buckets[-1]}: {most} is the most")

    def _set_dtype(self, kwargs: dict[str, Any]) -> None:
        self.overrides_torch_dtype = kwargs.pop("overrides_torch_dtype", "torch_dtype" in kwargs)
        dtype = kwargs.pop("torch_dtype", torch.bfloat16)
        self.torch_dtype = to_torch_dtype(dtype) if isinstance(dtype, str) else dtype

    def _set_ranks(self, take: Callable[..., Any]) -> None:
        self.tp_degree = take("tp_degree", 1)
        self.world_size = take("world_size", self.tp_degree)
        self.start_rank_id = take("start_rank_id", 0)
        self.local_ranks_size = take("local_ranks_size", self.world_size)
        # The environment wins over the argument.
        lnc = take("logical_nc_config", 1)
        self.logical_nc_config = int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", lnc))

    def require_modelled(self) -> None:
        """NotImplementedError for what the stand-in does not have, whatever the real one does."""
        for name, value in _NOT_HERE.items():
            if getattr(self, name) != value:
                raise NotImplementedError(f"the stand-in has no {name}={getattr(self, name)!r}")
        if not self.is_continuous_batching:
            raise NotImplementedError("the stand-in needs is_continuous_batching")
        sizes = {self.batch_size, self.tkg_batch_size, self.max_batch_size}
        if sizes != {self.kv_cache_batch_size}:
            raise NotImplementedError("the stand-in needs as many slots as rows of a batch")
        if (self.world_size, self.start_rank_id, self.local_ranks_size) != (
            self.tp_degree,
            0,
            self.tp_degree,
        ):
            raise NotImplementedError("the stand-in has all ranks in one process")
        if self.kv_cache_tiling and self.max_length % 128:
            raise NotImplementedError("kv_cache_tiling needs a max_length of whole tiles, of 128")


class InferenceConfig:
    """The model's own configuration as attributes, and `neuron_config`."""

    def __init__(
        self,
        neuron_config: NeuronConfig,
        fused_spec_config: Any = None,
        load_config: LoadConfig | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.neuron_config = neuron_config
        self.fused_spec_config = fused_spec_config
        if load_config is not None:
            load_config(self)
        self.metadata = metadata
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.num_cores_per_group = 1
        self.validate_config()

    def get_required_attributes(self) -> list[str]:
        return []

    def validate_config(self) -> None:
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        if missing:
            raise AssertionError(f"Config must define {missing}")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return NeuronConfig

    def get_text_config(self) -> "InferenceConfig":
        return self

    def save(self, model_path: str | os.PathLike[str]) -> None:
        Path(model_path).mkdir(parents=True, exist_ok=True)
        self.to_json_file(Path(model_path) / CONFIG_FILE)

    def to_json_file(self, json_file: str | os.PathLike[str]) -> None:
        Path(json_file).write_text(self.to_json_string() + "\n", encoding="utf-8")

    def to_json_string(self) -> str:
        return json.dumps(to_dict(self), indent=2, sort_keys=True)

    @classmethod
    def load(cls, model_path: str | os.PathLike[str], **kwargs: Any) -> Self:
        return cls.from_json_file(Path(model_path) / CONFIG_FILE, **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str], **kwargs: Any) -> Self:
        return cls.from_json_string(Path(json_file).read_text(encoding="utf-8"), **kwargs)

    @classmethod
    def from_json_string(cls, json_string: str, **kwargs: Any) -> Self:
        fields = json.loads(json_string) | kwargs
        if isinstance(fields.get("neuron_config"), dict):
            fields["neuron_config"] = cls.get_neuron_config_cls()(**fields["neuron_config"])
        return cls(**fields)
