"""The registry that the options name: etcd's, the proxy's own, or none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from neuron_di.config import EtcdOptions
from neuron_di.registry import Registry, RegistryClient, WatchableRegistry


class RegistryLike(Registry, WatchableRegistry, Protocol):
    """To announce oneself in, and to watch."""


@asynccontextmanager
async def open_registry(
    registry: str | None, etcd: EtcdOptions
) -> AsyncIterator[RegistryLike | None]:
    """The registry at a `tcp://` address or at etcd while entered; None where neither is given.

    Nothing has to listen yet. ConfigError when a file of etcd's cannot be read, or when the
    packages for etcd are missing.
    """
    if etcd.etcd:
        from neuron_di.etcd.client import EtcdClient
        from neuron_di.etcd.registry import EtcdRegistry
        from neuron_di.etcd.security import security_of

        async with EtcdClient(etcd.etcd, security_of(etcd)) as client:
            yield EtcdRegistry(client, etcd.etcd_prefix)
    elif registry is not None:
        async with RegistryClient(registry) as link:
            yield link
    else:
        yield None
