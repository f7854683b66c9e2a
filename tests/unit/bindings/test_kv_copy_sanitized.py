"""What is compiled for KV under the address and undefined-behaviour sanitizers."""

from pathlib import Path

import pytest
import sanitized

import neuron_di_bindings

SOURCE = Path(neuron_di_bindings.__file__).parent / "_kv_copy.c"

# Arrays of exactly the size that the copies may touch: one byte beyond is not ours.
SCRIPT = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
import numpy as np
from neuron_di_bindings import block_hash, block_runs, run_copy

loader = ExtensionFileLoader("_kv_copy", sys.argv[1])
library = module_from_spec(spec_from_loader("_kv_copy", loader))
for user in (block_hash, block_runs, run_copy):
    user._kv_copy, user._IS_COMPILED = library, True
excess = int(sys.argv[2])
rng = np.random.default_rng(3)

for total in [*rng.integers(1, 70_000, 150).tolist(), (8 << 20) + 77]:
    cuts = np.unique(rng.integers(0, total, rng.integers(1, 12)))
    starts = np.append(0, cuts[cuts > 0])
    lengths = np.diff(np.append(starts, total))
    order = rng.permutation(len(starts))
    ends = np.empty_like(starts)
    ends[order] = np.cumsum(lengths[order]) - lengths[order]
    source, destination = rng.integers(0, 256, total, np.uint8), np.zeros(total, np.uint8)
    lengths[order[-1]] += excess
    run_copy.copy_runs(
        destination_address=destination.ctypes.data, source_address=source.ctypes.data,
        destination_offsets=ends, source_offsets=starts, lengths=lengths)
    for start, end, length in zip(starts, ends, lengths):
        assert (destination[end:end + length] == source[start:start + length]).all()

for _ in range(150):
    dtypes = rng.choice(["float32", "bfloat16", "float16"], 2)
    spans, rows, tokens, dims = rng.integers(1, 5, 4).tolist()
    sides = []
    for dtype in dtypes:
        item = 4 if dtype == "float32" else 2
        axes = rng.permutation(4)
        shape = np.array([spans, rows, tokens, dims])
        dense = np.zeros(shape[axes], f"u{item}")
        dense[...] = rng.integers(0, 1 << 8 * item, dense.shape, f"u{item}")
        view = dense.transpose(np.argsort(axes))
        sides.append((dense, view.strides, run_copy.Grain(*view.strides[2:], dtype)))
    (source, theirs, grain), (destination, ours, target) = sides
    run_copy.place(
        destination_address=0, source_address=source.ctypes.data,
        destination_spans=np.arange(spans) * ours[0], source_spans=np.arange(spans) * theirs[0],
        span_tokens=np.full(spans, tokens) + excess,
        destination_rows=destination.ctypes.data + np.arange(rows) * ours[1],
        source_rows=np.arange(rows) * theirs[1], num_dims=dims,
        destination=target, source=grain)

for count in [1, 2, *rng.integers(1, 300, 150).tolist()]:
    for dtype in (list, tuple):
        assert block_runs.as_int64(dtype(range(count))).tolist() == list(range(count))
    ids, others = rng.permutation(count), np.arange(count) + rng.integers(0, 9)
    rows = block_runs.join_blocks(ids, others, 64)
    assert rows[2].sum() == count * 64
    unit = int(rng.choice([1, 3, 64, 4096]))
    lengths = rng.integers(1, 70, count) * unit
    starts = np.cumsum(np.append(0, lengths[:-1]))
    end, order = int(lengths.sum()), rng.permutation(count)
    rows = starts[order], starts[order], lengths[order]
    assert block_runs.are_sound(*rows, ids, end, end, count)
    assert not block_runs.are_sound(*rows, ids, end, end - 1, count)
    assert count < 2 or not block_runs.are_sound(*rows, ids, end, end, count - 1)
    assert len(block_hash.hash_blocks(rows[0].ctypes.data, ids, 8, 2**64 - 2)) == count
    if count > 1:
        rows[1][0] = rows[1][1]
        assert not block_runs.are_sound(*rows, ids, end, 2 * end, count)
    far = rng.integers(-2**63, 2**63 - 1, (3, count))
    assert not block_runs.are_sound(*far, ids, end, end, count)
    words = block_runs.Words(rng.integers(0, 1 << 56, count).astype(np.uint64))
    assert block_runs.are_words(words, ids, words.table[ids].tolist())
    source, destination = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    ones = np.ones(count, np.int64)
    assert run_copy.copy_promised(
        destination_address=destination.ctypes.data, source_address=source.ctypes.data,
        destination_offsets=ids, source_offsets=ids, lengths=ones,
        words=words, ids=ids, numbers=words.table[ids].tolist())

def check_refused(errors, call, *arguments):
    try:
        answer = call(*arguments)
    except errors:
        return
    raise AssertionError(f"{call.__name__}: {answer}")

words, one = block_runs.Words(np.arange(5, dtype=np.uint64)), np.zeros(1, np.int64)
byte = np.zeros(1, np.uint8)

def copy_promised(ids):
    return run_copy.copy_promised(
        destination_address=byte.ctypes.data, source_address=byte.ctypes.data,
        destination_offsets=one, source_offsets=one, lengths=one + 1,
        words=words, ids=ids, numbers=[0] * len(ids))

for far in (-1, 5, 2**60, 2**63 - 1, -2**63):
    assert not block_runs.are_below(np.array([0, far]), 5)
    for as_array in (list, tuple, np.array):
        ids = as_array([0, far])
        check_refused(IndexError, block_runs.are_words, words, ids, [0, 0])
        check_refused(IndexError, copy_promised, ids)
assert block_runs.are_below(np.arange(5), 5) and block_runs.are_below(one[:0], 0)
for numbers in ([], [0], [0, 0, 0]):  # for two ids
    assert not block_runs.are_words(words, np.zeros(2, np.int64), numbers)

narrow, two, none = np.zeros(5, np.int32), np.zeros(2, np.int64), np.zeros(0, np.int64)
UNSUITABLE = block_runs.UNSUITABLE
for table in (byte, narrow, np.zeros((1, 1), np.uint64), [0], None):
    check_refused(UNSUITABLE, library.are_words, table, one, [0], 0, 9)
    check_refused(UNSUITABLE, library.are_words, words.table, table, [0], 0, 9)
    check_refused(UNSUITABLE, library.are_below, table, 9)
    check_refused(UNSUITABLE, library.join_blocks, table, one, one, one, one, 64)
    check_refused(UNSUITABLE, library.read, [0], table)
    rows = [one, one, one]
    for number in range(3):
        wrong = [*rows[:number], table, *rows[number + 1:]]
        check_refused(UNSUITABLE, library.copy, 0, 0, *wrong)
        check_refused(UNSUITABLE, library.copy_promised, 0, 0, *wrong, words.table, one, [0], 0, 9)
        check_refused(UNSUITABLE, library.are_sound, *wrong, one, 9, 9, 9)
for other in (two, none):
    check_refused(ValueError, library.copy, 0, 0, one, other, one)
    check_refused(
        ValueError, library.copy_promised, 0, 0, one, one, other, words.table, one, [0], 0, 9)
    check_refused(ValueError, library.are_sound, one, other, one, one, 9, 9, 9)
    check_refused(ValueError, library.join_blocks, one, one, one, one, other, 64)
    check_refused(ValueError, library.read, [0], other)
check_refused(OverflowError, library.read, [1 << 70], one)
check_refused(BufferError, library.read, [1], bytes(8))
for placing in (b"", bytes(10), bytes(400), 5, None):
    check_refused(UNSUITABLE, library.place, placing)
print("whole")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return sanitized.build(SOURCE, tmp_path_factory.mktemp("sanitized"))


def test_random_copies_touch_nothing_that_is_not_theirs(library):
    done = sanitized.run(SCRIPT, library, 0)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_one_byte_too_many_is_found(library):
    done = sanitized.run(SCRIPT, library, 1)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "copy_runs" in done.stderr
