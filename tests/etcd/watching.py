"""Follows a registry as a directory does, and remembers what it was told."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Self

from neuron_di.registry import KeyChanged, KeyDeleted, RegistryEvent, Snapshot

DEADLINE_S = 30.0


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that nobody tells of."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)


class Watching:
    """The view that `watch(prefix)` gives, while entered."""

    def __init__(self, registry: Any, prefix: str = "/workers/") -> None:
        self._registry = registry
        self._prefix = prefix
        self._changed = asyncio.Condition()
        self.events: list[RegistryEvent] = []
        self.view: dict[str, bytes] = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        await self.until(lambda: bool(self.events))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    @property
    def num_snapshots(self) -> int:
        return sum(isinstance(event, Snapshot) for event in self.events)

    @property
    def num_deleted(self) -> int:
        return sum(isinstance(event, KeyDeleted) for event in self.events)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of the view."""
        async with asyncio.timeout(DEADLINE_S), self._changed:
            await self._changed.wait_for(holds)

    async def _follow(self) -> None:
        async with aclosing(self._registry.watch(self._prefix)) as events:
            async for event in events:
                self.events.append(event)
                match event:
                    case Snapshot():
                        self.view = dict(event.values)
                    case KeyChanged():
                        self.view[event.key] = event.value
                    case KeyDeleted():
                        self.view.pop(event.key, None)
                async with self._changed:
                    self._changed.notify_all()
