"""Model families: what a checkpoint says of itself, its weights, and the decoder."""

from neuron_di.models.attention import AttendChunk, TorchAttention
from neuron_di.models.checkpoint import (
    LoadProgress,
    checkpoint_digest,
    load_weights,
    require_implied,
    resolve_checkpoint,
)
from neuron_di.models.generation_config import read_sampling_defaults
from neuron_di.models.rope import RopeSpec
from neuron_di.models.shard import Gather, JointRank, Shard, require_divisible
from neuron_di.models.spec import ModelSpec
from neuron_di.models.transformer import ReadLogits, Transformer
from neuron_di.models.weights import LayerWeights, ModelWeights

__all__ = [
    "AttendChunk",
    "Gather",
    "JointRank",
    "LayerWeights",
    "LoadProgress",
    "ModelSpec",
    "ModelWeights",
    "ReadLogits",
    "RopeSpec",
    "Shard",
    "TorchAttention",
    "Transformer",
    "checkpoint_digest",
    "load_weights",
    "read_sampling_defaults",
    "require_divisible",
    "require_implied",
    "resolve_checkpoint",
]
