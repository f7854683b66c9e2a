"""A process that used NIXL ends as it should, also where the host's libefa brings another libnl."""

import importlib.util
import subprocess
import sys

import pytest

if importlib.util.find_spec("nixl_cu12") is None:  # to import it changes how this process logs
    pytest.skip("NIXL is not installed", allow_module_level=True)

_LOADS_EFA = "import ctypes; ctypes.CDLL('libefa.so.1')"
_USES_NIXL = """
from neuron_di.transfer.nixl_agent import load_nixl
nixl = load_nixl()
agent = nixl.nixlAgent("a", nixl.nixlAgentConfig())
agent.getPluginParams("UCX")
agent.createBackend("UCX", {"ucx_error_handling_mode": "peer"})
"""


def end_of(script):
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stderr


@pytest.fixture(scope="module", autouse=True)
def _efa():
    code, error = end_of(_LOADS_EFA)
    if code:
        reason = error.strip().splitlines()[-1]
        pytest.skip(f"no libefa here, which Debian's ibverbs-providers has: {reason}")


def test_it_ends_without_a_fault():
    assert end_of(_USES_NIXL) == (0, "")


def test_by_itself_nixl_would_end_with_one():
    """Where this fails, NIXL or libefa has changed, and our loading of libnl is to be looked at."""
    by_itself = _USES_NIXL.replace(
        "from neuron_di.transfer.nixl_agent import load_nixl\nnixl = load_nixl()",
        "import nixl_cu12._bindings as nixl",
    )
    assert end_of(by_itself)[0] == -11
