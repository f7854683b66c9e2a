import os

import pytest

from neuron_di.config import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000", 2), ("150000", 1), ("50000", 1), ("max", 8), ("6400000", 8), ("much", 8)],
)
def test_a_quota_counts_in_whole_cores(quota, cores):
    files = {"/proc/self/cgroup": "0::/box", "/sys/fs/cgroup/box/cpu.max": f"{quota} 100000"}
    assert usable_cores(files.get) == cores


NESTED = {
    "/proc/self/cgroup": "0::/a/b/c",
    "/sys/fs/cgroup/a/b/cpu.max": "400000 100000",
    "/sys/fs/cgroup/a/cpu.max": "300000 100000",
}
FIRST_VERSION = {
    "/proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
    "/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000",
    "/sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "50000",
}
NO_QUOTA = FIRST_VERSION | {"/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1"}


@pytest.mark.parametrize(("files", "cores"), [(NESTED, 3), (FIRST_VERSION, 5), (NO_QUOTA, 8)])
def test_the_least_quota_up_to_the_root_counts_in_both_versions(files, cores):
    assert usable_cores(files.get) == cores


def test_without_control_groups_affinity_counts():
    assert usable_cores({}.get) == 8
    assert usable_cores({"/proc/self/cgroup": "no such form"}.get) == 8


def test_this_machine_has_a_core():
    assert 1 <= usable_cores() <= 8
