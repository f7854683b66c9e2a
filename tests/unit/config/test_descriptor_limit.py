"""How many sockets a process may have, in a process of its own."""

import subprocess
import sys

SCRIPT = """
import resource
from neuron_di.config import raise_descriptor_limit

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
most = min(most, 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_descriptor_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""


def test_it_is_raised_to_what_is_allowed() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
