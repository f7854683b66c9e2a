"""Who is there: workers announce themselves in a registry, a directory follows it."""

from neuron_di.registry.announcer import Announcer
from neuron_di.registry.directory import KEEP_S, Directory, keep_s_for
from neuron_di.registry.embedded import EmbeddedRegistry
from neuron_di.registry.record_reader import RefusedRecord
from neuron_di.registry.registry import (
    KeyChanged,
    KeyDeleted,
    LeaseId,
    Registry,
    RegistryEvent,
    Snapshot,
    WatchableRegistry,
)
from neuron_di.registry.registry_client import RegistryClient
from neuron_di.registry.registry_server import RegistryServer
from neuron_di.registry.supervised import Supervised

__all__ = [
    "KEEP_S",
    "Announcer",
    "Directory",
    "EmbeddedRegistry",
    "KeyChanged",
    "KeyDeleted",
    "LeaseId",
    "RefusedRecord",
    "Registry",
    "RegistryClient",
    "RegistryEvent",
    "RegistryServer",
    "Snapshot",
    "Supervised",
    "WatchableRegistry",
    "keep_s_for",
]
