"""A machine without Triton: everything else works, and the kernels say what is missing."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it fails
import neuron_di.backends, neuron_di.backends.cpu
from neuron_di.errors import ConfigError
try:
    import neuron_di.backends.cuda_kernels
except ConfigError as error:
    print(error)
"""


def printed_by(script):
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_error_names_the_extra():
    assert "pip install '.[cuda]'" in printed_by(SCRIPT)


def test_the_cpu_backend_loads_no_triton():
    script = "import sys, neuron_di.backends.cpu; print('triton' in sys.modules)"
    assert printed_by(script) == "False\n"


def test_whoever_imports_the_kernels_gets_all_of_their_names():
    pytest.importorskip("triton", reason="Triton, of the extra `dev`, is missing")
    from neuron_di.backends import cuda_kernels

    assert all(hasattr(cuda_kernels, name) for name in cuda_kernels.__all__)
