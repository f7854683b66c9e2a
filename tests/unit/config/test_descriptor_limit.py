"""How many sockets a process may have, in a process of its own."""

import subprocess
import sys

import pytest

from neuron_di.config import connections_within

SCRIPT = """
import resource
from neuron_di.config import raise_descriptor_limit

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
most = min(most, 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
assert raise_descriptor_limit() == most
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


def test_it_is_raised_to_what_is_allowed() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)


@pytest.mark.parametrize(
    ("limit", "wanted", "within"),
    [(1 << 31, 4096, 4096), (4352, 4096, 4096), (4351, 4096, 4095), (300, 4096, 150), (64, 1, 1)],
)
def test_a_proxy_keeps_some_for_what_else_it_has_open(limit: int, wanted: int, within: int) -> None:
    assert connections_within(limit, wanted) == within
