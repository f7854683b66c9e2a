"""Hugging Face `generate` with its default cache and attention. Prompts of a batch: one length."""

from typing import Any

import torch
import transformers

from benchmarks.contenders.command_loop import Generate, Settings, obey


def load(settings: Settings) -> tuple[str, Generate]:
    torch.set_num_threads(settings.threads)
    torch.set_num_interop_threads(1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        settings.model, dtype=getattr(torch, settings.dtype)
    )
    model.to(settings.torch_device)
    model.generation_config.eos_token_id = None  # a random model may end anywhere

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        prompts_BT = torch.tensor(prompts, device=settings.torch_device)
        ids_BT = model.generate(
            prompts_BT,
            attention_mask=torch.ones_like(prompts_BT),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        generated: list[list[int]] = ids_BT[:, prompts_BT.shape[1] :].tolist()
        return generated

    return f"transformers {transformers.__version__}", generate


if __name__ == "__main__":
    obey(load)
