"""Makes a pool as a worker does: in the arena of its host where there is one."""

from neuron_di.kv import KvLayout, KvPool, PoolMaker
from neuron_di.types import Incarnation, WorkerId


def make_pool(
    layout: KvLayout,
    num_blocks: int,
    incarnation: Incarnation,
    name: str,
    *,
    arena_fd: int | None = None,
) -> KvPool:
    """The caller owns it, and keeps the descriptor. ConfigError when the memory cannot be had."""
    if arena_fd is None:
        return KvPool.create(layout, num_blocks, incarnation)
    return PoolMaker(arena_fd, WorkerId(name))(layout, num_blocks, incarnation)
