"""Who listens on a port of this machine, as far as this user may see it."""

import re
from dataclasses import dataclass
from os.path import basename

from neuron_di.doctor.machine import Machine

_LISTENS = "0A"  # TCP_LISTEN, in include/net/tcp_states.h
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_PACKAGE = "neuron_di"
_PYTHON = re.compile(r"python[0-9.]*")
_WITH_A_WORD = ("-X", "-W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process. `pid` is None where it is another user's, and then so is its name.

    `perhaps_pid` is then a server like this one of the user whose the socket is: it may be that.
    """

    pid: int | None = None
    name: str = ""
    is_ours: bool = False  # a process of a server like this one
    perhaps_pid: int | None = None

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"{self.name} (pid {self.pid})"


def listener_on(machine: Machine, port: int) -> Listener | None:
    """Whoever listens on a TCP port, at any address; None where nobody does."""
    owners = {
        fields[9]: fields[7]
        for table in _TABLES
        for fields in map(str.split, (machine.read(table) or "").splitlines()[1:])
        if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].split(":")[1], 16) == port
    }
    if not owners:
        return None
    sockets = {f"socket:[{inode}]" for inode in owners}
    for path in machine.names("/proc/[0-9]*/fd/*"):
        if machine.link(path) in sockets:
            pid = path.split("/")[2]
            return Listener(
                pid=int(pid),
                name=machine.read(f"/proc/{pid}/comm") or "a process",
                is_ours=_is_ours(machine, pid),
            )
    return Listener(perhaps_pid=_server_of(machine, set(owners.values())))


def has_table(machine: Machine) -> bool:
    """Whether it can be said that nobody listens."""
    return machine.read(_TABLES[0]) is not None


def _server_of(machine: Machine, users: set[str]) -> int | None:
    """A server like this one: whose files cannot be seen, and whose words can."""
    for folder in machine.names("/proc/[0-9]*"):
        pid = folder.split("/")[2]
        found = re.search(r"^Uid:\s*(\d+)", machine.read(f"{folder}/status") or "", re.MULTILINE)
        if found is not None and found[1] in users and _is_ours(machine, pid):
            return int(pid)
    return None


def _is_ours(machine: Machine, pid: str) -> bool:
    """By the program that it runs, or the module of `python -m`: folders may have our name."""
    words = (machine.read(f"/proc/{pid}/cmdline") or "").split("\0")
    if not _PYTHON.fullmatch(basename(words[0])):
        return basename(words[0]) == "neuron-di"
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_A_WORD:
            next(rest, "")
        elif word == "-m":
            return next(rest, "").partition(".")[0] == _PACKAGE
        elif not word.startswith("-"):
            return basename(word) == "neuron-di"
        elif word == "-c":
            return False
    return False
