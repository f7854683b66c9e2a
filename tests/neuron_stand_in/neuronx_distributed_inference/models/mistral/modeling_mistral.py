"""The classes of Mistral models."""

from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import (
    REQUIRED_ATTRIBUTES,
    NeuronBaseForCausalLM,
)


class MistralNeuronConfig(NeuronConfig):
    """As for all models."""


class MistralInferenceConfig(InferenceConfig):
    """config.json, and what the model is compiled for."""

    def get_required_attributes(self) -> list[str]:
        return REQUIRED_ATTRIBUTES

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        return MistralNeuronConfig


class NeuronMistralForCausalLM(NeuronBaseForCausalLM):
    """The model."""

    @classmethod
    def get_config_cls(cls) -> type[InferenceConfig]:
        return MistralInferenceConfig
