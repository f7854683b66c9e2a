"""Opens transfer engines on a pool exactly as a worker does."""

from neuron_di.config import TransferOptions
from neuron_di.kv import KvPool
from neuron_di.transfer import LaneSet, make_engines


def open_lanes(engine: str, pool: KvPool, host: str) -> LaneSet:
    """The engine of this name, or for "auto" those that a worker would offer.

    ConfigError for an unknown name, and where it cannot be opened on this machine.
    """
    return LaneSet(make_engines(pool, TransferOptions(transfer=(engine,)), host))
