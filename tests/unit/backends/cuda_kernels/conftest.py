"""Kernels run on the GPU where there is one, else in Triton's interpreter, on the CPU."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """The interpreter computes with NumPy, which warns of the NaN that tests put in its way."""
    with np.errstate(all="ignore"):
        yield
