"""Kernels run on the GPU where there is one, else in Triton's interpreter, on the CPU."""

import os
from collections.abc import Iterator
from typing import Any

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


@pytest.fixture(autouse=True)
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's BLAS rounds a row otherwise by where it stands in a tile, on some processors, such as
    one with AVX2 and no AVX-512. Kernels rely on it that a GPU does not."""

    def product(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.einsum("...mk,...kn->...mn", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", product)
