"""Between which workers a transfer engine can move KV: what their records must agree in.

Shared memory reaches the processes of one user in one process namespace of one running kernel.
Workers on two hosts that both have it must never be paired.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

from neuron_di.transfer.shm_engine import ShmEngine
from neuron_di.transfer.transfer_engine import TransferEngine

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NAMESPACE = "/proc/self/ns/pid"


def transfer_domain(engine: TransferEngine) -> str:
    """The engine's name and, where it does not reach everybody, whom it reaches."""
    if isinstance(engine, ShmEngine):
        return f"{engine.name}@{_this_machine()}"
    return engine.name


@cache
def _this_machine() -> str:
    place = f"{_BOOT_ID.read_text().strip()} {os.readlink(_PROCESS_NAMESPACE)} {os.geteuid()}"
    return hashlib.sha256(place.encode()).hexdigest()[:8]
