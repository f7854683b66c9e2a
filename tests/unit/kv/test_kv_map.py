"""AWS's kv_map: what NxDI makes, and what is refused before anything is allocated by it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_di.errors import ConfigError
from neuron_di.kv import KvMap


def document(heads, **more):
    return json.dumps({"version": "0.1", "heads": heads, **more}).encode()


@pytest.mark.parametrize(
    ("num_ranks", "num_kv_heads", "num_heads", "expected"),
    [
        (1, 2, 4, ((0, 1),)),
        (2, 4, 8, ((0, 1), (2, 3))),
        (4, 2, 4, ((0,), (0,), (1,), (1,))),  # replicated to the number of ranks
        (
            3,
            2,
            4,
            ((0, 0), (1, 1), (-1, -1)),
        ),  # a replica per attention head: 4 on 3 ranks, padded to 6
        (4, 6, 6, ((0, 1), (2, 3), (4, 5), (-1, -1))),  # no shared heads: padded
    ],
)
def test_heads_are_shared_as_nxdi_shares_them(num_ranks, num_kv_heads, num_heads, expected):
    kv_map = KvMap.of_tensor_parallel(num_ranks, num_kv_heads, num_heads)
    assert kv_map.heads == expected
    assert kv_map.num_kv_heads == num_kv_heads


@given(num_ranks=st.integers(1, 64), num_kv_heads=st.integers(1, 64), per_head=st.integers(1, 8))
def test_a_map_survives_its_file(num_ranks, num_kv_heads, per_head):
    kv_map = KvMap.of_tensor_parallel(num_ranks, num_kv_heads, num_kv_heads * per_head)
    assert len(kv_map.heads) == num_ranks
    assert kv_map.num_kv_heads == num_kv_heads
    assert KvMap.decode(kv_map.encode()) == kv_map


def test_ranks_are_read_by_number_in_any_order():
    heads = {str(rank): [rank] for rank in reversed(range(12))}
    kv_map = KvMap.decode(document(heads, seq_ids={str(rank): [rank] for rank in range(12)}))
    assert kv_map.heads == tuple((rank,) for rank in range(12))
    assert kv_map.seq_ids == kv_map.heads
    assert KvMap.decode(kv_map.encode()) == kv_map


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        document({"0": [0]}, version="0.2"),
        document({}),
        document({"0": []}),
        document({"0": [0], "2": [1]}),
        document({"1": [0]}),
        document({"00": [0]}),
        document({"-1": [0]}),
        document({"0": [0], " 1": [1]}),
        document({"0": [0, 1], "1": [2]}),
        document({"0": [0], "1": [2]}),
        document({"0": [-1]}),
        document({"0": [-2]}),
        document({"0": [0.5]}),
        document({"0": ["0"]}),
        document({"0": [True]}),
        document({"0": [1 << 70]}),
        document({"0": [4096]}),
        document({"0": list(range(5000))}),
        document({str(rank): [rank] for rank in range(257)}),
        document({"0": [0]}, seq_ids={"0": [0], "1": [1]}),
        document({"0": [0], "1": [0]}, seq_ids={"0": [0], "1": [1, 2]}),
        document({"0": [0]}, seq_ids={"0": [-1]}),
        document({"0": [0]}, seq_ids={"0": [1 << 63]}),
        document({"0": [0]}, tp_size=1 << 60),
        document({"0": [0]}) + b" " * (1 << 20),
    ],
    ids=range(30),
)
def test_what_is_no_whole_map_is_refused(data):
    with pytest.raises(ConfigError):
        KvMap.decode(data)


@pytest.mark.parametrize(
    ("num_ranks", "num_kv_heads", "num_heads"), [(0, 1, 1), (1, 0, 1), (-1, 1, 1), (2, 3, 4)]
)
def test_a_model_that_cannot_be_is_refused(num_ranks, num_kv_heads, num_heads):
    with pytest.raises(ConfigError):
        KvMap.of_tensor_parallel(num_ranks, num_kv_heads, num_heads)
