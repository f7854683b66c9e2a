"""Sends requests of a plan to one endpoint: when they are due, or as soon as one is over.

Answers are read one by one in a task of their own, between which the loop turns: many that end at
the same moment must not keep it from the others, nor the next request from being sent.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from neuron_di.bench.arrivals import Seconds
from neuron_di.bench.measured import Measured, Outcome
from neuron_di.clock import now_s

_AHEAD = 64  # requests that are made before it is their time
_AHEAD_BYTES = 32 << 20
_UNREAD_MAX = 1024  # answers; more than these are read at once, lest they pile up

T = TypeVar("T")


class Target(Protocol[T]):
    """What requests are sent to. T is an answer that nobody has looked at yet."""

    def make(self, index: int) -> bytes:
        """The bytes of a request of the plan."""
        ...

    async def send(self, request: bytes) -> T:
        """Send it, and wait for the end of the answer."""
        ...

    def read(self, index: int, answer: T) -> Outcome:
        """What the answer to that request was."""
        ...


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was sent. `lag_s`: by how much the client itself was late; NaN: by nothing."""

    index: int
    intended_s: float
    sent_s: float
    lag_s: float


class _Ahead:
    """Requests, made in their order, some of them before they are needed."""

    def __init__(self, indices: range, make: Callable[[int], bytes]) -> None:
        self._left: Iterator[int] = iter(indices)
        self._make = make
        self._ready: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._wanted = asyncio.Event()

    def make_some(self) -> None:
        """Make as many as may be kept. Before the first is sent, nobody waits for the loop."""
        while self._add_next():
            pass

    async def fill(self) -> None:
        """Make requests again and again when some were taken. Cancel it at the end."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            has_room = True
            while has_room:
                has_room = self._add_next()
                await asyncio.sleep(0)  # answers come in between

    def _add_next(self) -> bool:
        """False when there is no room, or no request left."""
        if len(self._ready) >= _AHEAD or self._num_bytes >= _AHEAD_BYTES:
            return False
        made = self._make_next()
        if made is None:
            return False
        self._ready.append(made)
        self._num_bytes += len(made[1])
        return True

    def take(self) -> tuple[int, bytes] | None:
        """The next request; None when there is none left."""
        if not self._ready:
            return self._make_next()
        index, request = self._ready.popleft()
        self._num_bytes -= len(request)
        if len(self._ready) <= _AHEAD // 2:
            self._wanted.set()
        return index, request

    def _make_next(self) -> tuple[int, bytes] | None:
        index = next(self._left, None)
        return None if index is None else (index, self._make(index))


class Load(Generic[T]):
    """One slice of the requests, at one endpoint. `note` hears of each when its answer is read.

    `cap` bounds the requests that are open at once; one that waits for its turn is late, and its
    times count from when it should have been sent.
    """

    def __init__(
        self, target: Target[T], indices: range, note: "Note", *, cap: int | None = None
    ) -> None:
        self._target = target
        self._indices = indices
        self._note = note
        self._cap = cap
        self._ahead = _Ahead(indices, target.make)
        self._unread: deque[tuple[Sent, T]] = deque()
        self._has_unread = asyncio.Event()
        self.num_open = 0
        self.most_open = 0
        self.end_s = now_s()  # of the last request that is over

    async def open_loop(self, at_s: Seconds) -> None:
        """Send each when it is due, the first of the slice at once. Returns when all are over."""
        if not len(self._indices):
            return
        places = asyncio.Semaphore(self._cap or len(self._indices))
        first_s = float(at_s[self._indices[0]])
        async with self._at_work():
            begun_s = free_from_s = now_s()  # since when the cap held nobody back
            async with asyncio.TaskGroup() as tasks:
                while (taken := self._ahead.take()) is not None:
                    index, request = taken
                    due_s = begun_s + float(at_s[index]) - first_s
                    await _sleep_until(due_s)
                    if places.locked():
                        await places.acquire()
                        free_from_s = now_s()
                    else:
                        await places.acquire()
                    may_go_s = max(due_s, free_from_s)
                    task = tasks.create_task(self._one(index, request, due_s, may_go_s))
                    task.add_done_callback(lambda _: places.release())

    async def closed_loop(self, concurrency: int, duration_s: float | None) -> None:
        """Keep so many open until the slice or the time is over, then wait for the last."""

        async def one_after_another() -> None:
            while now_s() < until_s and (taken := self._ahead.take()) is not None:
                await self._one(*taken, None, None)

        async with self._at_work():
            until_s = float("inf") if duration_s is None else now_s() + duration_s
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(self._indices))):
                    tasks.create_task(one_after_another())

    @asynccontextmanager
    async def _at_work(self) -> AsyncIterator[None]:
        """Requests are made before the block needs them, and all answers are read at its end."""
        self._ahead.make_some()
        tasks = [asyncio.create_task(self._ahead.fill()), asyncio.create_task(self._read())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            while self._unread:
                self._read_one()

    async def _one(
        self, index: int, request: bytes, due_s: float | None, may_go_s: float | None
    ) -> None:
        sent_s = now_s()
        sent = Sent(
            index,
            sent_s if due_s is None else due_s,
            sent_s,
            float("nan") if may_go_s is None else sent_s - may_go_s,
        )
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            answer = await self._target.send(request)
        except asyncio.CancelledError:
            self._note(sent, Outcome(ending="interrupted"))
            raise
        finally:
            self.num_open -= 1
            self.end_s = now_s()
        self._unread.append((sent, answer))
        self._has_unread.set()
        if len(self._unread) > _UNREAD_MAX:
            self._read_one()

    async def _read(self) -> None:
        while True:
            await self._has_unread.wait()
            self._has_unread.clear()
            while self._unread:
                self._read_one()
                await asyncio.sleep(0)

    def _read_one(self) -> None:
        sent, answer = self._unread.popleft()
        self._note(sent, self._target.read(sent.index, answer))


async def _sleep_until(at_s: float) -> None:
    """At least a turn of the loop, so that sending never starves reading; never too short."""
    while True:
        await asyncio.sleep(max(0.0, at_s - now_s()))
        if now_s() >= at_s:  # timers count whole milliseconds, and may be early
            return


class Note(Protocol):
    """Hears of a request that is over."""

    def __call__(self, sent: Sent, outcome: Outcome, /) -> None: ...


def note_in(measured: Measured, slice_index: int, planned_tokens: Callable[[int], int]) -> Note:
    """Notes in `measured`; `planned_tokens` says how long a prompt was to be."""

    def note(sent: Sent, outcome: Outcome) -> None:
        measured.add(
            sent.index,
            slice_index,
            planned_tokens(sent.index),
            sent.intended_s,
            sent.sent_s,
            outcome,
            lag_s=sent.lag_s,
        )

    return note
