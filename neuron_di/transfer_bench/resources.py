"""What a run may take of this machine, and what it took."""

import re
from pathlib import Path

from neuron_di.config import available_memory_bytes
from neuron_di.errors import ConfigError

_SPARED = 4  # one part of so many of the memory that is there stays free
REGION_BYTES_MIN, REGION_BYTES_MAX = 128 << 20, 512 << 20
_CACHE_SIZES = "sys/devices/system/cpu/cpu0/cache/index*/size"
_REGIONS = 4  # a pool at each end, and two that memcpy uses


def require_room(num_bytes: int) -> None:
    """ConfigError where so much memory would leave too little to others."""
    available_bytes = available_memory_bytes()
    if num_bytes > available_bytes - available_bytes // _SPARED:
        raise ConfigError(
            f"a pool of {num_bytes >> 20:,} MiB is too large: "
            f"{available_bytes >> 20:,} MiB are available, a quarter of which is left alone"
        )


def region_bytes() -> int:
    """Twice the processor's largest cache, or what the memory allows: a multiple of 1 MiB.

    A transfer that finds other places each time then finds them in memory.
    """
    wanted_bytes = min(max(2 * _cache_bytes(), REGION_BYTES_MIN), REGION_BYTES_MAX)
    return min(wanted_bytes, available_memory_bytes() // (2 * _REGIONS)) >> 20 << 20


def _cache_bytes() -> int:
    """The largest; 0 where the kernel does not say."""
    texts = [path.read_text(encoding="ascii") for path in Path("/").glob(_CACHE_SIZES)]
    sizes = [re.fullmatch(r"([0-9]{1,9})K\s*", text) for text in texts]
    return max((int(size[1]) << 10 for size in sizes if size), default=0)
