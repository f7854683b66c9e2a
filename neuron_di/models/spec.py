"""What a checkpoint's config.json says about the model: shapes, RoPE, limits, end tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuron_di.errors import CheckpointError, ConfigError
from neuron_di.kv import DTYPE_BYTES, KvLayout
from neuron_di.models.rope import RopeSpec, positive_float

Family = Literal["llama", "mistral", "qwen2", "qwen3"]

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_WINDOW = 4096  # what Hugging Face assumes when the key is absent; null means none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The architecture of one checkpoint. Sizes are elements, not bytes."""

    family: Family
    num_vocab: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_tokens: int  # prompt and generated together
    rms_eps: float
    rope: RopeSpec
    sliding_window: int | None  # a position sees this many positions, itself included
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_out_bias: bool  # of the attention's output projection
    has_mlp_bias: bool
    dtype: str  # of the stored weights, a key of DTYPE_BYTES
    eos_token_ids: tuple[int, ...]

    @property
    def has_qk_norm(self) -> bool:
        """True when queries and keys are normalised per head before RoPE."""
        return self.family == "qwen3"

    @property
    def num_qkv(self) -> int:
        """Rows of the fused projection: queries, then keys, then values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def context_of(self, wanted: int | None) -> int:
        """Tokens of the longest request where an operator wants so many. ConfigError for more than
        the model was made for."""
        if wanted is not None and wanted > self.context_tokens:
            raise ConfigError(
                f"--context-tokens {wanted} is more than the model's {self.context_tokens} "
                "(max_position_embeddings)",
                param="context_tokens",
            )
        return wanted or self.context_tokens

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelSpec":
        """Read config.json and generation_config.json.

        Raises CheckpointError that names the file and the key when this model cannot be served.
        """
        path = folder / "config.json"
        config = read_json_object(path)
        generation = folder / "generation_config.json"
        eos = config.get("eos_token_id")
        if generation.exists():
            eos = read_json_object(generation).get("eos_token_id", eos)
            eos = list(_token_ids(eos, str(generation)))
        return cls.from_config(config, eos_token_id=eos, source=str(path))

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], *, eos_token_id: object, source: str
    ) -> "ModelSpec":
        """Check and translate a parsed config.json. `source` names the file in errors."""
        fields = _Fields(config, source)
        family = fields.family()
        fields.refuse_unsupported()
        hidden, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        num_kv_heads = fields.count("num_key_value_heads", num_heads)
        head_dim = fields.count("head_dim", 128 if family == "qwen3" else hidden // num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{source}: {num_heads} heads cannot share {num_kv_heads} KV heads evenly"
            )
        if head_dim % 2:
            raise CheckpointError(f"{source}: RoPE needs an even head_dim, not {head_dim}")
        num_layers = fields.count("num_hidden_layers")
        attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias")
        return cls(
            family=family,
            num_vocab=fields.count("vocab_size"),
            hidden=hidden,
            intermediate=fields.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_tokens=fields.count("max_position_embeddings"),
            rms_eps=fields.positive("rms_norm_eps"),
            rope=RopeSpec.from_config(config, source),
            sliding_window=fields.sliding_window(family, num_layers),
            has_tied_embeddings=fields.flag("tie_word_embeddings"),
            has_qkv_bias=attention_bias or family == "qwen2",
            has_out_bias=attention_bias,
            has_mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            dtype=fields.dtype(),
            eos_token_ids=_token_ids(eos_token_id, source),
        )

    def kv_layout(self, *, block_size: int, dtype: str, num_ranks: int = 1) -> KvLayout:
        """The KV pool's geometry when this model computes in `dtype`, on that many ranks."""
        return KvLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
            num_ranks=num_ranks,
        )

    def num_parameters(self) -> int:
        """Stored parameters; tied embeddings count once."""
        query, attention = self.num_heads * self.head_dim, self.num_qkv
        layer = self.hidden * (attention + query + 3 * self.intermediate + 2)
        layer += 2 * self.head_dim if self.has_qk_norm else 0
        layer += attention if self.has_qkv_bias else 0
        layer += self.hidden if self.has_out_bias else 0
        layer += 2 * self.intermediate + self.hidden if self.has_mlp_bias else 0
        embeddings = self.num_vocab * self.hidden * (1 if self.has_tied_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of the weights once loaded as `dtype`."""
        return self.num_parameters() * DTYPE_BYTES[dtype]


class _Fields:
    """Typed reads of a config.json; each error names the file and the key."""

    def __init__(self, config: Mapping[str, object], source: str) -> None:
        self._config = config
        self._source = source

    def family(self) -> Family:
        names = self._config.get("architectures")
        supported = ", ".join(FAMILIES)
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self._source}: `architectures` must name one model class ({supported}), "
                f"not {names!r}"
            )
        if names[0] not in FAMILIES:
            raise CheckpointError(
                f"{self._source}: architecture {names[0]} is not supported; supported: {supported}"
            )
        family = FAMILIES[names[0]]
        kind = self._config.get("model_type", family)
        if kind != family:  # transformers goes by this one
            raise CheckpointError(
                f"{self._source}: model_type {kind!r} is not that of {names[0]}, {family!r}"
            )
        return family

    def refuse_unsupported(self) -> None:
        activation = self._config.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(
                f"{self._source}: hidden_act {activation!r} is not supported; supported: silu"
            )
        if not self._config.get("is_causal", True):  # models made for embeddings
            raise CheckpointError(
                f"{self._source}: is_causal false is not supported: positions would see later ones"
            )
        layer_types = self._config.get("layer_types")
        if isinstance(layer_types, list):
            other = [each for each in layer_types if each not in _LAYER_TYPES]
            if other:
                raise CheckpointError(
                    f"{self._source}: layer_types {other[0]!r} is not supported; "
                    f"supported: {', '.join(_LAYER_TYPES)}"
                )
        if self._config.get("quantization_config") is not None:
            raise CheckpointError(
                f"{self._source}: quantized weights (quantization_config) are not supported; "
                f"use the float32, bfloat16 or float16 checkpoint"
            )

    def count(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._source}: `{key}` must be a positive integer, not {value!r}"
            )
        return value

    def positive(self, key: str) -> float:
        value = self._config.get(key)
        number = positive_float(value)
        if number is None:
            raise CheckpointError(
                f"{self._source}: `{key}` must be a positive number, not {value!r}"
            )
        return number

    def flag(self, key: str) -> bool:
        value = self._config.get(key, False)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._source}: `{key}` must be true or false, not {value!r}")
        return value

    def dtype(self) -> str:
        value = self._config.get("dtype") or self._config.get("torch_dtype") or "float32"
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise CheckpointError(
                f"{self._source}: dtype {value!r} is not supported; "
                f"supported: {', '.join(DTYPE_BYTES)}"
            )
        return value

    def sliding_window(self, family: Family, num_layers: int) -> int | None:
        if family == "llama" or self._config.get("sliding_window", _WINDOW) is None:
            return None
        layer_types = self._config.get("layer_types")
        if family == "mistral" and layer_types is None:
            return self.count("sliding_window", _WINDOW)
        if family != "mistral" and not self.flag("use_sliding_window"):
            return None
        first = self._config.get("max_window_layers", 28)  # Hugging Face's default
        if isinstance(layer_types, list):  # as Ministral has them, in a Mistral's name
            is_windowed = {layer_type == "sliding_attention" for layer_type in layer_types}
        else:
            is_windowed = {isinstance(first, int) and n >= first for n in range(num_layers)}
        if is_windowed == {False}:
            return None
        if is_windowed != {True}:
            raise CheckpointError(
                f"{self._source}: a sliding window on some layers only is not supported"
            )
        return self.count("sliding_window", _WINDOW)


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a JSON file that must hold one object. Raises CheckpointError that names it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def _token_ids(value: object, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    found = [each for each in ids if isinstance(each, int) and not isinstance(each, bool)]
    if len(found) < len(ids):
        raise CheckpointError(f"{source}: eos_token_id must be an id or a list of ids")
    return tuple(token_id for token_id in found if token_id >= 0)  # -1 says that there is none
