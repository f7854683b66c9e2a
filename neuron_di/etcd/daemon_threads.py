"""Threads that end with the process, whatever they wait for.

The standard pool's threads are waited for when the interpreter ends: one call to an etcd that
hangs would hold up the end of a worker.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonThreads(Executor):
    """At most `num` calls at once, begun in the order in which they came."""

    def __init__(self, num: int, name: str) -> None:
        self._num = num
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._has_ended = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._has_ended:
                raise RuntimeError("these threads have ended")
            self._jobs.put((future, lambda: fn(*args, **kwargs)))
            if len(self._threads) < self._num:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has none left: those that run will do
                    if not self._threads:
                        future.cancel()
                        raise
                else:
                    self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more. Calls that have begun go on; `wait` for them."""
        with self._lock:
            self._has_ended = True
            if cancel_futures:
                while not self._jobs.empty():
                    job = self._jobs.get()
                    if job is not None:
                        job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del job, future, call
