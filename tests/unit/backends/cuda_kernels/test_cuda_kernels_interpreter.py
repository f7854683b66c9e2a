"""The interpreter's numbers must be the device's, or tests of 16-bit kernels prove nothing."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")

from neuron_di.backends.cuda_kernels.interpreter import _from_bfloat16, _to_bfloat16


def test_bfloat16_is_rounded_as_torch_rounds_it():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint64)
    halves = np.arange(0x3F800000, 0x3F840000, 0x8000, dtype=np.uint64)  # between two, and on one
    ends = np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0, 0x80000000, 1], np.uint64)
    values = np.concatenate([bits, halves, ends]).astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    wanted = torch.from_numpy(values).bfloat16()
    assert _to_bfloat16(values).tolist() == wanted.view(torch.uint16).tolist()
    assert _from_bfloat16(_to_bfloat16(values)).tolist() == wanted.float().tolist()


def test_nan_stays_nan():
    values = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(_from_bfloat16(_to_bfloat16(values))).all()
