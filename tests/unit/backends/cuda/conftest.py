"""The backend runs on the GPU where there is one, else in Triton's interpreter and on the simulator
of the CUDA runtime."""

import os

import pytest
import torch
from contract.fake_cuda import WHY_NOT, library_path

from neuron_di_bindings.cuda_runtime import PATH_VARIABLE

IS_SIMULATED = not torch.cuda.is_available()
if IS_SIMULATED:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    if IS_SIMULATED:
        if WHY_NOT is not None:
            pytest.skip(WHY_NOT)
        monkeypatch.setenv(PATH_VARIABLE, str(library_path()))
