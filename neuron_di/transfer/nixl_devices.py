"""Which network devices NIXL's UCX uses: it listens on each of them, to anybody."""

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912  # every interface's IPv4 addresses
_INTERFACES_MAX = 1024
_RECORD = struct.Struct("16s4x4s16x")  # ifreq with a sockaddr_in: name, (family, port), address
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_RDMA = Path("/sys/class/infiniband")


def devices_of(host: str) -> list[str]:
    """The network interface that has the address `host`, then the RDMA devices, as UCX names them.

    RDMA devices have no port that strangers can connect to; with a loopback address there are none,
    either. Empty where no interface has the address: 0.0.0.0, say, or one that is not here.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    address = ipaddress.ip_address(found[0][4][0])
    if address.is_loopback:  # 127.0.0.2, too
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    interface = _interfaces().get(address)
    if interface is None:
        return []
    return [interface] if address.is_loopback else [interface, *_rdma_devices()]


def _interfaces() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    records = array.array("B", bytes(_INTERFACES_MAX * _RECORD.size))
    start, num_bytes = records.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _SIOCGIFCONF, struct.pack("iP", num_bytes, start))
    num_bytes, _ = struct.unpack("iP", answer)
    for name, packed in _RECORD.iter_unpack(records[:num_bytes]):
        label = name.split(b"\0")[0].decode()
        found[ipaddress.ip_address(packed)] = label.split(":")[0]  # eth0:1: another one of eth0
    lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
    for line in lines:
        digits, *_, interface = line.split()
        found[ipaddress.ip_address(bytes.fromhex(digits))] = interface
    return found


def _rdma_devices() -> list[str]:
    ports = sorted(_RDMA.glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]
