"""A causal language model: prompts and next tokens through one `forward`."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stand_in.rules import RuleBroken
from torch import Tensor

from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_wrapper import (
    CONTEXT_ENCODING_MODEL_TAG,
    TOKEN_GENERATION_MODEL_TAG,
    ModelWrapper,
    Output,
)
from neuronx_distributed_inference.modules.async_execution import AsyncSteps
from neuronx_distributed_inference.modules.autobucketing import (
    generate_buckets_for_cte,
    generate_buckets_for_tkg,
)
from neuronx_distributed_inference.modules.generation.sampling import (
    infer_sampling_params,
    prepare_sampling_params,
    validate_sampling_params,
)

REQUIRED_ATTRIBUTES = [
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "hidden_act",
]


@dataclass
class CausalLMOutput:
    """Without on-device sampling `logits` [b, 1, V]; with it `tokens` [b], and `logits` None
    unless output_logits is set."""

    logits: Tensor | None
    hidden_states: Any
    tokens: Tensor
    attentions: None = None
    captured_tensors: None = None


class NeuronBaseForCausalLM(NeuronApplicationBase):
    """Compiled into two models, one for prompts and one for next tokens, which share their KV."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vocab_size = self.config.get_text_config().vocab_size  # type: ignore[attr-defined]
        self.padding_side = self.neuron_config.padding_side
        self.kv_cache_populated = False
        self.async_mode = self.neuron_config.async_mode
        self.default_sampling_params = prepare_sampling_params(self.neuron_config.batch_size)
        config = self.neuron_config
        self.context_encoding_model = self._wrap(
            CONTEXT_ENCODING_MODEL_TAG, config.ctx_batch_size, generate_buckets_for_cte
        )
        self.token_generation_model = self._wrap(
            TOKEN_GENERATION_MODEL_TAG, config.tkg_batch_size, generate_buckets_for_tkg
        )
        self._async_steps = AsyncSteps(self.token_generation_model, config.seq_len)
        self._forward_thread: int | None = None

    def _wrap(
        self, tag: str, batch_size: int, buckets: Callable[[InferenceConfig], list[int]]
    ) -> ModelWrapper:
        config = copy.deepcopy(self.config)
        config.neuron_config.batch_size = batch_size
        config.neuron_config.buckets = buckets(config)
        wrapper = ModelWrapper(config, tag)
        self.models.append(wrapper)
        return wrapper

    def forward(
        self,
        input_ids: Tensor | None = None,
        seq_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sampling_params: Tensor | None = None,
        prev_hidden: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        block_table: Tensor | None = None,
        full_context_lens: Tensor | None = None,
        computed_context_lens: Tensor | None = None,
    ) -> CausalLMOutput:
        """A prompt when the least position is 0: ids and positions [1, n], one slot.

        Else one next token for each sequence: ids and positions [b, 1], slots [b], ascending.
        What is of block layouts only, and of speculation, must be absent.
        """
        others = (prev_hidden, adapter_ids, slot_mapping, block_table)
        if any(each is not None for each in (*others, full_context_lens, computed_context_lens)):
            raise NotImplementedError("the stand-in has contiguous slots and nothing else")
        if input_ids is None or position_ids is None:
            raise RuleBroken("forward needs input_ids and position_ids")
        self._require_one_thread()
        if attention_mask is None:
            attention_mask = self._infer_attention_mask(position_ids)
        if seq_ids is None:
            seq_ids = torch.arange(len(input_ids))
        if sampling_params is None:
            sampling_params = self.default_sampling_params
        if self.on_device_sampling:
            config = self.neuron_config.on_device_sampling_config
            validate_sampling_params(sampling_params, config)
        sampling_params = infer_sampling_params(sampling_params)
        inputs = (input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        if position_ids.min().item() == 0:
            self._async_steps.stop()
            output = self.context_encoding_model(*inputs)
            self.kv_cache_populated = True
        elif self.async_mode:
            output = self._async_steps.run(*inputs)
        else:
            output = self.token_generation_model(*inputs)
        return self._answer(output)

    def _answer(self, output: Output) -> CausalLMOutput:
        if isinstance(output, list):
            tokens, logits = output
            return CausalLMOutput(logits, [], tokens)
        return CausalLMOutput(None if self.on_device_sampling else output, output, output)

    def _infer_attention_mask(self, position_ids: Tensor) -> Tensor:
        """Ones for the positions of a prompt that count up, and for those before a next token."""
        width = position_ids.shape[1]
        reached = position_ids
        if width == 1:
            width = int(position_ids.max())
            reached = position_ids - 1
        return (reached >= torch.arange(width)).to(position_ids.dtype)

    def _require_one_thread(self) -> None:
        caller = threading.get_ident()
        if self._forward_thread is None:
            self._forward_thread = caller
        elif self._forward_thread != caller:
            raise RuleBroken("forward is called by a second thread: one thread owns all calls")

    def reset(self) -> None:
        self.kv_cache_populated = False
