"""Makes a pool as a worker does: in the arena of its host, or on its GPU, where that is asked."""

from typing import Literal

from neuron_di.kv import KvLayout, KvPool, PoolMaker
from neuron_di.kv.device_pool import DevicePool
from neuron_di.types import Incarnation, WorkerId

# host: memory of its own. arena: a share of one memory for both ends. device: of the first GPU.
PoolKind = Literal["host", "arena", "device"]


def make_pool(
    layout: KvLayout,
    num_blocks: int,
    incarnation: Incarnation,
    name: str,
    *,
    arena_fd: int | None = None,
    is_on_device: bool = False,
) -> KvPool:
    """The caller owns it, and keeps the descriptor. ConfigError when the memory cannot be had."""
    if is_on_device:
        return DevicePool.create(layout, num_blocks, incarnation)
    if arena_fd is None:
        return KvPool.create(layout, num_blocks, incarnation)
    return PoolMaker(arena_fd, WorkerId(name))(layout, num_blocks, incarnation)
