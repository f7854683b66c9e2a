import pytest

from neuron_di.config import available_memory_bytes
from neuron_di.errors import ConfigError

MEMINFO = "MemTotal:       8000000 kB\nMemFree: 1 kB\nMemAvailable:    4000000 kB"
GIB = 1 << 30


def available_bytes(membership, files):
    """On a machine with these files of control groups."""
    below = {f"/sys/fs/cgroup/{name}": str(content) for name, content in files.items()}
    known = {"/proc/meminfo": MEMINFO, "/proc/self/cgroup": membership}
    return available_memory_bytes((known | below).get)


def test_without_a_limit_the_machine_counts():
    assert available_bytes("0::/a/b", {"a/b/memory.max": "max"}) == 4_000_000 * 1024
    assert available_memory_bytes({"/proc/meminfo": MEMINFO}.get) == 4_000_000 * 1024


def test_the_tightest_limit_up_to_the_root_counts():
    files = {
        "a/b/memory.max": "max",
        "a/memory.max": 2 * GIB,
        "a/memory.current": 3 * GIB // 2,
        "a/memory.stat": f"anon 5\ninactive_file {GIB // 4}",
    }
    assert available_bytes("0::/a/b", files) == 3 * GIB // 4


@pytest.mark.parametrize(("limit", "left"), [(GIB, GIB // 2), ((1 << 63) - 4096, 4_000_000 * 1024)])
def test_version_1_and_a_path_that_only_the_host_knows(limit, left):
    files = {
        "memory/memory.limit_in_bytes": limit,
        "memory/memory.usage_in_bytes": GIB // 2,
        "memory/memory.stat": "total_inactive_file 0",
    }
    assert available_bytes("5:cpu,memory:/docker/1234\n0::/x", files) == left


def test_over_the_limit_is_nothing_not_less():
    files = {"memory.max": GIB, "memory.current": 2 * GIB, "memory.stat": "inactive_file 0"}
    assert available_bytes("0::/", files) == 0


def test_a_machine_that_does_not_say_is_refused():
    with pytest.raises(ConfigError, match="does not say how much memory"):
        available_memory_bytes({}.get)


def test_this_machine_answers():
    assert available_memory_bytes() > 1 << 20
