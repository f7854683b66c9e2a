"""Ports that the kernel gives to no outgoing connection: `net.ipv4.ip_local_reserved_ports`.

Setting it replaces the whole list, so whoever adds to it names what is there already.
"""

import re
from collections.abc import Iterable

from neuron_di.doctor.machine import Machine

_PATH = "/proc/sys/net/ipv4/ip_local_reserved_ports"
_OUTGOING = "/proc/sys/net/ipv4/ip_local_port_range"
_NAME = "net.ipv4.ip_local_reserved_ports"
_FILE = "/etc/sysctl.d/90-neuron-di.conf"


def outgoing_ports(machine: Machine) -> range:
    """Those of which any outgoing connection gets one; none where it cannot be read."""
    words = (machine.read(_OUTGOING) or "").split()
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return range(0)
    return range(int(words[0]), int(words[1]) + 1)


def reserved_ports(machine: Machine) -> set[int]:
    """Those that are reserved; none where it cannot be read."""
    return {
        number
        for low, high in re.findall(r"(\d+)(?:-(\d+))?", machine.read(_PATH) or "")
        for number in range(int(low), int(high or low) + 1)
    }


def reserve_mend(machine: Machine, ports: Iterable[int]) -> str:
    """The commands that reserve ports in addition to those that are, also after a restart."""
    there = [part for part in (machine.read(_PATH) or "").split(",") if part]
    wanted = [str(port) for port in sorted(set(ports) - reserved_ports(machine))]
    setting = f"{_NAME}={','.join(there + wanted)}"
    return (
        f"Reserve it, beside what is reserved: echo {setting} | sudo tee {_FILE} && "
        f"sudo sysctl -p {_FILE}"
    )
