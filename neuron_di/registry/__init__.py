"""Who is there: workers announce themselves in a registry, a directory follows it."""

from neuron_di.registry.announcer import Announcer
from neuron_di.registry.directory import WORKERS_PREFIX, Directory
from neuron_di.registry.embedded import EmbeddedRegistry
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

__all__ = [
    "WORKERS_PREFIX",
    "Announcer",
    "Directory",
    "EmbeddedRegistry",
    "KeyChanged",
    "KeyDeleted",
    "LeaseId",
    "Registry",
    "RegistryClient",
    "RegistryEvent",
    "RegistryServer",
    "Snapshot",
    "WatchableRegistry",
]
