import os

import pytest

from neuron_di.config import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def cores_of(tmp_path, membership, **files):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for path, text in files.items():
        file = tmp_path / "cgroup" / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return usable_cores(tmp_path / "proc", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("200000", 2), ("150000", 1), ("50000", 1), ("max", 8), ("6400000", 8), ("much", 8)],
)
def test_a_quota_counts_in_whole_cores(tmp_path, quota, cores):
    files = {"box__cpu.max": f"{quota} 100000\n"}
    assert cores_of(tmp_path, "0::/box\n", **files) == cores


def test_the_least_quota_up_to_the_root_counts(tmp_path):
    files = {"a__b__cpu.max": "400000 100000", "a__cpu.max": "300000 100000"}
    assert cores_of(tmp_path, "0::/a/b/c\n", **files) == 3


def test_the_first_version_of_cgroups_has_two_files(tmp_path):
    membership = "5:memory:/box\n4:cpu,cpuacct:/box\n"
    files = {"cpu__box__cpu.cfs_quota_us": "250000\n", "cpu__box__cpu.cfs_period_us": "50000\n"}
    assert cores_of(tmp_path, membership, **files) == 5
    (tmp_path / "cgroup/cpu/box/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(tmp_path / "proc", tmp_path / "cgroup") == 8


def test_without_cgroups_affinity_counts(tmp_path):
    assert usable_cores(tmp_path, tmp_path) == 8
    assert cores_of(tmp_path, "no such form") == 8
