"""Logits against Hugging Face transformers, whole, chunked and one token at a time."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from neuron_di.models import ModelSpec, TorchAttention, Transformer, load_weights
from neuron_di.testing import write_random_checkpoint
from neuron_di.types import BlockId

NUM_BLOCKS, BLOCK_SIZE = 60, 16
# Scattered and not in order, so that a wrong block shows.
BLOCK_IDS = [BlockId(7 * n % NUM_BLOCKS) for n in range(NUM_BLOCKS) if n % 5]
# Rounding alone makes logits of std 3 differ by about 1e-5.
TOLERANCE = 2e-4


def open_transformer(folder: Path, dtype: str = "float32") -> tuple[Transformer, torch.Tensor]:
    spec = ModelSpec.from_folder(folder)
    weights = load_weights(folder, spec, dtype=dtype)
    shape = spec.kv_layout(block_size=BLOCK_SIZE, dtype=dtype).rank_shape
    # What was not written must never be read: NaN would spread into the logits.
    pool = torch.full((NUM_BLOCKS, *shape), float("nan"), dtype=getattr(torch, dtype))
    tables = spec.rope.angle_tables(spec.head_dim, len(BLOCK_IDS) * BLOCK_SIZE)
    attend = TorchAttention(pool, spec.sliding_window)
    return Transformer(spec, weights, tables, pool, attend), pool


def hf_logits(folder: Path, token_ids: list[int], dtype: str = "float32") -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 2048, (length,), generator=generator).tolist()
    return ids


def run(transformer: Transformer, token_ids: list[int], sizes: Sequence[int]) -> torch.Tensor:
    """Run the prompt in chunks of these sizes, the last of which is repeated."""
    start, logits = 0, None
    for number in range(len(token_ids)):
        size = sizes[min(number, len(sizes) - 1)]
        end = min(start + size, len(token_ids))
        logits = transformer.run_chunk(
            token_ids[start:end], start=start, block_ids=BLOCK_IDS, with_logits=True
        )
        start = end
        if end == len(token_ids):
            break
    assert logits is not None
    return logits


def test_logits_equal_transformers_however_chunked(family_folder: Path) -> None:
    token_ids = prompt(640)
    expected = hf_logits(family_folder, token_ids)
    transformer, _ = open_transformer(family_folder)
    for length in (1, 2, 16, 17, 257, 640):
        for sizes in ([1000], [256], [100], [5, 300]):
            logits = run(transformer, token_ids[:length], sizes)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(
                logits, expected[length - 1], atol=TOLERANCE, rtol=0, msg=f"{length} {sizes}"
            )
    for length in range(250, 280):  # one by one, across the edge of mistral's window
        logits = run(transformer, token_ids[:length], [length - 1, 1])
        torch.testing.assert_close(logits, expected[length - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": None, "num_key_value_heads": 1, "head_dim": 64},
        {"rope_scaling": None, "num_key_value_heads": 4},
    ],
)
def test_variants_equal_transformers(tmp_path: Path, config: dict[str, object]) -> None:
    write_random_checkpoint(tmp_path, "llama", config=config)
    token_ids = prompt(90)
    transformer, _ = open_transformer(tmp_path)
    logits = run(transformer, token_ids, [50])
    expected = hf_logits(tmp_path, token_ids)[-1]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close(family_folder: Path, dtype: str) -> None:
    token_ids = prompt(100)
    transformer, _ = open_transformer(family_folder, dtype)
    logits = run(transformer, token_ids, [64])
    expected = hf_logits(family_folder, token_ids)[-1]
    similarity = torch.cosine_similarity(logits, expected, dim=0)
    assert similarity > (0.99 if dtype == "bfloat16" else 0.9999)


def test_only_the_chunks_own_positions_are_written(family_folder: Path) -> None:
    transformer, pool = open_transformer(family_folder)
    token_ids = prompt(40)
    transformer.run_chunk(token_ids[:20], start=0, block_ids=BLOCK_IDS, with_logits=False)
    before = pool.clone()
    transformer.run_chunk(token_ids[20:40], start=20, block_ids=BLOCK_IDS, with_logits=False)
    changed = (pool != before) & ~(pool.isnan() & before.isnan())
    expected = torch.zeros_like(changed)
    expected[BLOCK_IDS[1], :, :, :, 4:] = True
    expected[BLOCK_IDS[2], :, :, :, :8] = True
    assert torch.equal(changed, expected)


def test_after_layer_sees_the_layers_kv(family_folder: Path) -> None:
    transformer, pool = open_transformer(family_folder)
    token_ids = prompt(48)
    transformer.run_chunk(token_ids[:20], start=0, block_ids=BLOCK_IDS, with_logits=False)
    seen: list[int] = []

    def after_layer(layer: int, blocks: Sequence[BlockId]) -> None:
        assert list(blocks) == BLOCK_IDS[1:3]
        assert not pool[list(blocks), layer].isnan().any()
        assert pool[BLOCK_IDS[2], layer + 1 :].isnan().all()
        seen.append(layer)

    logits = transformer.run_chunk(
        token_ids[20:],
        start=20,
        block_ids=BLOCK_IDS[:3],
        with_logits=False,
        after_layer=after_layer,
    )
    assert logits is None
    assert seen == [0, 1, 2]
