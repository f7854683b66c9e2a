"""The compiled copies under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import neuron_di_bindings

SOURCE = Path(neuron_di_bindings.__file__).parent / "kv_copy.c"

# Arrays of exactly the size that the copies may touch: one byte beyond is not ours.
SCRIPT = """
import ctypes, sys
import numpy as np
from neuron_di_bindings import run_copy

library = ctypes.CDLL(sys.argv[1])
run_copy.bind(library)
run_copy._library = lambda: library
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
print("whole")
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The library, and what to load before Python so that it can be loaded."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc")
    found = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():  # gcc prints the bare name of what it does not have
        pytest.skip("gcc has no address sanitizer")
    library = tmp_path_factory.mktemp("sanitized") / "kv_copy.so"
    flags = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-shared", "-fPIC"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    command = [compiler, *flags, *sanitizers, "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library, runtime


def run(sanitized, excess):
    library, runtime = sanitized
    # Leaks are Python's own business; its small blocks must come from malloc to be watched.
    environment = {
        **os.environ,
        "LD_PRELOAD": str(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library), str(excess)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=100,
    )


def test_random_copies_touch_nothing_that_is_not_theirs(sanitized):
    done = run(sanitized, 0)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_one_byte_too_many_is_found(sanitized):
    done = run(sanitized, 1)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "copy_runs" in done.stderr
