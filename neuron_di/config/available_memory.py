"""How much memory this process may still take."""

import re

from neuron_di.config.control_group import Read, memory_left, text_of
from neuron_di.errors import ConfigError


def available_memory_bytes(read: Read = text_of) -> int:
    """The machine's, as the kernel estimates it, or less where a control group limits it."""
    found = re.search(r"^MemAvailable:\s*([0-9]+) kB$", read("/proc/meminfo") or "", re.MULTILINE)
    if found is None:
        raise ConfigError("/proc/meminfo does not say how much memory is available")
    machine_bytes, left_bytes = int(found[1]) << 10, memory_left(read)
    return machine_bytes if left_bytes is None else min(machine_bytes, left_bytes)
