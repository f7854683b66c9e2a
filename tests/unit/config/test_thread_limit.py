"""How many threads a process may have, in one whose memory has no room for their stacks."""

import subprocess
import sys

from neuron_di.config import require_threads

SCRIPT = """
import resource, threading
from neuron_di.config import require_threads
from neuron_di.errors import ConfigError

with open("/proc/self/statm") as file:
    used_bytes = int(file.read().split()[0]) * resource.getpagesize()
threading.stack_size(256 << 20)
resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (700 << 20), resource.RLIM_INFINITY))
try:
    require_threads()
except ConfigError as error:
    print(error.message, threading.active_count(), sep="\\n")
"""


def test_too_few_are_said_with_the_limit_to_raise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, timeout=60, capture_output=True, text=True
    )
    words, num_left = done.stdout.splitlines()
    assert "threads can be started here" in words
    assert "ulimit -u, pids.max" in words
    assert num_left == "1"


def test_who_may_have_them_starts() -> None:
    require_threads(computes=True)
