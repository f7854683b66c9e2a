"""Which graphs a model is compiled to: one for each bucket of positions."""

from math import log2
from typing import Any

SMALLEST_BUCKET = 128


def generate_buckets(min_length: int, max_length: int) -> list[int]:
    """Powers of two from `min_length`, and `max_length` in place of the last near it."""
    if min_length == max_length:
        return [max_length]
    powers = range(int(log2(min_length)), round(log2(max_length)))
    return [2**power for power in powers] + [max_length]


def generate_buckets_for_cte(inference_config: Any) -> list[int]:
    """Of context encoding."""
    config = inference_config.neuron_config
    return _buckets(config, config.context_encoding_buckets, config.max_context_length)


def generate_buckets_for_tkg(inference_config: Any) -> list[int]:
    """Of token generation."""
    config = inference_config.neuron_config
    return _buckets(config, config.token_generation_buckets, config.max_length)


def _buckets(config: Any, chosen: list[int] | None, longest: int) -> list[int]:
    if not config.enable_bucketing:
        return [longest]
    return list(chosen) if chosen is not None else generate_buckets(SMALLEST_BUCKET, longest)
