"""etcd as the registry: many hosts, several proxies. Nothing here loads gRPC before it is asked to.

Next: neuron_di/etcd/open_registry.py, neuron_di/etcd/registry.py, neuron_di/etcd/client.py
"""

from neuron_di.etcd.open_registry import RegistryLike, open_registry

__all__ = ["RegistryLike", "open_registry"]
