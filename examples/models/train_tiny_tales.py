"""Train the tiny-tales checkpoint on one CPU core and save it in Hugging Face layout.

    python examples/models/train_tiny_tales.py --out examples/models/tiny-tales

The seed fixes the texts, their order and the first weights; the learning rate falls to zero at the
last step. `--minutes` of CPU time is a ceiling for slow machines: the schedule then ends there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from tales_chats import Document, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

SEED = 2024
HELD_OUT_SEED = 1
END, *ROLES = SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
END_ID = 0
VOCABULARY_SIZE = 2048
CONTEXT_TOKENS = 1024
BUCKET_DOCUMENTS = 256  # sorted by length before they are cut into batches, so padding is small
# (end of the stage as a share of the training, tokens kept of a document, tokens of a batch).
# Openings first: there, half of what can be learned is to copy what the request names.
STAGES = ((0.3, 56, 2048), (0.45, 144, 4096), (1.0, CONTEXT_TOKENS, 4096))
WARMUP_STEPS = 20
DECAY_SHARE = 0.6  # the learning rate falls over the last part of the training
MATRIX_RATE = 0.01
EMBEDDING_RATE = 4e-3
UNSCORED = -100

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ '<|assistant|>' }}"
    "{%- elif message['role'] in ['system', 'developer'] -%}{{ '<|system|>' }}"
    "{%- else -%}{{ '<|user|>' }}{%- endif -%}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def train_tokenizer() -> Tokenizer:
    """Learn a byte-level BPE from the corpus; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for document in islice(documents(SEED), 8000)
        for text in ([document] if isinstance(document, str) else [m["content"] for m in document])
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of one document; only tales and the assistant's words are scored."""
    if isinstance(document, str):
        tale = [*tokenizer.encode(document).ids, END_ID]
        return tale, tale
    ids: list[int] = []
    labels: list[int] = []
    for message in document:
        role = SPECIAL_TOKENS.index(f"<|{message['role']}|>")
        content = [*tokenizer.encode(message["content"]).ids, END_ID]
        ids += [role, *content]
        scored = message["role"] == "assistant"
        labels += [UNSCORED, *(content if scored else [UNSCORED] * len(content))]
    return ids, labels


def batches(
    tokenizer: Tokenizer, seed: int, document_tokens: int, batch_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (ids, labels), each [B, T] and padded at the end; every row is one document's start."""
    stream = documents(seed)
    shuffle = torch.Generator().manual_seed(seed)
    while True:
        encoded = [encode(tokenizer, document) for document in islice(stream, BUCKET_DOCUMENTS)]
        bucket = [(ids[:document_tokens], labels[:document_tokens]) for ids, labels in encoded]
        bucket.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in bucket:
            if (len(groups[-1]) + 1) * len(row[0]) > batch_tokens:
                groups.append([])
            groups[-1].append(row)
        for index in torch.randperm(len(groups), generator=shuffle).tolist():
            rows = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in groups[index]]
            yield (
                pad_sequence([ids for ids, _ in rows], True, END_ID),
                pad_sequence([labels for _, labels in rows], True, UNSCORED),
            )


def make_model() -> LlamaForCausalLM:
    """Build the untrained model, about 3.5 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        start_as_copier(layer.self_attn)
    return model


@torch.no_grad()
def start_as_copier(attention: LlamaAttention) -> None:
    """Make every head start by passing on what it attends to: W_o is half of W_v transposed.

    Embeddings are tied, so the model then begins with "say again what you see". From two random
    matrices, it takes many times longer until anything named in the request is told about.
    """
    values = attention.v_proj.weight  # [K * D, hidden]
    torch.nn.init.orthogonal_(values)
    heads = values.view(-1, attention.head_dim, values.shape[1])
    heads = heads.repeat_interleave(attention.num_key_value_groups, dim=0)
    attention.o_proj.weight.copy_(0.5 * heads.flatten(0, 1).T)


def mean_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the scored tokens, in nats; logits only where scored."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        targets = labels[:, 1:]
        scored = targets != UNSCORED
        logits = model.lm_head(hidden[scored])
    return F.cross_entropy(logits.float(), targets[scored])


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, steps: int, minutes: float) -> None:
    """Train until the last step or the time limit, whichever comes first."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=EMBEDDING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    model.train()
    model.model.compile(dynamic=True)  # a third faster; sizes change from batch to batch
    started = time.process_time()
    step, num_tokens, progress = 0, 0, 0.0
    for stage, (share, document_tokens, batch_tokens) in enumerate(STAGES):
        for ids, labels in batches(tokenizer, SEED + stage, document_tokens, batch_tokens):
            loss = mean_loss(model, ids, labels)
            loss.backward()  # type: ignore[no-untyped-call]
            factor = min(1.0, (step + 1) / WARMUP_STEPS, (1 - progress) / DECAY_SHARE)
            for optimizer, rate in zip(optimizers, rates, strict=True):  # each has one group
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.step()
                optimizer.zero_grad()
            elapsed = (time.process_time() - started) / 60
            if step % 20 == 0:
                print(f"step {step:5d}  {elapsed:5.1f} min  loss {loss.item():.4f}", flush=True)
            step += 1
            num_tokens += ids.numel()
            progress = max(step / steps, elapsed / minutes)
            if progress >= share:
                break
    print(f"trained {step} steps on {num_tokens:,} tokens in {elapsed:.1f} min of CPU time")


def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """Return the mean loss over whole texts of another seed."""
    _, *sizes = STAGES[-1]
    held_out = islice(batches(tokenizer, HELD_OUT_SEED, *sizes), 20)
    model.train(False)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return fmean(mean_loss(model, *batch).item() for batch in held_out)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), tokenizer and chat template into the folder `out`."""
    model.bfloat16().save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": ROLES,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")


def main() -> None:
    """Read the command line, train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the time limit counts one core
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer()
    model = make_model()
    print(f"{model.num_parameters():,} parameters")
    train(model, tokenizer, arguments.steps, arguments.minutes)
    print(f"held-out loss {held_out_loss(model, tokenizer):.4f}")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
