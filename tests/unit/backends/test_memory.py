from pathlib import Path

import pytest

from neuron_di.backends import MemoryPlan, plan_memory
from neuron_di.errors import ConfigError
from neuron_di.models import ModelSpec


def plan_of(folder: Path, num_blocks: int) -> MemoryPlan:
    spec = ModelSpec.from_folder(folder)
    layout = spec.kv_layout(block_size=16, dtype="bfloat16")
    return plan_memory(spec, layout, num_blocks=num_blocks, chunk_tokens=256)


def test_plan_counts_weights_and_blocks(llama_folder: Path) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    small, large = plan_of(llama_folder, 1000), plan_of(llama_folder, 3000)
    assert small.weights_bytes == large.weights_bytes == 2 * spec.num_parameters()
    assert small.block_bytes == 3 * 2 * 2 * 16 * 32 * 2
    grown = large.pool_bytes - small.pool_bytes
    assert 2000 * small.block_bytes <= grown <= 2000 * small.block_bytes + 20_000
    assert small.workspace_bytes > 0
    assert small.total_bytes == small.weights_bytes + small.pool_bytes + small.workspace_bytes


def test_the_most_blocks_that_are_said_to_fit_do_fit(llama_folder: Path) -> None:
    available = 50 << 20
    with pytest.raises(ConfigError, match=r"at most (\d+) blocks fit") as caught:
        plan_of(llama_folder, 10_000).require_fits(available)
    most = plan_of(llama_folder, 10_000).max_blocks(available)
    assert f"at most {most} blocks" in caught.value.message
    assert "10000 blocks" in caught.value.message
    plan_of(llama_folder, most).require_fits(available)
    with pytest.raises(ConfigError):
        plan_of(llama_folder, most + 20).require_fits(available)
    assert plan_of(llama_folder, 1 << 40).max_blocks(available) == most  # whatever was asked for


def test_a_model_too_large_alone_is_said(llama_folder: Path) -> None:
    plan = plan_of(llama_folder, 1)
    assert plan.max_blocks(1 << 20) == 0
    with pytest.raises(ConfigError, match="whatever the number of blocks"):
        plan.require_fits(1 << 20)


def test_a_plan_counts_every_rank(llama_folder: Path) -> None:
    spec = ModelSpec.from_folder(llama_folder)
    plans = {
        num_ranks: plan_memory(
            spec,
            spec.kv_layout(block_size=16, dtype="float32", num_ranks=num_ranks),
            num_blocks=100,
            chunk_tokens=256,
        )
        for num_ranks in (1, 2, 4)
    }
    norms = 4 * (2 * spec.num_layers + 1) * spec.hidden
    assert plans[2].weights_bytes == plans[1].weights_bytes + norms
    # Four ranks have two KV heads twice, in weights and in blocks.
    kv_weights = 4 * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * spec.hidden
    assert plans[4].weights_bytes == plans[1].weights_bytes + 3 * norms + kv_weights
    assert plans[2].block_bytes == plans[1].block_bytes
    assert plans[4].block_bytes == 2 * plans[1].block_bytes
    # Each further process has torch of its own.
    assert plans[4].workspace_bytes > plans[2].workspace_bytes + (300 << 20)
