"""From landing memory to where attention reads it: a local copy of any strides and formats.

A Placement says what a device's own kernel has to do; where the tensors are host memory,
`place_on_host` does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neuron_di.kv.geometry import Strides
from neuron_di.kv.runs import Ints, Memory
from neuron_di_bindings.run_copy import Grain, place


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPart:
    """Keys, or values. For every span s, row r and token t < span_tokens[s], dim by dim: from
    landing_spans[s] + landing_rows[r] of the landing memory to destination_spans[s] +
    destination_rows[r] of tensor destination_tensors[r], and from there on by the strides."""

    landing_spans: Ints  # bytes, as all that follow
    destination_spans: Ints
    span_tokens: Ints
    landing_rows: Ints
    destination_tensors: Ints
    destination_rows: Ints
    landing_strides: Strides
    destination_strides: Strides


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Every number of the destination, once. Formats differ where numbers are converted."""

    parts: tuple[PlacementPart, ...]
    num_dims: int
    landing_dtype: str
    destination_dtype: str


def place_on_host(placement: Placement, landing: Memory, tensors: Sequence[Memory]) -> None:
    """Carry it out. The memories are as large as the plan's geometries say."""
    addresses = np.array([tensor.address for tensor in tensors], np.int64)
    for part in placement.parts:
        to, from_ = part.destination_strides, part.landing_strides
        place(
            destination_address=0,
            source_address=landing.address,
            destination_spans=part.destination_spans,
            source_spans=part.landing_spans,
            span_tokens=part.span_tokens,
            destination_rows=addresses[part.destination_tensors] + part.destination_rows,
            source_rows=part.landing_rows,
            num_dims=placement.num_dims,
            destination=Grain(to.token, to.dim, placement.destination_dtype),
            source=Grain(from_.token, from_.dim, placement.landing_dtype),
        )
