"""All kernels of a model together, against the CPU's transformer, for all four families."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from composed_model import ComposedModel
from kernel_kit import DEVICE, NOWHERE, assert_same_bits, int32

from neuron_di.models import ModelSpec, TorchAttention, Transformer, load_weights
from neuron_di.testing import write_random_checkpoint

NUM_VOCAB = 96
# Small, because the interpreter is slow. The window, of the family that has one, is shorter than
# the prompt.
SHAPE = {
    "vocab_size": NUM_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
NUM_BLOCKS, BLOCK_SIZE = 12, 16
# Scattered and not in order, so that a wrong block shows.
BLOCK_IDS = [7, 2, 9, 4]
TOLERANCE = 2e-4  # logits have a standard deviation of 3


def open_both(folder, family):
    """The CPU's transformer, and the same model of kernels."""
    window = {"sliding_window": 24} if family == "mistral" else {}
    write_random_checkpoint(folder, family, config={**SHAPE, **window})
    spec = ModelSpec.from_folder(folder)
    weights = load_weights(folder, spec, dtype="float32")
    shape = spec.kv_layout(block_size=BLOCK_SIZE, dtype="float32").rank_shape
    pool = torch.full((NUM_BLOCKS, *shape), torch.nan)
    tables = spec.rope.angle_tables(spec.head_dim, NUM_BLOCKS * BLOCK_SIZE)
    attend = TorchAttention(pool, spec.sliding_window)
    transformer = Transformer(spec, weights, tables, pool, attend)
    on_device = load_weights(folder, spec, dtype="float32", device=DEVICE)
    return transformer, ComposedModel(spec, on_device, NUM_BLOCKS, BLOCK_SIZE)


def prompt(length):
    return torch.randint(NUM_VOCAB, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def logits_of_all(transformer, token_ids):
    rows = []
    transformer.run_chunk(
        token_ids,
        start=0,
        block_ids=BLOCK_IDS,
        with_logits=False,
        read_logits=lambda _, logits: rows.append(logits.clone()),
    )
    return torch.cat(rows)


@pytest.mark.parametrize(
    "family",
    ["mistral", "qwen3", *(pytest.param(f, marks=pytest.mark.minutes) for f in ("llama", "qwen2"))],
)
def test_a_chunked_prompt_and_a_decode_step_give_the_cpus_logits(tmp_path, family):
    transformer, model = open_both(tmp_path, family)
    token_ids = prompt(45)
    wanted = logits_of_all(transformer, token_ids)
    table = int32([*BLOCK_IDS, NOWHERE])
    got = [model.prefill(token_ids[:20], 0, table), model.prefill(token_ids[20:44], 20, table)]
    # A bucket of 3: another request's first position, our last, and a row that only fills it.
    tables = torch.stack([int32([5, *[NOWHERE] * 4]), table, torch.full_like(table, NOWHERE)])
    step = model.decode([token_ids[0], token_ids[44], 0], [0, 44, -1], tables)
    logits = torch.cat([*got, step[1:2].cpu()])
    torch.testing.assert_close(logits, wanted, rtol=0, atol=TOLERANCE)
    assert logits.argmax(-1).equal(wanted.argmax(-1))
    torch.testing.assert_close(step[0].cpu(), wanted[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", pytest.param("qwen3", marks=pytest.mark.minutes)])
def test_a_replay_has_the_bits_of_the_decode_steps_it_repeats(tmp_path, family):
    _, model = open_both(tmp_path, family)
    token_ids = prompt(34)
    table = int32([*BLOCK_IDS, NOWHERE])
    model.prefill(token_ids[:30], 0, table)
    steps = [model.decode([token_ids[p]], [p], table[None]) for p in range(30, 34)]
    kv = model.pool.clone()
    again = model.decode(token_ids[30:34], list(range(30, 34)), table.expand(4, -1))
    assert_same_bits(again, torch.cat(steps))
    assert_same_bits(model.pool, kv)
