"""One attempt as a test sees it: its events in a queue, its end in a task."""

import asyncio
from contextlib import aclosing

from running_proxy import ListDirectory

from neuron_di.clock import Deadline
from neuron_di.config import LimitOptions
from neuron_di.types import RequestId
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.health import Health
from neuron_di_proxy.launch import Launcher
from neuron_di_proxy.openai_request import read_completion

REQUEST = read_completion(b'{"model": "tiny", "prompt": "hi", "max_tokens": 5}')


class Run:
    """One attempt over two scripted workers."""

    def __init__(self, client, route, *, emitted=(), deadline=None, **limits):
        self.attempt = Attempt(
            request_id=RequestId("r1"),
            number=1 if emitted else 0,
            request=REQUEST,
            route=route,
            emitted=emitted,
            deadline=deadline or Deadline.after(60.0),
        )
        options = LimitOptions(**limits)
        self.health = Health(client, ListDirectory([]), options)
        self.events = asyncio.Queue()
        self._generation = Launcher(client, self.health, options).run(self.attempt)
        self.task = asyncio.create_task(self._collect())

    async def _collect(self):
        async with aclosing(self._generation) as generation:
            async for event in generation:
                self.events.put_nowait(event)

    def seen(self):
        return [self.events.get_nowait() for _ in range(self.events.qsize())]

    async def outcome(self):
        """All events so far, once the generation has ended. Raises what it raised."""
        await self.task
        return self.seen()


def waiting_for_legs():
    """The tasks that read legs."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Inbox._read"]
