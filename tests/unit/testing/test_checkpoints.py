from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from neuron_di.models import ModelSpec
from neuron_di.testing import write_random_checkpoint
from neuron_di.testing.checkpoints import TOOL_CHAT_TEMPLATE


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_loads_them_and_greedy_output_is_varied(tmp_path: Path, family: str) -> None:
    write_random_checkpoint(tmp_path, family)  # type: ignore[arg-type]
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert model.num_parameters() == ModelSpec.from_folder(tmp_path).num_parameters()
    ids = torch.randint(3, 2048, (1, 50), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    model.generation_config.eos_token_id = None
    out = model.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)
    assert len(set(out[0, 50:].tolist())) >= 20


def test_tokenizer_round_trips_and_has_a_chat_template(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return 'héé 日本'\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token_id in ModelSpec.from_folder(tmp_path).eos_token_ids


def test_same_arguments_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_checkpoint(tmp_path / name, "qwen3", seed=seed)
    one, same, other = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_a_checkpoint_may_take_tools_and_reason(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "llama", chat_template=TOOL_CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ask = {"role": "user", "content": "hi"}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    chat = tokenizer.apply_chat_template(
        [
            ask,
            {"role": "assistant", "content": "<think>\nhm</think>\nwait", "tool_calls": [call]},
            {"role": "tool", "content": "21"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
    )
    assert chat == (
        '<|im_start|>system\n# Tools\n<tools>\n{"type": "function", "function": {"name": "f"}}'
        '\n</tools>\nAnswer with <tool_call>\n{"name": <name>, "arguments": <object>}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwait\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
