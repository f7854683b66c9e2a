"""The host itself: system, cores, memory, limits and room on disks, whatever it computes with."""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from neuron_di.config import DoctorOptions, FrontOptions, connections_within
from neuron_di.config.control_group import core_quota, memory_left, memory_limit
from neuron_di.config.descriptor_limit import DESCRIPTORS_MIN
from neuron_di.doctor.amounts import counted, in_bytes
from neuron_di.doctor.finding import Fact, Finding, Grade, Need
from neuron_di.doctor.machine import Machine, Room

MEMORY_BYTES_MIN = 1 << 30  # torch and a small model, in two workers
_WORKERS = 2  # of the smallest server, with a thread each
DISK_BYTES_MIN = 1 << 30
SHARED_BYTES_MIN = 256 << 20
_CAN_LOCK_MEMORY = 1 << 14  # CAP_IPC_LOCK, in linux/capability.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """In its own unit; None: there is none. A process may raise `soft` up to `hard`."""

    soft: int | None
    hard: int | None


def check(machine: Machine, options: DoctorOptions) -> Iterator[Finding]:
    """Of everything one finding, OK where nothing is wrong."""
    system = _system(machine)
    yield system
    if system.grade is not Grade.FAILED:  # else there is no /proc, which says all of these
        yield _cores(machine)
        yield _memory(machine)
        yield _descriptors(machine)
        yield _locked_memory(machine)
    yield _shared_memory(machine)
    yield _huge_pages(machine)
    yield from _disks(machine)


def _system(machine: Machine) -> Finding:
    name = system_name(machine) or "a system without a name"
    kernel = machine.read("/proc/sys/kernel/osrelease")
    facts: dict[str, Fact] = {"name": name, "kernel": kernel or ""}
    if kernel is None:
        return Finding.failed(
            "host.system",
            f"{name} shows no Linux kernel in /proc",
            "Use Linux, with /proc mounted: workers map each other's memory through it.",
            facts=facts,
        )
    return Finding.ok("host.system", f"{name}, Linux {kernel}", facts=facts)


def _cores(machine: Machine) -> Finding:
    allowed = _in_ranges(_status(machine, "Cpus_allowed_list"))
    online = _in_ranges(machine.read("/sys/devices/system/cpu/online") or "") or allowed
    quota = core_quota(machine.read)
    facts: dict[str, Fact] = {"num_online": online, "num_allowed": allowed, "quota": quota}
    if quota is not None and quota < allowed:
        words = f"{counted(allowed, 'core')} may be used, but a control group gives time of "
        if quota < _WORKERS:
            return Finding.warning(
                "host.cores",
                f"{words}{quota:g} only: a prefill and a decode worker have a thread each at "
                "least, and both stand still when the time is used up",
                "Raise the container's CPU limit.",
                facts=facts,
            )
        return Finding.note(
            "host.cores",
            f"{words}{quota:g} only; `neuron-di worker` counts {int(quota)} where it is not given "
            "--threads",
            facts=facts,
        )
    if allowed < online:
        return Finding.note(
            "host.cores",
            f"{allowed} of {counted(online, 'core')} may be used; `neuron-di worker` counts "
            "all of them where it is not given --threads",
            facts=facts,
        )
    return Finding.ok("host.cores", f"{counted(allowed, 'core')} may be used", facts=facts)


def _memory(machine: Machine) -> Finding:
    meminfo = machine.read("/proc/meminfo") or ""
    total_bytes, available_bytes = _kib(meminfo, "MemTotal"), _kib(meminfo, "MemAvailable")
    limit_bytes = memory_limit(machine.read)
    words = f"{in_bytes(available_bytes)} of {in_bytes(total_bytes)} memory are available"
    if limit_bytes is not None and limit_bytes < total_bytes:
        left_bytes = memory_left(machine.read) or 0
        words += f"; a control group limits what is here to {in_bytes(limit_bytes)}, and "
        words += f"leaves {in_bytes(left_bytes)}"
        available_bytes = min(available_bytes, left_bytes)
    facts: dict[str, Fact] = {
        "total_bytes": total_bytes,
        "available_bytes": available_bytes,
        "limit_bytes": limit_bytes,
    }
    if available_bytes < MEMORY_BYTES_MIN:
        return Finding.warning(
            "host.memory",
            words,
            "Free some memory: two workers need 1 GiB before they have a model.",
            facts=facts,
        )
    return Finding.ok("host.memory", words, facts=facts)


def _descriptors(machine: Machine) -> Finding:
    limit = limit_of(machine, "Max open files")
    facts: dict[str, Fact] = {"soft": limit.soft, "hard": limit.hard}
    wanted = FrontOptions().connections_max
    num = wanted if limit.hard is None else connections_within(limit.hard, wanted)
    if limit.hard is not None and num < wanted:
        return Need(limit.hard < DESCRIPTORS_MIN).unmet(
            "host.descriptors",
            f"a process may have {limit.hard:,} files and sockets open: a proxy takes {num:,} "
            f"connections at most, where its default is {wanted:,}",
            "Raise the hard limit nofile (LimitNOFILE= of a systemd unit), or lower "
            "--connections-max; the soft limit is raised by the server itself.",
            facts=facts,
        )
    most = "any number of" if limit.hard is None else f"{limit.hard:,}"
    return Finding.ok(
        "host.descriptors", f"a process may have {most} files and sockets open", facts=facts
    )


def _locked_memory(machine: Machine) -> Finding:
    limit = limit_of(machine, "Max locked memory")
    adapters = machine.names("/sys/class/infiniband/*")
    is_exempt = bool(int(_status(machine, "CapEff") or "0", 16) & _CAN_LOCK_MEMORY)
    facts: dict[str, Fact] = {
        "soft_bytes": limit.soft,
        "is_exempt": is_exempt,
        "num_rdma_adapters": len(adapters),
    }
    words = "any amount of memory may be locked"
    if limit.soft is not None and not is_exempt:
        words = f"{in_bytes(limit.soft)} of memory may be locked"
    if limit.soft is not None and not is_exempt and adapters:
        return Finding.warning(
            "host.locked_memory",
            f"{words}, and memory that an RDMA adapter such as EFA moves counts as locked",
            "Set the limit memlock to unlimited for this user (LimitMEMLOCK=infinity of a "
            "systemd unit, --ulimit memlock=-1 of a container), and log in anew.",
            facts=facts,
        )
    return Finding.ok("host.locked_memory", words, facts=facts)


def _shared_memory(machine: Machine) -> Finding:
    room = machine.room("/dev/shm")  # noqa: S108 - to be looked at
    if room is None:
        return Finding.note(
            "host.shared_memory",
            "there is no /dev/shm; neuron-di needs none, libraries such as NIXL's UCX may",
            facts={"num_bytes": 0},
        )
    facts: dict[str, Fact] = {"num_bytes": room.num_bytes, "free_bytes": room.free_bytes}
    words = f"{in_bytes(room.free_bytes)} of {in_bytes(room.num_bytes)} are free in /dev/shm"
    if room.free_bytes < SHARED_BYTES_MIN:
        words += "; neuron-di needs none of it, libraries such as NIXL's UCX may"
        return Finding.note("host.shared_memory", words, facts=facts)
    return Finding.ok("host.shared_memory", words, facts=facts)


def _huge_pages(machine: Machine) -> Finding:
    meminfo = machine.read("/proc/meminfo") or ""
    num_pages, num_free = _number(meminfo, "HugePages_Total"), _number(meminfo, "HugePages_Free")
    page_bytes = _kib(meminfo, "Hugepagesize")
    transparent = machine.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", transparent)
    facts: dict[str, Fact] = {
        "num_pages": num_pages,
        "num_free": num_free,
        "page_bytes": page_bytes,
        "transparent": chosen[1] if chosen else "",
    }
    words = f"{counted(num_pages, 'huge page')} of {in_bytes(page_bytes)} reserved, {num_free} free"
    if num_pages == 0:
        words = "no huge pages are reserved"
        if machine.names("/sys/class/infiniband/*"):
            words += "; libfabric's EFA provider then takes small ones, of which an adapter can "
            words += "register fewer bytes (EFA's installer reserves some)"
            return Finding.note("host.huge_pages", words, facts=facts)
        words += ", and nothing here needs any"
    return Finding.ok("host.huge_pages", words, facts=facts)


def _disks(machine: Machine) -> Iterator[Finding]:
    environment = machine.environment
    temporary = environment.get("TMPDIR") or _temporary_folder()
    cache = environment.get("XDG_CACHE_HOME") or environment.get("HOME") or "/"
    if machine.room(temporary) is None:
        yield Finding.warning(
            "host.disk.temporary",
            "the folder that TMPDIR names is not there",
            "Make it, or unset TMPDIR.",
        )
    else:
        yield _disk(machine, "temporary", "temporary files", temporary, "TMPDIR")
    words = "the user's cache, of models and what is compiled,"
    yield _disk(machine, "cache", words, cache, "XDG_CACHE_HOME")


def _temporary_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written in any of several: say so of the usual one
        return "/tmp"  # noqa: S108


def _disk(machine: Machine, name: str, words: str, path: str, variable: str) -> Finding:
    """Of a folder, which may still have to be made."""
    folders = map(str, (PurePosixPath(path), *PurePosixPath(path).parents))
    folder = next((folder for folder in folders if machine.room(folder) is not None), "/")
    room = machine.room(folder) or Room(num_bytes=0, free_bytes=0)
    facts: dict[str, Fact] = {"free_bytes": room.free_bytes, "num_bytes": room.num_bytes}
    says = f"{in_bytes(room.free_bytes)} are free on the disk for {words}".rstrip(",")
    if not machine.may_write(folder):
        return Finding.warning(
            f"host.disk.{name}",
            f"this user may not write in the folder for {words}".rstrip(","),
            f"Name a folder of this user's with {variable}.",
            facts=facts,
        )
    if room.free_bytes < DISK_BYTES_MIN:
        return Finding.warning(
            f"host.disk.{name}",
            says,
            f"Free some room, or name a folder on a larger disk with {variable}.",
            facts=facts,
        )
    return Finding.ok(f"host.disk.{name}", says, facts=facts)


def system_name(machine: Machine) -> str:
    """As it calls itself; empty where it has no name."""
    text = machine.read("/etc/os-release") or ""
    named = re.search(r"""^PRETTY_NAME=["']?([^"'\n]+)["']?$""", text, re.MULTILINE)
    return named[1] if named else ""


def limit_of(machine: Machine, name: str) -> Limit:
    """By its name in /proc/self/limits, as in `Max open files`."""
    text = machine.read("/proc/self/limits") or ""
    found = re.search(rf"^{re.escape(name)}\s+(\w+)\s+(\w+)", text, re.MULTILINE)
    soft, hard = ("", "") if found is None else found.groups()
    return Limit(
        soft=int(soft) if soft.isdecimal() else None, hard=int(hard) if hard.isdecimal() else None
    )


def _status(machine: Machine, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\S+)$", machine.read("/proc/self/status") or "", re.MULTILINE)
    return found[1] if found else ""


def _in_ranges(text: str) -> int:
    """How many numbers `0-3,6` stands for."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text)
    return sum(int(last or first) - int(first) + 1 for first, last in parts)


def _number(meminfo: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+)", meminfo, re.MULTILINE)
    return int(found[1]) if found else 0


def _kib(meminfo: str, name: str) -> int:
    return _number(meminfo, name) << 10
