"""Both ways to copy, against a plain loop."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_di_bindings import block_copy, cpu_kernels

NUM_BLOCKS = 12


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(cpu_kernels, "is_available", lambda: False)
    elif not cpu_kernels.is_available():
        pytest.skip("the kernels are not built")


def ids(values):
    return np.asarray(values, np.int32)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    source_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS),
    destination_ids=st.permutations(range(NUM_BLOCKS)),
    block_bytes=st.sampled_from([1, 7, 64, 4096]),
)
def test_each_block_arrives_and_no_other_changes(way, source_ids, destination_ids, block_bytes):
    source = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, block_bytes), np.uint8)
    destination = np.full_like(source, 255)
    expected = destination.copy()
    destination_ids = destination_ids[: len(source_ids)]
    for destination_id, source_id in zip(destination_ids, source_ids, strict=True):
        expected[destination_id] = source[source_id]
    block_copy.copy_blocks(
        destination_address=destination.ctypes.data,
        source_address=source.ctypes.data,
        destination_ids=ids(destination_ids),
        source_ids=ids(source_ids),
        block_bytes=block_bytes,
    )
    assert (destination == expected).all()


def test_adjacent_blocks(way):
    source = np.arange(NUM_BLOCKS * 8, dtype=np.uint8).reshape(NUM_BLOCKS, 8)
    destination = np.zeros_like(source)
    block_copy.copy_blocks(
        destination_address=destination.ctypes.data,
        source_address=source.ctypes.data,
        destination_ids=ids(range(2, 9)),
        source_ids=ids(range(4, 11)),
        block_bytes=8,
    )
    assert (destination[2:9] == source[4:11]).all()
    assert not destination[:2].any()
    assert not destination[9:].any()
