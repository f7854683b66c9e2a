"""Passes workers' records on to the proxy's registry, changed: so that faults fit in between.

Workers announce themselves to a registry of the test. What the proxy gets to see names the
ports of fault proxies in place of the workers' own, and shows only the workers it should use.
"""

import asyncio
from collections.abc import Callable
from typing import Self

from neuron_di.errors import PeerError
from neuron_di.registry import Directory, EmbeddedRegistry, RegistryClient, RegistryServer
from neuron_di.registry.registry import LeaseId
from neuron_di.wire import WorkerRecord, encode_json

LEASE_S = 3600.0  # longer than any test


class Relay:
    """Owns the workers' registry while entered; `address` is where they announce themselves."""

    def __init__(self, rewrite: Callable[[WorkerRecord], WorkerRecord]) -> None:
        self._rewrite = rewrite
        self._registry = EmbeddedRegistry()
        self._server = RegistryServer(self._registry, "tcp://127.0.0.1:0")
        self._directory = Directory(self._registry)
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._flushed = asyncio.Event()
        self._shown: dict[str, tuple[LeaseId, bytes]] = {}

    @property
    def address(self) -> str:
        return self._server.address

    def workers(self) -> tuple[WorkerRecord, ...]:
        """What the workers say of themselves."""
        return self._directory.workers()

    async def show_to(self, proxy_registry: str) -> None:
        """Pass everything on to this registry from now on. It knows nothing yet."""
        await self._stop()
        self._shown = {}
        self._task = asyncio.create_task(self._follow(proxy_registry))

    async def flush(self) -> None:
        """Rewrite every record again, as the rules have changed; return when the proxy knows."""
        self._flushed.clear()
        self._again.set()
        await self._flushed.wait()

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        await self._directory.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        await self._directory.__aexit__(None, None, None)
        await self._server.__aexit__(None, None, None)

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self, address: str) -> None:
        async with RegistryClient(address) as target:
            while True:
                epoch = self._directory.epoch
                self._again.clear()
                try:
                    await self._show(target)
                except PeerError:  # the proxy is stopped, or gone
                    await asyncio.sleep(0.1)
                    continue
                if not self._again.is_set():
                    self._flushed.set()
                changed = asyncio.create_task(self._directory.wait_changed(epoch))
                again = asyncio.create_task(self._again.wait())
                try:
                    await asyncio.wait({changed, again}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                    again.cancel()

    async def _show(self, target: RegistryClient) -> None:
        records = [self._rewrite(record) for record in self._directory.workers()]
        values = {record.key(): encode_json(record) for record in records}
        for key in [key for key in self._shown if key not in values]:
            lease, _ = self._shown.pop(key)
            await target.revoke(lease)
        for key, value in values.items():
            lease, former = self._shown.get(key, (None, b""))
            if value == former:
                continue
            if lease is None:
                lease = await target.grant(LEASE_S)
            await target.put(key, value, lease)
            self._shown[key] = (lease, value)
