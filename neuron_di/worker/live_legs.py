"""The legs that a worker is answering right now, and the way from the engine to each.

The engine's thread hands over its events once per step; this table, on the event loop,
gives each leg its own. A leg that is gone loses its events: its request was cancelled.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from neuron_di.engine import EngineEvent, Key
from neuron_di.errors import BadRequest, CapacityError
from neuron_di.wire import Done


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode worker has this request's KV."""

    key: Key
    done: Done


LegInput = EngineEvent | HandedOver


class LegQueue:
    """What one leg still has to say. Bounded by the request: its tokens and one terminal event."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[LegInput] = asyncio.Queue()

    def put(self, event: LegInput) -> None:
        self._queue.put_nowait(event)

    async def get(self) -> LegInput:
        """The next event. Its deadline is the leg's: the proxy closes a leg that is too late."""
        return await self._queue.get()


class LiveLegs:
    """At most `legs_max` legs at a time, each under its (request id, attempt)."""

    def __init__(self, legs_max: int) -> None:
        self._legs_max = legs_max
        self._queues: dict[Key, LegQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: Key) -> bool:
        return key in self._queues

    @contextmanager
    def open(self, key: Key) -> Iterator[LegQueue]:
        """A leg's place in the table, for as long as it runs. CapacityError, BadRequest."""
        if len(self._queues) >= self._legs_max:
            raise CapacityError(f"this worker answers {self._legs_max} requests already")
        if key in self._queues:
            raise BadRequest("this request id and attempt run here already")
        queue = self._queues[key] = LegQueue()
        try:
            yield queue
        finally:
            del self._queues[key]

    def dispatch(self, events: Iterable[LegInput]) -> None:
        """Give each event to its leg."""
        for event in events:
            if (queue := self._queues.get(event.key)) is not None:
                queue.put(event)
