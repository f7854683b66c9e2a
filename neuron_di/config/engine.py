"""How a worker computes: its device, its KV pool, and how many requests at once."""

from dataclasses import dataclass, field
from typing import Any, Literal

from neuron_di.config.cuda import CudaOptions
from neuron_di.config.neuron import NeuronOptions
from neuron_di.config.option import ByteSize, option
from neuron_di.errors import ConfigError


def dtype_option() -> Any:
    return option(
        "number format of weights, KV and computation; auto is float32 on a CPU, and bfloat16 on "
        "GPUs and NeuronCores",
        default="auto",
    )


def context_tokens_option() -> Any:
    return option(
        "longest prompt and answer together, in tokens",
        default=None,
        default_text="the model's own limit",
        at_least=2,
    )


def decode_batch_option() -> Any:
    return option("requests a worker decodes together", default=16, at_least=1, at_most=4096)


def rank_count_option() -> Any:
    return option(
        "tensor-parallel ranks of a worker: processes that each have a part of the model, and "
        "divide the worker's threads; with --device neuron NeuronCores",
        default=1,
        at_least=1,
        at_most=64,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How a worker computes."""

    device: Literal["cpu", "cuda", "neuron"] = option("what the model runs on", default="cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = dtype_option()
    context_tokens: int | None = context_tokens_option()
    block_size: int = option(
        "token positions per KV block; with --device neuron a block is a whole context",
        default=16,
        at_least=1,
        at_most=1024,
    )
    num_blocks: int | None = option(
        "KV blocks in a worker's pool",
        default=None,
        default_text="as many as --kv-memory holds",
        at_least=1,
    )
    kv_memory: ByteSize | None = option(
        "memory for a worker's KV pool, such as 2GiB",
        default=None,
        default_text="what a full batch of full contexts takes; on a CPU at most a quarter of the "
        "free memory, on a GPU 0.9 of what weights and workspace leave, divided among the workers "
        "that start together",
        at_least=1,
    )
    prefill_batch: int = option(
        "prompts a prefill worker holds at once: being computed, or waiting to be pulled",
        default=8,
        at_least=1,
        at_most=4096,
    )
    decode_batch: int = decode_batch_option()
    chunk_tokens: int | None = option(
        "a longer prompt is computed in pieces of this many tokens",
        default=None,
        default_text="512, on a GPU 2048",
        at_least=1,
        at_most=1 << 20,
    )
    prefix_cache: Literal["on", "off"] = option(
        "keep KV of prompts for later prompts that begin alike, in whole pieces of --chunk-tokens "
        "and in memory that nobody else needs",
        default="on",
    )
    reserve_tokens: int = option(
        "tokens of an answer for which KV blocks are reserved at a time; where none are left, the "
        "youngest request gives way and goes on later. More than any max_tokens: none ever does",
        default=128,
        at_least=1,
        at_most=1 << 30,
    )
    waiting_max: int = option(
        "requests that may wait in a worker beside those it computes; one more is refused",
        default=256,
        at_least=1,
        at_most=1 << 20,
    )
    tp: int = rank_count_option()
    threads: int | None = option(
        "threads a worker computes with",
        default=None,
        default_text="the cores, or a container's share of them, divided among the workers",
        at_least=1,
        at_most=1024,
    )
    sampling_defaults: Literal["model", "openai"] = option(
        "where a request's temperature, top_p, top_k, min_p and repetition_penalty come from if it "
        "has none: the model's generation_config.json, or OpenAI's API, where all are off",
        default="model",
    )
    cuda: CudaOptions = field(default_factory=CudaOptions)
    neuron: NeuronOptions = field(default_factory=NeuronOptions)

    def __post_init__(self) -> None:
        if None not in (self.num_blocks, self.kv_memory):
            raise ConfigError("--num-blocks and --kv-memory size the same pool: give one of them")

    @property
    def chunk(self) -> int:
        """`chunk_tokens`, or what the device takes by default. A GPU is not full with less."""
        return self.chunk_tokens or (2048 if self.device == "cuda" else 512)
