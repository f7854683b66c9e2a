"""Opens transfer engines on a pool exactly as a worker does."""

from dataclasses import replace

from neuron_di.config import TransferOptions
from neuron_di.errors import ConfigError
from neuron_di.kv import KvPool
from neuron_di.transfer import LaneSet, make_engines


def open_lanes(engine: str, pool: KvPool, host: str, options: TransferOptions) -> LaneSet:
    """The engine of this name, or for "auto" those that a worker would offer.

    `options` say what else a worker is told of its transfers.
    ConfigError for an unknown name, and where it cannot be opened on this machine.
    """
    try:
        return LaneSet(make_engines(pool, replace(options, transfer=(engine,)), host))
    except ConfigError as error:  # in the words of a worker's flags
        raise ConfigError(error.message.replace("--transfer ", "")) from None
