"""What moves where both ends are alike: whole blocks, but not the long tail of a slot."""

from dataclasses import replace

import numpy as np
import pytest

from neuron_di.errors import LocalProtocolError
from neuron_di.kv import KvLayout, whole_block_runs
from neuron_di.transfer.kv_plan import UNUSED_BYTES_MAX, kv_runs
from neuron_di.wire import SIGNAL_VERSION
from neuron_di_bindings.run_copy import copy_runs

# A row, one layer's and head's tokens of a block, of 64 KiB: 256 bytes each token.
SLOTS = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, block_size=256, dtype="float32")
TOKEN_BYTES = 256
CUT_BELOW = SLOTS.block_size - UNUSED_BYTES_MAX // TOKEN_BYTES + 1  # tokens of the last block


def as_lists(runs):
    return [each.tolist() for each in (runs.source_offsets, runs.destination_offsets, runs.lengths)]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, CUT_BELOW - 1, 256 + 1, 3 * 256 + 17])
def test_the_used_tokens_of_a_long_block_come_and_no_other_byte(num_tokens, num_ranks):
    layout = replace(SLOTS, num_ranks=num_ranks)
    sources, destinations = [5, 6, 2, 4], [1, 2, 3, 0]
    count = layout.num_blocks_for(num_tokens)
    runs = kv_runs(layout, layout, sources[:count], destinations[:count], num_tokens)
    source = np.random.default_rng(1).integers(1, 256, 8 * layout.block_bytes, np.uint8)
    arrived, expected = np.zeros((2, 4 * layout.block_bytes), np.uint8)
    copy_runs(
        destination_address=arrived.ctypes.data,
        source_address=source.ctypes.data,
        destination_offsets=runs.destination_offsets,
        source_offsets=runs.source_offsets,
        lengths=runs.lengths,
    )
    rows = 8, -1, layout.block_size, TOKEN_BYTES
    for place in range(count):
        num_used = min(layout.block_size, num_tokens - place * layout.block_size)
        to, from_ = expected.reshape(4, *rows[1:]), source.reshape(rows)
        to[destinations[place], :, :num_used] = from_[sources[place], :, :num_used]
    assert (arrived == expected).all()
    assert runs.num_bytes == num_tokens * 8 * TOKEN_BYTES


@pytest.mark.parametrize("num_tokens", [CUT_BELOW, 255, 256, 256 + CUT_BELOW, 512])
def test_a_short_tail_moves_with_its_block(num_tokens):
    count = SLOTS.num_blocks_for(num_tokens)
    runs = kv_runs(SLOTS, SLOTS, [3, 4][:count], [0, 1][:count], num_tokens)
    assert as_lists(runs) == as_lists(whole_block_runs(SLOTS, [3, 4][:count], [0, 1][:count]))


def test_blocks_of_few_tokens_move_whole():
    layout = replace(SLOTS, block_size=16)
    runs = kv_runs(layout, layout, [3, 4], [0, 1], 17)
    assert as_lists(runs) == [[3 * layout.block_bytes], [0], [2 * layout.block_bytes]]


@pytest.mark.parametrize(("sources", "destinations"), [([1], [1]), ([1, 2], [1]), ([1], [1, 2])])
def test_lists_that_do_not_fit_the_tokens_are_refused(sources, destinations):
    with pytest.raises(LocalProtocolError):
        kv_runs(SLOTS, SLOTS, sources, destinations, 257)


def test_workers_that_move_the_tails_of_slots_are_refused_at_the_handshake():
    """Theirs is signal protocol 3: a transfer would be of another number of bytes at their end."""
    whole = whole_block_runs(SLOTS, [1], [2])
    assert kv_runs(SLOTS, SLOTS, [1], [2], 1).num_bytes < whole.num_bytes
    assert SIGNAL_VERSION > 3
