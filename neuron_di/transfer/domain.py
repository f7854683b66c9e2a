"""Whom a transfer engine reaches: what the records of two workers must have in common.

Shared memory reaches the processes of one user in one process namespace of one running kernel.
Workers on two hosts that both have it, and nothing else, must never be paired.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

from neuron_di.config import is_loopback
from neuron_di.transfer.transfer_engine import TransferEngine
from neuron_di.types import Incarnation
from neuron_di.wire import NrtRegion, TcpRegion

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NAMESPACE = "/proc/self/ns/pid"
_NETWORK_NAMESPACE = "/proc/self/ns/net"
_NOBODY = Incarnation("")
_OF_ONE_HOST = frozenset({"handover", "cuda_ipc", "shm"})


def transfer_domain(engine: TransferEngine) -> str:
    """The engine's name and, where it does not reach everybody, whom it reaches."""
    if engine.name in _OF_ONE_HOST:
        return f"{engine.name}@{this_machine()}"
    region = engine.local_region(_NOBODY)
    if isinstance(region, TcpRegion | NrtRegion) and is_loopback(region.host):
        return f"{engine.name}@{_this_network()}"
    return engine.name


@cache
def this_machine() -> str:
    """The same for processes that reach each other's descriptors, and for no others."""
    place = f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROCESS_NAMESPACE)} {os.geteuid()}"
    return _digest(place)


@cache
def _this_network() -> str:
    """The same for processes, of whatever user, that share a loopback interface."""
    return _digest(f"{_BOOT_ID.read_text().strip()} {os.readlink(_NETWORK_NAMESPACE)}")


def _digest(place: str) -> str:
    return hashlib.sha256(place.encode()).hexdigest()[:8]
