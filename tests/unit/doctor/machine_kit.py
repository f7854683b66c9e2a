"""Makes machines out of folders, programs out of scripts, and packages out of metadata."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from neuron_di.config import DoctorOptions
from neuron_di.doctor.checks import CheckFunction
from neuron_di.doctor.finding import Finding
from neuron_di.doctor.machine import Machine

MIB = 1 << 20
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1024                 1048576              files
Max locked memory         8388608              8388608              bytes
"""
MEMINFO = """MemTotal:       32000000 kB
MemAvailable:   30000000 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
STATUS = "Name:\tpython\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-7\n"
# As on a machine with nothing wrong; a test overlays what it is about.
FILES = {
    "/etc/os-release": 'NAME="Some Linux"\nPRETTY_NAME="Some Linux 7"\n',
    "/proc/sys/kernel/osrelease": "6.8.0-1021-aws\n",
    "/proc/meminfo": MEMINFO,
    "/proc/self/limits": LIMITS,
    "/proc/self/status": STATUS,
    "/proc/self/cgroup": "0::/\n",
    "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "/sys/devices/system/cpu/online": "0-7\n",
    "/dev/shm/.keep": "",
    "/tmp/.keep": "",
    "/var/cache/neuron/.keep": "",
}
ENVIRONMENT = {"PATH": "/nowhere", "TMPDIR": "/tmp", "HOME": "/var/cache/neuron"}


def make_machine(
    folder: Path,
    files: Mapping[str, str | None] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    package_path: Sequence[str] | None = None,
) -> Machine:
    """A machine whose root is `folder`: `FILES`, and over them `files`, of which None is absent."""
    for path, text in (FILES | dict(files or {})).items():
        if text is not None:
            file = folder / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return Machine(
        root=folder, environment=ENVIRONMENT | dict(environment or {}), package_path=package_path
    )


def make_package(
    folder: Path, name: str, version: str, *requires: str, extras: Sequence[str] = ()
) -> None:
    """An installed package's metadata, as pip leaves it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {text}" for text in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def make_program(folder: Path, name: str, script: str) -> None:
    """A program for a PATH of `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def found(
    check: CheckFunction, machine: Machine, options: DoctorOptions | None = None
) -> dict[str, Finding]:
    """What a check finds, by name; the names must differ."""
    findings = list(check(machine, options or DoctorOptions()))
    by_name = {finding.check: finding for finding in findings}
    assert len(by_name) == len(findings), [finding.check for finding in findings]
    return by_name
