"""Who listens on a port of this machine, as far as this user may see it."""

import re
from dataclasses import dataclass

from neuron_di.doctor.machine import Machine

_LISTENS = "0A"  # TCP_LISTEN, in include/net/tcp_states.h
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_OURS = re.compile(r"neuron[-_]di")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A process. `pid` is None where it is another user's, and then so is its name."""

    pid: int | None = None
    name: str = ""
    is_ours: bool = False  # a process of a server like this one

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        return f"{self.name} (pid {self.pid})"


def listener_on(machine: Machine, port: int) -> Listener | None:
    """Whoever listens on a TCP port, at any address; None where nobody does."""
    inodes = {
        fields[9]
        for table in _TABLES
        for fields in map(str.split, (machine.read(table) or "").splitlines()[1:])
        if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].split(":")[1], 16) == port
    }
    if not inodes:
        return None
    sockets = {f"socket:[{inode}]" for inode in inodes}
    for path in machine.names("/proc/[0-9]*/fd/*"):
        if machine.link(path) in sockets:
            pid = path.split("/")[2]
            words = (machine.read(f"/proc/{pid}/cmdline") or "").split("\0")
            return Listener(
                pid=int(pid),
                name=machine.read(f"/proc/{pid}/comm") or "a process",
                is_ours=any(_OURS.search(word) for word in words[:3]),
            )
    return Listener()
