"""An asyncio event loop on a virtual clock: time jumps to the next timer, nothing ever waits.

Many simulated processes share the one loop. Which process a callback belongs to is a context
variable, inherited by every task and timer that a process starts:

    process killed    its callbacks are dropped: no `finally` runs, as with kill -9
    process frozen    its callbacks are put aside until it is thawed, as with SIGSTOP

One thread, no selector, no clock of the machine: the same callbacks run in the same order in
every run that starts alike.
"""

import asyncio
import contextlib
import contextvars
import gc
import heapq
import logging
import sys
import warnings
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from neuron_di.clock import use_clock
from neuron_di.errors import LocalProtocolError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

UNIX_EPOCH_S = 1_700_000_000.0  # what unix_s says at virtual second 0


class Process:
    """A simulated process. What `run` starts, and what that starts, lives and dies with it."""

    __slots__ = ("_loop", "context", "deferred", "is_dead", "is_frozen", "is_halted", "name")

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        self.is_halted = False  # dead or frozen
        self.deferred: list[VirtualHandle] = []
        self.context = Context()
        self.context.run(_process.set, self)
        self._loop = loop

    def kill(self) -> None:
        """Nothing of it runs ever again, not even its `finally`."""
        self.is_dead = self.is_halted = True
        self.deferred.clear()

    def freeze(self) -> None:
        self.is_frozen = self.is_halted = True

    def thaw(self) -> None:
        """What was due meanwhile runs now, in order."""
        self.is_frozen, self.is_halted = False, self.is_dead
        self._loop.resume(self.deferred)
        self.deferred = []

    def call_soon(self, callback: Callable[[Unpack[Ts]], object], *args: *Ts) -> None:
        self._loop.call_soon(callback, *args, context=self.context)

    def call_later(
        self, delay_s: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts
    ) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, callback, *args, context=self.context)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._loop.create_task(coroutine, context=self.context.copy())


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar(
    "simulated_process", default=None
)


def this_process() -> Process | None:
    """The simulated process that the running callback belongs to."""
    return _process.get()


class VirtualHandle(asyncio.TimerHandle):
    """A callback that waits for its turn. Also a timer's, so that one class does for both."""

    __slots__ = ("_virtual_process",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        when_s: float,
    ) -> None:
        if context is None:
            context = contextvars.copy_context()
        self._context = context
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._when = when_s
        self._scheduled = False
        self._virtual_process = context.get(_process)

    @property
    def process(self) -> Process | None:
        return self._virtual_process

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()

    def run(self) -> None:
        self._context.run(self._callback, *self._args)


def _nothing() -> None:
    """What a cancelled handle calls."""


class VirtualClock:
    """The clock of a loop, for `neuron_di.clock.use_clock`."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def unix_s(self) -> float:
        return UNIX_EPOCH_S + self._loop.now_s

    def sleep_s(self, duration_s: float) -> None:
        raise LocalProtocolError(f"something blocks the event loop for {duration_s} s")


class LoopOverrun(LocalProtocolError):
    """Raised when a simulation runs more callbacks than it may: it goes round in circles."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in order, and timers when nothing else is left to do.

    `executor_delay_s` draws how long a function given to `run_in_executor` takes. `errors`
    holds what went wrong and was told to nobody: the exceptions of callbacks, and of tasks
    that nobody asked.
    """

    def __init__(
        self, *, executor_delay_s: Callable[[], float] = lambda: 0.0, callbacks_max: int = 10**7
    ) -> None:
        self.now_s = 0.0
        self.errors: list[str] = []
        self.num_callbacks = 0
        self._executor_delay_s = executor_delay_s
        self._callbacks_max = callbacks_max
        self._ready: deque[VirtualHandle] = deque()
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._num_timers = 0
        # Kept to the end: a killed process's task must not be collected, and so closed.
        self._tasks: list[tuple[Process | None, asyncio.Task[Any]]] = []
        self._generators: dict[int, Process | None] = {}  # by id: who iterates it
        self._undead: list[object] = []  # generators of killed processes: never to be closed
        self._is_running = False
        self._is_stopping = False
        self._is_closed = False

    # Callbacks.

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        handle = VirtualHandle(callback, args, context, 0.0)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = VirtualHandle(callback, args, context, when)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def resume(self, handles: list[VirtualHandle]) -> None:
        """Take back callbacks that a frozen process could not run."""
        self._ready.extend(handles)

    def run_in_executor(
        self,
        executor: object,  # noqa: ARG002 - asyncio's signature
        func: Callable[[Unpack[Ts]], T],
        *args: *Ts,
    ) -> asyncio.Future[T]:
        """Run the function later on this very thread: a process of one thread, seen from afar."""
        future: asyncio.Future[T] = asyncio.Future(loop=self)

        def run() -> None:
            if future.cancelled():  # a thread cannot be stopped: it runs all the same
                with contextlib.suppress(Exception):
                    func(*args)
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._executor_delay_s(), run)
        return future

    # Futures and tasks.

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task = asyncio.Task(coro, loop=self, name=name or "", context=context)
        self._tasks.append((_process.get() if context is None else context.get(_process), task))
        return task

    def pending_tasks(self, process: Process | None) -> list[asyncio.Task[Any]]:
        """The tasks of this process that have not ended."""
        return [task for owner, task in self._tasks if owner is process and not task.done()]

    # Running.

    def time(self) -> float:
        return self.now_s

    def run_until_complete(self, future: Any) -> Any:
        """Run until it is done. LoopOverrun; LocalProtocolError when nothing is left to run."""
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(lambda _: self.stop())
        self.run_forever()
        if not task.done():
            raise LocalProtocolError("nothing is left to run, and the end was not reached")
        return task.result()

    def run_forever(self) -> None:
        """Run until `stop`, or until nothing is left to run."""
        self._is_stopping, self._is_running = False, True
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._generator_began, self._generator_dropped)
        events._set_running_loop(self)  # noqa: SLF001 - as every event loop does
        try:
            with use_clock(VirtualClock(self)):
                self._run()
        finally:
            self._is_running = False
            events._set_running_loop(None)  # noqa: SLF001
            sys.set_asyncgen_hooks(*hooks)

    def _run(self) -> None:
        ready, timers = self._ready, self._timers
        num_callbacks, callbacks_max = self.num_callbacks, self._callbacks_max
        while not self._is_stopping:
            if ready:
                handle = ready.popleft()
            elif timers:
                when_s, _, handle = heapq.heappop(timers)
                if handle._cancelled:  # noqa: SLF001 - time does not pass for it
                    continue
                self.now_s = max(self.now_s, when_s)
            else:
                return
            if handle._cancelled:  # noqa: SLF001
                continue
            process = handle._virtual_process  # noqa: SLF001
            if process is not None and process.is_halted:
                if not process.is_dead:
                    process.deferred.append(handle)
                continue
            num_callbacks += 1
            if num_callbacks > callbacks_max:
                raise LoopOverrun(f"more than {callbacks_max} callbacks")
            self.num_callbacks = num_callbacks
            try:
                handle.run()
            except LoopOverrun:
                raise
            except Exception as error:
                self.call_exception_handler({"message": "callback failed", "exception": error})

    def stop(self) -> None:
        self._is_stopping = True

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Let go of everything that was left. Call it within `silenced`."""
        logging.disable()
        self._is_closed = True
        for _, task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
        for held in (self._tasks, self._timers, self._ready, self._generators, self._undead):
            held.clear()

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            error = context.get("exception")
            self.errors.append(f"{context['message']}: {error!r}{place_of(error)}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave the heap when their time comes."""

    # A generator that is dropped half-way is closed by its process, if that still lives.

    def _generator_began(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(generator)] = _process.get()

    def _generator_dropped(self, generator: AsyncGenerator[Any, Any]) -> None:
        process = self._generators.pop(id(generator), None)
        if self._is_closed or (process is not None and process.is_dead):
            self._undead.append(generator)
        else:
            self.create_task(_close_generator(generator))


async def _close_generator(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()


def place_of(error: object) -> str:
    """Where an exception came from, as words for a report."""
    trace = getattr(error, "__traceback__", None)
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" at {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Around a whole simulation: what its processes leave half-way goes without a word.

    No garbage is collected within: it would end generators at odd moments. What there was
    before is not looked at, so that the collection at the end is quick.
    """
    before = sys.unraisablehook
    was_collecting = gc.isenabled()
    gc.disable()
    gc.freeze()
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            gc.collect()
            gc.collect()  # what the first found, and generators brought back to life
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        if was_collecting:
            gc.enable()
        sys.unraisablehook = before
