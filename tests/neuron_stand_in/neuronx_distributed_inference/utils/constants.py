"""Which class runs which type of model: `model_type` of config.json."""

from neuronx_distributed_inference.models.llama.modeling_llama import NeuronLlamaForCausalLM
from neuronx_distributed_inference.models.mistral.modeling_mistral import NeuronMistralForCausalLM
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM
from neuronx_distributed_inference.models.qwen2.modeling_qwen2 import NeuronQwen2ForCausalLM
from neuronx_distributed_inference.models.qwen3.modeling_qwen3 import NeuronQwen3ForCausalLM

# The real table has more types, and tasks beside this one.
MODEL_TYPES: dict[str, dict[str, type[NeuronBaseForCausalLM]]] = {
    "llama": {"causal-lm": NeuronLlamaForCausalLM},
    "mistral": {"causal-lm": NeuronMistralForCausalLM},
    "qwen2": {"causal-lm": NeuronQwen2ForCausalLM},
    "qwen3": {"causal-lm": NeuronQwen3ForCausalLM},
}
