"""The address that a worker announces: one that its peers reach, and never a name.

A name would mean to each of them what its own resolver says. So it is

    --announce-host               as it is given
    --host NAME or ADDRESS        the address that the worker listens on
    --host 0.0.0.0, --host ::     the address that packets to the registry leave from

Where workers have no registry, that of packets to anywhere; of a machine that is connected to
nothing, loopback.
"""

import ipaddress
import socket
from urllib.parse import urlsplit

from neuron_di.config import WorkerOptions
from neuron_di.errors import ConfigError
from neuron_di.obs import get_logger

_log = get_logger(__name__)

# Nobody's addresses, for examples in documents. Nothing is sent there.
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_PORT = 9  # of a datagram that is never sent


def announced_host(options: WorkerOptions, sock: socket.socket) -> str:
    """What a worker that listens with `sock` announces. May ask a resolver for the registry's
    name. ConfigError where the address cannot be found out.
    """
    if options.announce_host is not None:
        return options.announce_host
    address = ipaddress.ip_address(str(sock.getsockname()[0]))
    registries = [options.registry] if options.registry is not None else list(options.etcd.etcd)
    if address.is_unspecified:
        return _outgoing(sock.family, registries)
    if address.is_loopback and _is_elsewhere(registries):
        _log.warning("announces_loopback", host=address, reason="the registry is not on this host")
    return str(address)


def as_announced(signal_address: str) -> str:
    """A partner's HOST:PORT with the address that it announces where HOST is a name.

    As it was where the name means nothing here.
    """
    host, _, port = signal_address.rpartition(":")
    # A worker that is given a name listens on an IPv4 address of it.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        places = socket.getaddrinfo(host.strip("[]"), _PORT, family, socket.SOCK_DGRAM)
    except OSError:
        return signal_address
    return f"{places[0][4][0]}:{port}"


def _outgoing(family: socket.AddressFamily, registries: list[str]) -> str:
    """The address that packets leave from, to the first registry that there is a way to."""
    for host in map(_host_of, registries):
        source, _ = _way_to(host, family)
        if source:
            return source
    if registries:
        raise ConfigError(
            f"no address of this machine leads to {', '.join(registries)}: say with "
            "--announce-host which one others reach it by",
            param="announce_host",
        )
    return _way_to(_ANYWHERE[family], family)[0] or _LOOPBACK[family]


def _is_elsewhere(registries: list[str]) -> bool:
    """Whether a registry is known to be on another machine."""
    for host in map(_host_of, registries):
        source, target = _way_to(host, socket.AF_UNSPEC)
        if source and not ipaddress.ip_address(target).is_loopback and source != target:
            return True
    return False


def _way_to(host: str, family: int) -> tuple[str, str]:
    """Our address and theirs, of packets to a host; both empty where there is no way."""
    try:
        places = socket.getaddrinfo(host, _PORT, family, socket.SOCK_DGRAM)
    except OSError:
        return "", ""
    for kind, _, _, _, place in places:
        with socket.socket(kind, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(place)  # sends nothing
            except OSError:
                continue
            return str(asking.getsockname()[0]), str(place[0])
    return "", ""


def _host_of(registry: str) -> str:
    """Of `tcp://HOST:PORT`, or HOST:PORT."""
    return urlsplit(registry if "://" in registry else f"//{registry}").hostname or ""
