"""Both ways to copy, compiled and plain, against plain loops and torch's own conversions."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuron_di_bindings import block_runs, run_copy
from neuron_di_bindings.block_runs import Words
from neuron_di_bindings.run_copy import Grain

BITS = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
SIGNED = {"float32": np.int32, "bfloat16": np.int16, "float16": np.int16}
MEBIBYTE = 1 << 20
COMPILED = run_copy.is_compiled()

both_ways = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(run_copy, "_IS_COMPILED", False)
        monkeypatch.setattr(block_runs, "_IS_COMPILED", False)
    elif not COMPILED:
        pytest.skip("the compiled copies are not built")
    assert run_copy.is_compiled() == (request.param == "compiled")
    return request.param


def copy(source, destination, runs):
    """runs: (source offset, destination offset, length) each."""
    columns = np.array(runs, np.int64).reshape(-1, 3).T
    run_copy.copy_runs(
        destination_address=destination.ctypes.data,
        source_address=source.ctypes.data,
        source_offsets=columns[0],
        destination_offsets=columns[1],
        lengths=columns[2],
    )


def copied(source, destination, runs):
    """What a copy makes of the destination: slice by slice."""
    expected = destination.copy()
    for start, end, length in runs:
        expected[end : end + length] = source[start : start + length]
    return expected


def noise(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


@both_ways
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 63, 64, 65, 1024, 4096, 9000]), max_size=8),
    data=st.data(),
)
def test_each_run_arrives_and_no_other_byte_changes(lengths, data):
    gaps = data.draw(st.lists(st.integers(0, 70), min_size=len(lengths), max_size=len(lengths)))
    source, destination = noise(20_000), noise(100_000, 1)
    runs, end = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        start = data.draw(st.integers(0, len(source) - length))
        runs.append((start, end + gap, length))
        end += gap + length
    runs = data.draw(st.permutations(runs))
    expected = copied(source, destination, runs)
    copy(source, destination, runs)
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize("shift", [0, 1, 32])
@pytest.mark.parametrize(
    "lengths",
    [
        [9 * MEBIBYTE],
        [9 * MEBIBYTE + 4097],
        [16384] * 600,
        [4096] * 2100,
        [12288 + 33] * 700,
        [5, 8 * MEBIBYTE, 63, 8191],
    ],
    ids=["one", "one-odd", "16KiB", "4KiB", "odd", "mixed"],
)
def test_large_transfers_arrive_whatever_their_alignment(lengths, shift):
    """From a size on they are stored past the cache, which is another path."""
    source = noise(sum(lengths) + 3)
    gap = 64
    destination = noise(sum(lengths) + gap * len(lengths) + 128, 1)
    base = -destination.ctypes.data % 64 + shift
    order = np.random.default_rng(2).permutation(len(lengths))
    starts = np.cumsum([0, *lengths[:-1]]) + 3
    runs, end = [], base
    for i in order:
        runs.append((int(starts[i]), end, lengths[i]))
        end += -(-lengths[i] // gap) * gap
    expected = copied(source, destination, runs)
    copy(source, destination, runs)
    assert np.array_equal(destination, expected)


def test_nothing_is_copied_from_nowhere():
    none = np.empty(0, np.int64)
    run_copy.copy_runs(
        destination_address=0,
        source_address=0,
        destination_offsets=none,
        source_offsets=none,
        lengths=none,
    )


def test_lists_that_are_not_contiguous_are_read_as_they_are():
    source, destination = noise(64), np.zeros(64, np.uint8)
    table = np.array([[0, 10, 4], [20, 30, 5]], np.int64)
    expected = copied(source, destination, table.tolist())
    copy(source, destination, table)
    assert np.array_equal(destination, expected)


@pytest.mark.parametrize("step", [1, 2], ids=["contiguous", "not-contiguous"])
@pytest.mark.parametrize("numbers", [[7, 8], np.array([7, 8]), [np.int64(7), np.uint64(8)]])
def test_a_promise_is_checked_after_the_copy(step, numbers):
    source, words = noise(64), np.array([0, 7, 0, 8], np.uint64)
    columns = np.zeros((3, 2 * step), np.int64)[:, ::step]
    columns[:] = np.array([[0, 20], [10, 30], [4, 5]])
    expected = copied(source, np.zeros(64, np.uint8), columns.T.tolist())

    def copy_promised(ids, numbers):
        destination = np.zeros(64, np.uint8)
        is_kept = run_copy.copy_promised(
            destination_address=destination.ctypes.data,
            source_address=source.ctypes.data,
            source_offsets=columns[0],
            destination_offsets=columns[1],
            lengths=columns[2],
            words=Words(words),
            ids=ids,
            numbers=numbers,
        )
        assert np.array_equal(destination, expected)
        return is_kept

    assert copy_promised([1, 3], numbers)
    assert copy_promised(np.array([1, 3]), numbers)
    assert not copy_promised(np.array([1, 2]), numbers)
    assert not copy_promised(np.array([1]), numbers)
    words[3] += 1
    assert not copy_promised(np.array([1, 3]), numbers)
    with pytest.raises(IndexError):
        copy_promised(np.array([1, 4]), numbers)


def converted(bits, source, destination):
    """By place(), all as one row of one span."""
    count = len(bits)
    bits = np.ascontiguousarray(bits, BITS[source])
    out = np.zeros(count, BITS[destination])
    zero = np.zeros(1, np.int64)
    run_copy.place(
        destination_address=out.ctypes.data,
        source_address=bits.ctypes.data,
        destination_spans=zero,
        source_spans=zero,
        span_tokens=np.full(1, count, np.int64),
        destination_rows=zero,
        source_rows=zero,
        num_dims=1,
        destination=Grain(out.itemsize, out.itemsize, destination),
        source=Grain(bits.itemsize, bits.itemsize, source),
    )
    return out


def by_torch(bits, source, destination):
    numbers = torch.from_numpy(bits.view(SIGNED[source]).copy()).view(getattr(torch, source))
    return (
        numbers.float()
        .to(getattr(torch, destination))
        .view(getattr(torch, f"int{8 * BITS[destination]().itemsize}"))
        .numpy()
        .view(BITS[destination])
    )


def is_nan(bits, dtype):
    return torch.from_numpy(bits.view(SIGNED[dtype]).copy()).view(getattr(torch, dtype)).isnan()


def interesting(dtype):
    """All numbers of two bytes; of four, those around every rounding and every border."""
    if dtype != "float32":
        return np.arange(1 << 16, dtype=np.uint16)
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    grid = (upper[:, None] | lower.astype(np.uint32)).ravel()
    return np.concatenate((grid, np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)))


@pytest.mark.parametrize("source", BITS)
@pytest.mark.parametrize("destination", BITS)
def test_numbers_are_rounded_as_torch_rounds_them(source, destination):
    bits = interesting(source)
    result, expected = converted(bits, source, destination), by_torch(bits, source, destination)
    nan = is_nan(bits, source)
    assert is_nan(result, destination).equal(nan)
    assert np.array_equal(result[~nan], expected[~nan])
    if source == destination:
        assert np.array_equal(result, bits)


@pytest.mark.parametrize("num_dims", [0, 4])
@pytest.mark.parametrize("stride", [2, 8], ids=["following", "apart"])
def test_a_span_of_no_tokens_moves_nothing(num_dims, stride):
    source, destination = noise(64), noise(64, 1)
    expected = destination.copy()
    tokens = np.array([0, 1 if num_dims else 5], np.int64)
    expected[8 : 8 + 2 * num_dims] = source[8 : 8 + 2 * num_dims]
    spans, zero = np.array([32, 8], np.int64), np.zeros(1, np.int64)
    run_copy.place(
        destination_address=destination.ctypes.data,
        source_address=source.ctypes.data,
        destination_spans=spans,
        source_spans=spans,
        span_tokens=tokens,
        destination_rows=zero,
        source_rows=zero,
        num_dims=num_dims,
        destination=Grain(stride, 2, "float16"),
        source=Grain(stride, 2, "float16"),
    )
    assert np.array_equal(destination, expected)


@both_ways
@given(data=st.data())
def test_vectors_of_any_strides_go_where_they_belong(data):
    """Spans and rows, tokens before dims or after, with or without conversion."""
    dims, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    tokens = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dtypes = [data.draw(st.sampled_from(list(BITS))) for _ in range(2)]
    arrays, spans, offsets, grains, views = [], [], [], [], []
    for seed, dtype in enumerate(dtypes):
        item = BITS[dtype]().itemsize
        array = noise(3 * rows * max(tokens) * dims * item * 2, seed).view(BITS[dtype])
        shape = (len(tokens), rows, max(tokens), dims)
        order = data.draw(st.permutations(range(4)))
        dense = array[: int(np.prod(shape))].reshape([shape[axis] for axis in order])
        view = dense.transpose(np.argsort(order))
        arrays.append(array)
        views.append(view)
        spans.append(np.arange(len(tokens), dtype=np.int64) * view.strides[0])
        offsets.append(np.arange(rows, dtype=np.int64) * view.strides[1])
        grains.append(Grain(view.strides[2], view.strides[3], dtype))
    before = arrays[1].copy()
    expected = np.lib.stride_tricks.as_strided(before, views[1].shape, views[1].strides)
    for span, count in enumerate(tokens):
        part = np.ascontiguousarray(views[0][span, :, :count])
        numbers = converted(part.ravel(), *dtypes)
        expected[span, :, :count] = numbers.reshape(part.shape)
    run_copy.place(
        destination_address=arrays[1].ctypes.data,
        source_address=arrays[0].ctypes.data,
        destination_spans=spans[1],
        source_spans=spans[0],
        span_tokens=np.array(tokens, np.int64),
        destination_rows=offsets[1],
        source_rows=offsets[0],
        num_dims=dims,
        destination=grains[1],
        source=grains[0],
    )
    assert np.array_equal(arrays[1], before)
