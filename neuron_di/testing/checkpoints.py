"""Random checkpoints in the Hugging Face layout, so that tests and benchmarks need no download.

The text they generate is noise, but varied noise: matrices are drawn so that activations keep
their size, which makes greedy output depend on every part of the computation.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from neuron_di.models import ModelSpec, ModelWeights
from neuron_di.testing.corpus import corpus

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
Size = Literal["tiny", "25m", "125m"]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Tools and their calls in the form of Hermes and Qwen; reasoning in tags, which only the latest
# answer keeps. `enable_thinking=false` closes the tags in the prompt, `true` opens them.
TOOL_CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\n# Tools\n<tools>' }}"
    "{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\n</tools>\nAnswer with <tool_call>\n' }}"
    '{{- \'{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{%- endif %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\n' + content }}"
    "{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\n' }}{%- endif %}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)
_LOGIT_STD = 3.0  # about that of a trained model, so that sampling has something to choose from
_QUERY_SCALE = 3.0  # sharp attention: what is far back decides, and the output does not cycle
_SHAPES: dict[Size, dict[str, int]] = {
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "25m": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "125m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2816,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
_CORPUS_CHARS: dict[Size, int] = {"tiny": 1 << 19, "25m": 1 << 20, "125m": 4 << 20}


def write_random_checkpoint(
    folder: Path,
    family: Family,
    *,
    size: Size = "tiny",
    dtype: str = "float32",
    seed: int = 0,
    tied: bool | None = None,
    num_shards: int = 1,
    config: Mapping[str, object] | None = None,
    chat_template: str = CHAT_TEMPLATE,
) -> None:
    """Write a complete checkpoint: config, weights, tokenizer with chat template, end tokens.

    `folder` is created. `tied` None: untied for tiny llama and mistral, tied otherwise. `config`
    overrides keys of config.json. `chat_template` TOOL_CHAT_TEMPLATE takes tools, and marks
    reasoning. The same arguments give the same weights and tokenizer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(_tokenizer_json(size))
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    if tied is None:
        tied = size != "tiny" or family in ("qwen2", "qwen3")
    fields = {**_config(family, size, dtype, tied), "eos_token_id": eos[0], **(config or {})}
    _write_json(folder / "config.json", fields)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": fields["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tensors = _random_tensors(ModelSpec.from_folder(folder), getattr(torch, dtype), seed)
    _write_tensors(folder, tensors, num_shards)


def _config(family: Family, size: Size, dtype: str, tied: bool) -> dict[str, object]:
    class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config: dict[str, object] = {
        "architectures": [f"{class_name[family]}ForCausalLM"],
        "model_type": family,
        **_SHAPES[size],
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if size == "tiny" and family == "llama":
        # An original context this short puts all three branches of the scaling to work.
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        }
    if family == "mistral":
        config["sliding_window"] = 256 if size == "tiny" else None
    return config


def _random_tensors(spec: ModelSpec, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = ModelWeights.allocate(spec, dtype)
    # A tied embedding is small beside what the layers add: otherwise the model echoes its input.
    embedding_std = 0.05 if spec.has_tied_embeddings else 1.0
    head_std = embedding_std if spec.has_tied_embeddings else spec.hidden**-0.5
    final_scale = _LOGIT_STD / (head_std * math.sqrt(spec.hidden))
    tensors = {}
    for name, shape in shapes.stored_tensors(spec):
        drawn = torch.randn(shape.shape, generator=generator)
        if name == "model.embed_tokens.weight":
            drawn *= embedding_std
        elif name.endswith(".bias"):
            drawn *= 0.1
        elif shape.dim() == 1:
            drawn = 1.0 + 0.1 * drawn
        else:
            drawn *= shape.shape[1] ** -0.5
        if name == "model.norm.weight":
            drawn *= final_scale
        elif name.endswith(("q_proj.weight", "q_norm.weight")):
            drawn *= _QUERY_SCALE
        tensors[name] = drawn.to(dtype)
    return tensors


def _write_tensors(folder: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = sorted(tensors)[shard::num_shards]
        save_file({n: tensors[n] for n in names}, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


@cache
def _tokenizer_json(size: Size) -> str:
    """A byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_SHAPES[size]["vocab_size"],
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(_CORPUS_CHARS[size]), trainer)
    return str(tokenizer.to_str())


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
