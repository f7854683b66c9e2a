"""Who reaches an address that a process listens on, and why it may not be had."""

import errno
import ipaddress
import socket

from neuron_di.errors import ConfigError

_MENDS = {
    errno.EADDRINUSE: "Stop what uses the port, or choose another (0: any free one)",
    errno.EADDRNOTAVAIL: "Give an address of this machine, or 0.0.0.0 for all that it has",
    errno.EACCES: "Ports below 1024 are for root: choose another (0: any free one)",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_address(host: str) -> None:
    """Raises ConfigError for what is neither an address nor a name of one. Asks a name server."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # idna refuses some names
        reason = getattr(error, "strerror", None) or "no host can have that name"
        raise ConfigError(
            f"cannot listen on {host}: {reason}. Give an address of this machine", param="host"
        ) from None


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """What to say where a socket could not have that address."""
    reason, mend = error.strerror or error, _MENDS.get(error.errno or 0)
    text = f"cannot listen on {host}:{port}: {reason}"
    return ConfigError(f"{text}. {mend}." if mend else text)
