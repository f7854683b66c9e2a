"""The thread that makes all of a device's calls, whoever asks for them.

NxD Inference wants one thread for all forward calls, from loading on. A worker loads on its main
thread, computes on its engine's and changes its role on a third; so the backend has a thread of
its own, and those wait for it.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from neuron_di.errors import LocalProtocolError

T = TypeVar("T")

_END_TIMEOUT_S = 10.0


class DeviceThread:
    """Runs one call after another, in the order in which they were asked for."""

    def __init__(self) -> None:
        # Each caller waits for its call: there are no more of them than threads that ask.
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._is_closed = False
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="neuron", daemon=True)
        self._thread.start()

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """What the call returns or raises. TimeoutError when it takes longer; it goes on then."""
        if self._is_closed:
            raise LocalProtocolError("the device's thread has ended")
        future: Future[T] = Future()
        self._calls.put((call, future))
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # it is the call's own
                raise
            raise TimeoutError(f"no answer of the device within {timeout_s:g} s") from None

    def close(self) -> None:
        """End after the calls that were asked for. Waits for that, but not for ever."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.put(None)
            self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
            del call, future, item  # what they hold must not live until the next call
