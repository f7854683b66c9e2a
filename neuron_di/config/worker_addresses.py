"""Which addresses a worker's record may name. A record is a word of somebody else's.

Whoever may write to the registry could otherwise make a proxy connect to anything: a cloud's
metadata service, a database, a port of this very machine.
"""

import ipaddress
import re
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from neuron_di.config.control_group import Read, text_of
from neuron_di.config.option import PORT_MAX, option
from neuron_di.errors import ConfigError

_PORTS = re.compile(r"(?P<low>[0-9]{1,5})-(?P<high>[0-9]{1,5})")
_PICKED = "/proc/sys/net/ipv4/ip_local_port_range"
# Instance metadata. That at 169.254.169.254, which most clouds have, is link-local.
_METADATA = (IPv6Address("fd00:ec2::254"), IPv4Address("100.100.100.200"))
# IPv6 addresses whose last 32 bits are an IPv4 address that a packet may end at.
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
_TEREDO = IPv6Network("2001::/32")  # to anywhere, by a relay of somebody's choice
_LOCALHOST = IPv4Address("127.0.0.1")

_Network = IPv4Network | IPv6Network
_Address = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddressOptions:
    """Where workers may be."""

    worker_networks: tuple[str, ...] = option(
        "networks that workers may be in, such as 10.1.0.0/16",
        default=(),
        default_text="any address but link-local, multicast and unspecified ones",
        form="CIDR",
    )
    worker_ports: str = option(
        "ports that workers may listen on", default="1024-65535", form="LOW-HIGH"
    )

    def __post_init__(self) -> None:
        self.networks()
        self.ports()

    def networks(self) -> tuple[_Network, ...]:
        """Raises ConfigError where one cannot be read."""
        return _read_networks(self.worker_networks)

    def ports(self) -> range:
        """Raises ConfigError where they cannot be read."""
        return _read_ports(self.worker_ports)

    def require_free_ports(self, read: Read = text_of) -> None:
        """Raises ConfigError unless workers may listen on whichever port the system picks."""
        low, high = map(int, (read(_PICKED) or "32768 60999").split())
        if not (max(low, 1024) in self.ports() and high in self.ports()):
            raise ConfigError(
                f"--worker-ports {self.worker_ports} leaves out workers that take any free port, "
                f"from {low} to {high} here, as those of `neuron-di serve` do: go without it, or "
                "start them by `neuron-di worker`, each with a --port",
                param="worker_ports",
            )

    def why_refused(self, host: str, port: int) -> str:
        """Why nobody connects there, in words; empty where that is allowed.

        A name is refused: what it means may change between two looks.
        """
        if port not in self.ports():
            return f"port {port} is not among --worker-ports {self.worker_ports}"
        address = _read_address(host)
        if address is None:
            return f"{host[:64]!r} is no IP address"
        if not _is_unicast(address):
            return f"{host} is not the address of one machine"
        networks = self.networks()
        if networks and not any(address in network for network in networks):
            return f"{host} is in none of --worker-networks"
        return ""


def _read_address(host: str) -> _Address | None:
    """As it is connected to: an IPv4 address in IPv6's clothes is one."""
    if host == "localhost":
        return _LOCALHOST
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if not isinstance(address, IPv6Address):
        return address
    if any(address in network for network in _TRANSLATED) and int(address) > 1:  # :: and ::1
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_unicast(address: _Address) -> bool:
    if address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if address in _METADATA or address in _TEREDO:
        return False
    if isinstance(address, IPv4Address):  # of IPv6, loopback counts as reserved
        return not address.is_reserved and int(address) >> 24 != 0
    return True


@cache
def _read_networks(texts: tuple[str, ...]) -> tuple[_Network, ...]:
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigError(
            f"--worker-networks takes networks such as 10.1.0.0/16: {error}",
            param="worker_networks",
        ) from None


@cache
def _read_ports(text: str) -> range:
    match = _PORTS.fullmatch(text)
    low, high = (int(match["low"]), int(match["high"])) if match else (0, 0)
    if not 0 < low <= high <= PORT_MAX:
        raise ConfigError(
            f"--worker-ports takes a range such as 20000-29999, not {text[:32]!r}",
            param="worker_ports",
        )
    return range(low, high + 1)
