"""What is done to a cluster while its load runs, each with the moments at which it was done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from neuron_di.clock import unix_s
from neuron_di.types import Role

from .cluster import Cluster

Kind = Literal["join", "drain", "kill", "role", "freeze", "etcd"]


@dataclass(slots=True)
class Event:
    """Times are Unix times. `role` is the worker's after it; `words` says what else was seen."""

    kind: Kind
    worker: str
    role: Role | None
    begun_s: float
    over_s: float = 0.0  # joined: ready; role: it serves again; freeze: it goes on
    words: str = ""
    settled_s: float = 0.0  # etcd: every proxy knew again who is here


class Stage:
    """Does it, and keeps book. What an order says when it fails is a RuntimeError."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.events: list[Event] = []

    async def join(self, name: str, role: Role) -> None:
        event = self._begin("join", name, role)
        event.over_s = (await self.cluster.join(name, role)).ready_s

    async def drain(self, name: str) -> None:
        event = self._begin("drain", name, self.cluster.workers[name].role)
        event.words = await self.cluster.order("drain", name)
        code = await self.cluster.workers[name].process.gone()
        event.over_s = unix_s()
        if code != 0:
            raise RuntimeError(f"{name} was drained and ended with {code}")

    async def kill(self, name: str) -> None:
        event = self._begin("kill", name, self.cluster.workers[name].role)
        await self.cluster.workers[name].process.kill()
        event.over_s = unix_s()

    async def role(self, name: str, role: Role) -> None:
        event = self._begin("role", name, role)
        event.words = await self.cluster.order("role", name, role)
        self.cluster.workers[name].role = role
        event.over_s = unix_s()

    @asynccontextmanager
    async def frozen(self, name: str) -> AsyncIterator[None]:
        """It stands still within the block, at least for so long that it must be noticed."""
        worker = self.cluster.workers[name]
        event = self._begin("freeze", name, worker.role)
        worker.process.stop()
        try:
            yield
        finally:
            event.over_s = unix_s()
            worker.process.cont()

    @asynccontextmanager
    async def etcd_trouble(self, words: str) -> AsyncIterator[Event]:
        event = Event("etcd", "etcd", None, unix_s(), words=words)
        self.events.append(event)
        yield event
        event.over_s = unix_s()

    def _begin(self, kind: Kind, name: str, role: Role) -> Event:
        event = Event(kind, name, role, unix_s())
        self.events.append(event)
        return event


async def pause(duration_s: float) -> None:
    """Let the load run with what was changed."""
    await asyncio.sleep(duration_s)
