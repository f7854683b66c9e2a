"""Tokens of a request that lie in one block at both ends of a transfer."""

from dataclasses import dataclass

import numpy as np

from neuron_di.kv.runs import Ints


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """One row per span: which of the request's blocks, from which of its tokens on, how many."""

    source_blocks: Ints  # places in the source's list of blocks
    source_tokens: Ints  # position in the block
    destination_blocks: Ints
    destination_tokens: Ints
    counts: Ints


def token_spans(
    num_tokens: int, source_size: int, destination_size: int, *, first_token: int = 0
) -> TokenSpans:
    """The fewest spans of `num_tokens` tokens, for blocks of these sizes.

    The source's first block begins with position `first_token` of the request, the destination's
    with position 0.
    """
    before = first_token % destination_size  # of its block's tokens lie before the first one
    starts = np.union1d(
        np.arange(0, num_tokens, source_size, dtype=np.int64),
        np.arange(-before, num_tokens, destination_size, dtype=np.int64),
    )
    starts = starts[starts >= 0]
    positions = starts + first_token
    return TokenSpans(
        starts // source_size,
        starts % source_size,
        positions // destination_size,
        positions % destination_size,
        np.diff(starts, append=num_tokens),
    )
