"""Rotary position embedding: the frequencies a checkpoint was trained with, and the rotation."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from neuron_di.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

RopeKind = Literal["default", "linear", "llama3"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3")
# What may stand there without a type. Another field is for one, or holds a block per kind of layer.
_KINDLESS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_BLOCKS = ("rope_parameters", "rope_scaling")  # of transformers 5, and before


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """The rotary embedding of a model. The last three fields matter to `llama3` only."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, object], source: str) -> "RopeSpec":
        """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before).

        `source` names the file in errors. Raises CheckpointError for a type not listed above, and
        where both blocks, or two `rope_theta`, are there and differ: so do readers in which one
        counts.
        """
        fields, older = (_block(config.get(key), source) for key in _BLOCKS)
        if fields and older and not _says_no_more(older, fields):
            raise CheckpointError(f"{source}: {' and '.join(_BLOCKS)} differ: keep one of them")
        fields = fields or older
        inside, outside = fields.get("rope_theta"), config.get("rope_theta")
        if inside != outside and None not in (inside, outside):
            raise CheckpointError(
                f"{source}: rope_theta is {outside!r}, and {inside!r} among the RoPE parameters: "
                "keep one of them"
            )
        kind = _kind_of(fields)
        others = fields.keys() - _KINDLESS
        if others and not (fields.get("rope_type") or fields.get("type")):
            raise CheckpointError(
                f"{source}: the RoPE parameters have {min(others)!r} and name no rope_type"
            )
        if kind not in ROPE_KINDS:
            raise CheckpointError(
                f"{source}: RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if partial not in (None, 1.0):
            raise CheckpointError(f"{source}: partial_rotary_factor {partial!r} is not supported")

        def number(name: str, default: object = None) -> float:
            value = fields.get(name, default)
            if (found := positive_float(value)) is None:
                raise CheckpointError(f"{source}: RoPE needs a positive {name}, not {value!r}")
            return found

        theta = number("rope_theta", config.get("rope_theta", 10_000.0))
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(kind="linear", theta=theta, factor=number("factor"))
        context = config.get("max_position_embeddings")
        beside = config.get("original_max_position_embeddings")  # counts first, as in transformers
        if beside is not None:
            fields = {**fields, "original_max_position_embeddings": beside}
        return cls(
            kind=cast("RopeKind", kind),
            theta=theta,
            factor=number("factor"),
            low_freq_factor=number("low_freq_factor"),
            high_freq_factor=number("high_freq_factor"),
            original_context=int(number("original_max_position_embeddings", context)),
        )

    def _inverse_frequencies(self, head_dim: int) -> "Tensor":
        """Radians per position of each rotated pair: float32 [head_dim / 2]."""
        import torch

        # float32 throughout, in this order: what the checkpoints were trained with.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        plain = 1.0 / self.theta**exponents
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        # Short waves stay, waves longer than the original context stretch, between them a blend.
        turns = self.original_context / (2 * math.pi / plain)
        span = self.high_freq_factor - self.low_freq_factor
        blend = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return (1 - blend) * plain / self.factor + blend * plain

    def angle_tables(self, head_dim: int, num_positions: int) -> "tuple[Tensor, Tensor]":
        """cos and sin for positions [0, num_positions): float32 [num_positions, head_dim / 2]."""
        import torch

        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, self._inverse_frequencies(head_dim))
        return angles.cos(), angles.sin()


def positive_float(value: object) -> float | None:
    """A number above 0 that a float holds; None for anything else. JSON has Infinity, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value <= sys.float_info.max else None


def _block(value: object, source: str) -> Mapping[str, object]:
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"{source}: the RoPE parameters must be an object, not {value!r}")
    return value or {}


def _kind_of(fields: Mapping[str, object]) -> object:
    return fields.get("rope_type") or fields.get("type") or "default"


def _says_no_more(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether whatever `one` says stands in `other`, too."""
    rest = {name: value for name, value in one.items() if name not in ("rope_type", "type")}
    return _kind_of(one) == _kind_of(other) and rest.items() <= other.items()


def rotate_(x_THD: "Tensor", cos_TR: "Tensor", sin_TR: "Tensor") -> None:
    """Rotate every head of `x_THD` in place by its position's angles (R = D / 2).

    Pair i is (x[i], x[i + R]): the order of the Hugging Face checkpoints.
    """
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
