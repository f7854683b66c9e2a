"""One attempt as a test sees it: its events in a queue, its end in a task."""

import asyncio

import msgspec
from running_proxy import ListDirectory

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.health import Health
from neuron_di_proxy.launch import Launcher

REQUEST = ChoiceRequest(
    endpoint="completions",
    model="tiny",
    prompt=msgspec.Raw(b'"hi"'),
    sampling=SamplingParams(max_tokens=2000),
)


class Overheard:
    """Workers, and a queue of (leg kind, what it said) once the attempt has heard it."""

    def __init__(self, workers):
        self.said = asyncio.Queue()
        self._workers = workers

    def open_leg(self, record, kind, leg):
        return _OverheardLeg(self._workers.open_leg(record, kind, leg), kind, self.said)


class _OverheardLeg:
    def __init__(self, leg, kind, said):
        self.worker_id, self.close = leg.worker_id, leg.close
        self._leg, self._kind, self._said = leg, kind, said

    def open(self, hear):
        def hear_too(said):
            hear(said)
            self._said.put_nowait((self._kind, said))

        self._leg.open(hear_too)


class Run:
    """One attempt over two scripted workers."""

    def __init__(
        self,
        client,
        route,
        *,
        emitted=(),
        waited_s=0.0,
        deadline=None,
        **limits,
    ):
        self.attempt = Attempt(
            request_id=RequestId("r1"),
            number=1 if emitted else 0,
            request=REQUEST,
            route=route,
            emitted=emitted,
            accepted_s=now_s() - waited_s,
            deadline=deadline or Deadline.after(60.0),
        )
        options = LimitOptions(**limits)
        self.health = Health(client, ListDirectory([]), options)
        self.events = asyncio.Queue()
        workers = Overheard(client)
        self._said = workers.said
        launcher = Launcher(workers, self.health, options)
        self.task = asyncio.create_task(self._collect(launcher))

    async def _collect(self, launcher):
        outcome = await launcher.run(self.attempt, self.events.put_nowait)
        self.events.put_nowait(outcome)

    def seen(self):
        return [self.events.get_nowait() for _ in range(self.events.qsize())]

    async def outcome(self):
        """All events so far, once the attempt has ended. Raises what it raised."""
        await self.task
        return self.seen()

    async def until_heard(self, kind, what):
        """Return once a leg of this kind has said this type of event, and the attempt knows."""
        while True:
            said_by, said = await self._said.get()
            if said_by == kind and isinstance(said, what):
                await asyncio.sleep(0)
                return
