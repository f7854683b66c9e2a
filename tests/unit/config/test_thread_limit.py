"""How many threads a process may have, in one whose memory has no room for their stacks."""

import subprocess
import sys

import pytest

from neuron_di.config import require_threads
from neuron_di.errors import ConfigError

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


def test_what_a_tokenizer_is_told_to_start_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Thread.start", _refused)
    monkeypatch.setenv("RAYON_NUM_THREADS", "5")
    with pytest.raises(ConfigError, match="at least 13:"):
        require_threads(computes=True)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    with pytest.raises(ConfigError, match="at least 8:"):
        require_threads(computes=True)


def _refused(_: object) -> None:
    raise RuntimeError("can't start new thread")
