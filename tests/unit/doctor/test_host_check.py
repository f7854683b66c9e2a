"""What is said of hosts: their files make them."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_kit import LIMITS, MEMINFO, STATUS, found, make_machine

from neuron_di.config import DoctorOptions
from neuron_di.config.control_group import core_quota, memory_limit
from neuron_di.doctor.finding import Finding, Grade
from neuron_di.doctor.host import Limit, check, limit_of
from neuron_di.doctor.machine import Machine
from neuron_di.doctor.runner import run_apart

ADAPTER = {"/sys/class/infiniband/rdmap0s6/node_type": "4: <unknown>\n"}


def test_a_machine_without_troubles_is_ok_in_all_respects(tmp_path: Path) -> None:
    findings = found(check, make_machine(tmp_path))
    assert {each.grade for each in findings.values()} == {Grade.OK}
    assert findings["host.system"].says == "Some Linux 7, Linux 6.8.0-1021-aws"
    assert findings["host.cores"].facts == {"num_online": 8, "num_allowed": 8, "quota": None}
    assert findings["host.memory"].facts["total_bytes"] == 32_000_000 << 10
    assert findings["host.descriptors"].facts == {"soft": 1024, "hard": 1_048_576}


def test_this_machine_is_understood() -> None:
    findings = found(check, Machine())
    assert findings["host.cores"].facts["num_allowed"]
    assert findings["host.memory"].facts["available_bytes"]
    assert findings["host.descriptors"].facts["soft"]
    assert findings["host.disk.temporary"].facts["num_bytes"]


def test_a_system_without_proc_is_none_of_ours(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/proc/sys/kernel/osrelease": None})
    findings = found(check, machine)
    assert findings["host.system"].grade is Grade.FAILED
    assert not findings.keys() & {"host.cores", "host.memory", "host.descriptors"}  # not 0 of them


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"/sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
        (  # a unit of systemd below a slice with less
            {
                "/proc/self/cgroup": "0::/system.slice/neuron.service\n",
                "/sys/fs/cgroup/system.slice/neuron.service/cpu.max": "800000 100000",
                "/sys/fs/cgroup/system.slice/cpu.max": "300000 100000",
            },
            3.0,
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        (  # the same of version 1
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/system.slice/neuron.service\n0::/user\n",
                "/sys/fs/cgroup/cpu/system.slice/neuron.service/cpu.cfs_quota_us": "250000",
                "/sys/fs/cgroup/cpu/system.slice/neuron.service/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        ({"/sys/fs/cgroup/cpu.max": "nonsense"}, None),
        ({}, None),
    ],
)
def test_a_quota_of_either_version_is_read(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert core_quota(make_machine(tmp_path, files).read) == quota


def test_less_time_than_cores_is_told_and_how_many_threads_a_worker_has(tmp_path: Path) -> None:
    finding = found(check, make_machine(tmp_path, {"/sys/fs/cgroup/cpu.max": "250000 100000"}))
    cores = finding["host.cores"]
    assert cores.grade is Grade.NOTE  # workers count it: nothing is to be mended
    assert "time of 2.5 only; `neuron-di worker` counts 2 where" in cores.says


def test_less_time_than_two_workers_need_is_a_trouble(tmp_path: Path) -> None:
    finding = found(check, make_machine(tmp_path, {"/sys/fs/cgroup/cpu.max": "150000 100000"}))
    cores = finding["host.cores"]
    assert cores.grade is Grade.WARNING
    assert "time of 1.5 only" in cores.says
    assert "Raise the container's CPU limit" in cores.mend


def test_as_much_time_as_cores_is_none(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/sys/fs/cgroup/cpu.max": "800000 100000"})
    assert found(check, machine)["host.cores"].grade is Grade.OK


def test_cores_that_may_not_be_used_are_told(tmp_path: Path) -> None:
    status = STATUS.replace("0-7", "0-1,4,6-7")
    cores = found(check, make_machine(tmp_path, {"/proc/self/status": status}))["host.cores"]
    assert cores.grade is Grade.NOTE
    assert cores.says.startswith("5 of 8 cores may be used")


@pytest.mark.parametrize(
    ("path", "text", "limit"),
    [
        ("/sys/fs/cgroup/memory.max", "max", None),
        ("/sys/fs/cgroup/memory.max", "1073741824", 1 << 30),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "536870912", 1 << 29),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712", None),
        ("/sys/fs/cgroup/memory/a.slice/memory.limit_in_bytes", "536870912", 1 << 29),
    ],
)
def test_a_limit_of_memory_of_either_version_is_read(
    tmp_path: Path, path: str, text: str, limit: int | None
) -> None:
    files = {"/proc/self/cgroup": "9:memory:/a.slice/b.service\n", path: text}
    assert memory_limit(make_machine(tmp_path, files).read) == limit


def test_memory_that_does_not_suffice_is_a_trouble(tmp_path: Path) -> None:
    little = MEMINFO.replace("30000000", "900000")
    memory = found(check, make_machine(tmp_path / "a", {"/proc/meminfo": little}))["host.memory"]
    assert memory.grade is Grade.WARNING
    machine = make_machine(tmp_path / "b", {"/sys/fs/cgroup/memory.max": str(900 << 20)})
    memory = found(check, machine)["host.memory"]
    assert memory.grade is Grade.WARNING
    assert "limits what is here to 900 MiB" in memory.says
    group = {"memory.max": str(3 << 30), "memory.current": str(2500 << 20)}
    files = {f"/sys/fs/cgroup/{name}": text for name, text in group.items()}
    memory = found(check, make_machine(tmp_path / "d", files))["host.memory"]
    assert memory.grade is Grade.WARNING  # others of the group have most of it
    assert "limits what is here to 3 GiB, and leaves 572 MiB" in memory.says
    machine = make_machine(tmp_path / "c", {"/sys/fs/cgroup/memory.max": str(2 << 30)})
    assert found(check, machine)["host.memory"].grade is Grade.OK


def test_limits_are_read_by_name(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/proc/self/limits": LIMITS.replace("8388608", "unlimited")})
    assert limit_of(machine, "Max open files") == Limit(soft=1024, hard=1_048_576)
    assert limit_of(machine, "Max locked memory") == Limit(soft=None, hard=None)
    assert limit_of(machine, "Max nothing") == Limit(soft=None, hard=None)


def test_only_the_hard_limit_of_descriptors_matters(tmp_path: Path) -> None:
    """The server raises the soft one."""
    limits = LIMITS.replace("1048576", "4096   ")
    few = found(check, make_machine(tmp_path, {"/proc/self/limits": limits}))["host.descriptors"]
    assert few.grade is Grade.WARNING
    assert "4,096 files" in few.says
    assert "3,840 connections" in few.says
    limits = LIMITS.replace("1048576", "63     ")
    none = found(check, make_machine(tmp_path / "63", {"/proc/self/limits": limits}))
    assert none["host.descriptors"].grade is Grade.FAILED, "nothing of ours starts"


def test_locked_memory_matters_where_an_adapter_needs_it(tmp_path: Path) -> None:
    locked = found(check, make_machine(tmp_path / "a", ADAPTER))["host.locked_memory"]
    assert locked.grade is Grade.WARNING
    assert locked.says.startswith("8 MiB of memory may be locked")
    may = STATUS.replace("0000000000000000", "0000000000004000")  # CAP_IPC_LOCK
    machine = make_machine(tmp_path / "b", ADAPTER | {"/proc/self/status": may})
    assert found(check, machine)["host.locked_memory"].grade is Grade.OK
    free = LIMITS.replace("8388608  ", "unlimited")
    machine = make_machine(tmp_path / "c", ADAPTER | {"/proc/self/limits": free})
    assert found(check, machine)["host.locked_memory"].grade is Grade.OK


def test_huge_pages_matter_where_an_adapter_may_use_them(tmp_path: Path) -> None:
    assert found(check, make_machine(tmp_path / "a", ADAPTER))["host.huge_pages"].grade is (
        Grade.NOTE
    )
    reserved = MEMINFO.replace("Total:       0", "Total:    5128")
    machine = make_machine(tmp_path / "b", ADAPTER | {"/proc/meminfo": reserved})
    pages = found(check, machine)["host.huge_pages"]
    assert pages.grade is Grade.OK
    assert pages.says == "5,128 huge pages of 2 MiB reserved, 0 free"


def test_no_shared_memory_is_a_note(tmp_path: Path) -> None:
    machine = make_machine(tmp_path, {"/dev/shm/.keep": None})
    assert found(check, machine)["host.shared_memory"].grade is Grade.NOTE


def test_folders_of_the_environment_are_looked_at(tmp_path: Path) -> None:
    environment = {"TMPDIR": "/gone", "XDG_CACHE_HOME": "/var/cache/to/be/made"}
    findings = found(check, make_machine(tmp_path, environment=environment))
    assert findings["host.disk.temporary"].grade is Grade.WARNING
    assert "TMPDIR" in findings["host.disk.temporary"].mend
    assert findings["host.disk.cache"].grade is Grade.OK
    assert findings["host.disk.cache"].facts["num_bytes"]


def test_where_no_temporary_file_can_be_made_is_no_bug_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is looked for anew
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    machine = make_machine(tmp_path, environment={"TMPDIR": ""})
    assert found(check, machine)["host.disk.temporary"].facts["num_bytes"]


@pytest.mark.parametrize("variable", ["TMPDIR", "HOME"])
def test_a_folder_that_this_user_may_not_write_in_is_a_trouble(
    tmp_path: Path, variable: str
) -> None:
    machine = make_machine(tmp_path, {"/kept/.keep": ""}, environment={variable: "/kept"})
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            os.chmod(folder, folder.stat().st_mode | 0o011)  # another user looks at it
    (tmp_path / "kept").chmod(0o555)

    def as_a_user() -> Iterator[Finding]:
        if os.geteuid() == 0:
            os.setuid(65_534)
        return check(machine, DoctorOptions())

    findings = {each.check: each for each in run_apart(as_a_user, name="host", timeout_s=60)}
    name = "host.disk.temporary" if variable == "TMPDIR" else "host.disk.cache"
    assert findings[name].grade is Grade.WARNING
    assert findings[name].says.startswith("this user may not write in the folder for")
