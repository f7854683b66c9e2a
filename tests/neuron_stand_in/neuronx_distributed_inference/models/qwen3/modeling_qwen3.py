"""The classes of Qwen3 models."""

from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    REQUIRED_ATTRIBUTES,
    NeuronBaseForCausalLM,
)


class Qwen3NeuronConfig(NeuronConfig):
    """As for all models."""


class Qwen3InferenceConfig(InferenceConfig):
    """config.json, and what the model is compiled for."""

    def get_required_attributes(self) -> list[str]:
        return REQUIRED_ATTRIBUTES

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return Qwen3NeuronConfig


class NeuronQwen3ForCausalLM(NeuronBaseForCausalLM):
    """The model."""

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return Qwen3InferenceConfig
