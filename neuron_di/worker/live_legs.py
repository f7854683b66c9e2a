"""The legs that a worker is answering right now, and the way from the engine to each.

The engine's thread hands over its events once per step; this table, on the event loop,
gives each leg its own. A leg that is gone loses its events: its request was cancelled.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from neuron_di.clock import Deadline
from neuron_di.core.remembered import Remembered
from neuron_di.engine import Broken, EngineEvent, Key
from neuron_di.errors import (
    BadRequest,
    CapacityError,
    ClientError,
    DeadlinePassed,
    NeuronDiError,
    Preempted,
    StaleAttempt,
)
from neuron_di.types import RequestId
from neuron_di.wire import Done


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The decode worker has this request's KV."""

    key: Key
    done: Done


LegInput = EngineEvent | HandedOver


@dataclass(slots=True)
class LegTally:
    """How the legs have ended that were taken. A client's own fault is an answer."""

    num_finished: int = 0
    num_left: int = 0  # whoever had asked went away
    num_preempted: int = 0  # nothing failed: they go on, here or elsewhere
    failed: Counter[str] = field(default_factory=Counter)  # by the error's code

    @contextmanager
    def counting(self) -> Iterator[None]:
        """One leg, for as long as it runs."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_left += 1
            raise
        except ClientError:
            self.num_finished += 1
            raise
        except Preempted:
            self.num_preempted += 1
            raise
        except Exception as error:
            self.failed[error.code if isinstance(error, NeuronDiError) else "internal_error"] += 1
            raise
        self.num_finished += 1


class LegQueue:
    """What one leg still has to say. Bounded by the request: its tokens and one terminal event."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._queue: asyncio.Queue[LegInput] = asyncio.Queue()
        self._busy: asyncio.Task[object] | None = None
        self._broken: Broken | None = None

    def put(self, event: LegInput) -> None:
        self._queue.put_nowait(event)
        if isinstance(event, Broken) and self._busy is not None and self._broken is None:
            self._broken = event
            self._busy.cancel()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A wait for something else than `get`, which ends with a Broken's error if one comes."""
        self._busy = task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self._broken is None or task is None or task.uncancel() > 0:
                raise  # by somebody else
            raise self._broken.error from None
        finally:
            self._busy = None

    async def get(self) -> LegInput:
        """The next event. DeadlinePassed when the leg's time is over before it comes."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(self.deadline.remaining_s()):
                return await self._queue.get()
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed") from None


class LiveLegs:
    """At most `legs_max` legs at a time, each under its (request id, attempt).

    Attempts fence: once a later one is known, an earlier one is refused, or ended if it runs.
    """

    def __init__(self, legs_max: int, remembered_max: int) -> None:
        self._legs_max = legs_max
        self._queues: dict[Key, LegQueue] = {}
        self._latest: Remembered[RequestId, int] = Remembered(remembered_max)
        self.tally = LegTally()

    def __len__(self) -> int:
        return len(self._queues)

    def __contains__(self, key: Key) -> bool:
        return key in self._queues

    @contextmanager
    def open(self, key: Key, timeout_s: float) -> Iterator[LegQueue]:
        """A leg's place in the table, for as long as it runs.

        CapacityError: too many run. StaleAttempt: a later attempt is known. BadRequest: it runs.
        """
        request_id, attempt = key
        if attempt < self._latest.get(request_id, 0):
            raise StaleAttempt("a later attempt at this request is known")
        earlier = [(request_id, n) for n in range(attempt) if (request_id, n) in self._queues]
        if len(self._queues) - len(earlier) >= self._legs_max:
            raise CapacityError(f"this worker answers {self._legs_max} requests already")
        if key in self._queues:
            raise BadRequest("this request id and attempt run here already")
        self._latest.set(request_id, attempt)
        error = StaleAttempt("a later attempt took over")
        self.dispatch([Broken(each, error) for each in earlier])
        queue = self._queues[key] = LegQueue(Deadline.after(timeout_s))
        try:
            with self.tally.counting():
                yield queue
        finally:
            del self._queues[key]

    def dispatch(self, events: Iterable[LegInput]) -> None:
        """Give each event to its leg."""
        for event in events:
            if (queue := self._queues.get(event.key)) is not None:
                queue.put(event)
