"""What of the copy kernel can be seen without a GPU. That it copies, tests/device shows on one."""

import re
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from neuron_di_bindings import cuda_copy_kernel
from neuron_di_bindings.cuda_copy_kernel import CopyKernel, evened

SOURCE = files("neuron_di_bindings") / "copy_runs.ptx"
KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_it_is_assembled_without_spilling_a_register(tmp_path, architecture):
    triton = pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = subprocess.run(
        [assembler, "-v", f"-arch={architecture}", "-o", tmp_path / "copy.cubin", str(SOURCE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    assert registers <= 64  # four programs of 256 threads fit into a multiprocessor


def test_kernel_and_caller_agree_on_the_size_of_an_item():
    source = SOURCE.read_text(encoding="utf-8")
    size = cuda_copy_kernel._ITEM_BYTES
    assert f"mul.wide.u32 %begin, %part, {size};" in source
    last = size - 32 * cuda_copy_kernel.ALIGNMENT
    assert f"[%from+{last}]" in source
    assert f"%left, {last};" in source


@pytest.mark.parametrize(
    ("num_runs", "longest", "num_bytes", "is_taken"),
    [
        (2, 16, 32, True),
        (4096, 64 * KIB, 256 * MIB, True),
        (256, 2 * MIB, 512 * MIB, True),
        (100, 4 * KIB, 100 * 16, True),
        (16_384, 512 * MIB, 513 * MIB, False),  # one is long: all others' items would be empty
        (4, 1 << 44, 4 << 44, False),  # more items than a number of 32 bits counts
    ],
)
def test_it_takes_runs_that_are_about_as_long_as_each_other(num_runs, longest, num_bytes, is_taken):
    assert CopyKernel.takes(num_runs, longest, num_bytes) is is_taken


@pytest.mark.parametrize("kind", ["one_is_long", "fragments", "tiny", "odd"])
def test_runs_of_any_lengths_are_cut_to_what_it_takes(kind):
    rng = np.random.default_rng(3)
    lengths = {
        "one_is_long": np.array([64 * KIB] * 1000 + [1 << 31]),
        "fragments": 64 * KIB * rng.geometric(0.3, 1000),
        "tiny": np.array([1, 2, 3, 100 * KIB]),
        "odd": rng.integers(1, MIB, 300),
    }[kind].astype(np.uint64)
    ends = np.cumsum(lengths)
    sources, destinations = ends - lengths, ends[::-1].copy() + np.uint64(1 << 40)
    to, from_, cut = evened(destinations, sources, lengths)
    assert {row.dtype for row in (to, from_, cut)} == {np.dtype(np.uint64)}
    assert len(lengths) <= len(cut) <= 2 * len(lengths)
    assert CopyKernel.takes(len(cut), int(cut.max()), int(cut.sum()))
    starts = np.flatnonzero(np.isin(from_, sources))  # the sources lie one behind the other
    assert (from_[1:] == from_[:-1] + cut[:-1]).all()
    assert np.add.reduceat(cut, starts).tolist() == lengths.tolist()
    assert (to - from_ == (destinations - sources).repeat(np.diff([*starts, len(cut)]))).all()
