import pytest
import torch
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neuron_di.errors import CheckpointError
from neuron_di.models import RopeSpec
from neuron_di.models.rope import rotate_

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("block", [{"type": "linear", "factor": 4.0}, LLAMA3])
def test_old_and_new_keys_say_the_same(block: dict[str, object]) -> None:
    old = RopeSpec.from_config({"rope_theta": 5e5, "rope_scaling": block}, "config.json")
    new = RopeSpec.from_config({"rope_parameters": {**block, "rope_theta": 5e5}}, "config.json")
    assert old == new
    assert old.theta == 5e5
    assert old.kind != "default"


@pytest.mark.parametrize("block", [{"rope_type": "linear", "factor": 4.0}, LLAMA3])
def test_scaled_angles_equal_transformers(block: dict[str, object]) -> None:
    parameters = {**block, "rope_theta": 10_000.0}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=dict(parameters)
    )
    kind = str(block["rope_type"])
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(600.0), frequencies)
    spec = RopeSpec.from_config({"rope_parameters": parameters}, "config.json")
    cos, sin = spec.angle_tables(32, 600)
    torch.testing.assert_close(cos, angles.cos(), atol=2e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin(), atol=2e-4, rtol=0)
    plain, _ = RopeSpec().angle_tables(32, 600)
    assert (plain - cos).abs().max() > 0.1


def test_two_blocks_must_say_the_same() -> None:
    newer = {**LLAMA3, "rope_theta": 5e5}
    older = {**LLAMA3, "type": "llama3"}
    both = {"rope_parameters": newer, "rope_scaling": older}
    assert RopeSpec.from_config(both, "c") == RopeSpec.from_config({"rope_parameters": newer}, "c")
    # As who follows a model's page has it, which tells to add a block of the older name.
    for other in ({"type": "linear", "factor": 4.0}, {**older, "factor": 4.0}):
        with pytest.raises(CheckpointError, match="rope_parameters and rope_scaling differ"):
            RopeSpec.from_config({**both, "rope_scaling": other}, "config.json")


@pytest.mark.parametrize("block", ["rope_parameters", "rope_scaling"])
def test_two_bases_must_be_the_same(block: str) -> None:
    config = {"rope_theta": 10_000, block: {"rope_type": "default", "rope_theta": 10_000.0}}
    assert RopeSpec.from_config(config, "config.json") == RopeSpec(theta=10_000.0)
    # As one who means to change it may leave the other; which one counts depends on the reader.
    with pytest.raises(CheckpointError, match=r"config.json: rope_theta is 5.*10000.0 among"):
        RopeSpec.from_config({**config, "rope_theta": 500_000}, "config.json")


@pytest.mark.parametrize("inside", [{}, {"original_max_position_embeddings": 512}])
def test_the_original_context_may_stand_beside_the_block(inside: dict[str, object]) -> None:
    block = {name: value for name, value in LLAMA3.items() if name[:8] != "original"} | inside
    config = {
        "rope_theta": 10_000.0,
        "rope_scaling": dict(block),
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 2048,
    }
    spec = RopeSpec.from_config(config, "config.json")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    frequencies = LlamaModel(LlamaConfig(**sizes, **config)).rotary_emb.inv_freq
    angles = torch.outer(torch.arange(600.0), frequencies)
    cos, _ = spec.angle_tables(32, 600)
    torch.testing.assert_close(cos, angles.cos(), atol=2e-4, rtol=0)


def test_absent_means_default() -> None:
    assert RopeSpec.from_config({}, "config.json") == RopeSpec(theta=10_000.0)
    assert RopeSpec.from_config({"rope_scaling": None, "rope_theta": 7.0}, "c") == RopeSpec(theta=7)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"factor": 4.0}}, "'factor' and name no rope_type"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "'full_attention' and name no",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": "linear"}, "object"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=f"config.json.*{named}"):
        RopeSpec.from_config(config, "config.json")


def test_rotation_keeps_length_and_depends_on_distance_only() -> None:
    cos, sin = RopeSpec().angle_tables(8, 20)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    products = []
    for position in (0, 5, 11):
        pair = torch.stack((query, key))[:, None].clone()
        rows = torch.tensor([position, position + 7])
        rotate_(pair, cos[rows], sin[rows])
        torch.testing.assert_close(pair[0].norm(), query.norm())
        products.append(pair[0, 0] @ pair[1, 0])
    torch.testing.assert_close(products[1], products[0])
    torch.testing.assert_close(products[2], products[0])
    assert abs(products[0] - query @ key) > 1e-3
