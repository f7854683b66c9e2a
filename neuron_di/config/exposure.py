"""Who reaches an address that a process listens on."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name may resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
