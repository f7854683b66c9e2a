"""Work that goes on for as long as it is needed, and is begun again when a bug ends it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self

from neuron_di.clock import now_s
from neuron_di.obs import get_logger

_log = get_logger(__name__)

RESTART_S_MIN = 0.5
RESTART_S_MAX = 30.0
SHOWN_S = 60.0  # after a failure, although the work goes on again


class Supervised:
    """Does `work` while entered, in a task of its own.

    `work` should never end. If it does, or raises, that is a bug of ours: it is logged, work
    begins anew after a pause that doubles from failure to failure, and `trouble` tells of it.
    """

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._trouble = ""
        self._failed_s = 0.0
        self._restart_s = RESTART_S_MIN
        self.num_failures = 0

    def trouble(self) -> str:
        """How it failed, if it did lately; empty while all is well."""
        if not self._trouble or now_s() >= self._failed_s + SHOWN_S:
            return ""
        return self._trouble

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _supervise(self) -> None:
        while True:
            begun_s = now_s()
            try:
                await self._work()
                reason = "it ended"
                _log.error("task_ended", task=self._name)
            except Exception as error:
                reason = type(error).__name__
                _log.exception("task_failed", task=self._name)
            self.num_failures += 1
            self._failed_s = now_s()
            self._trouble = f"the {self._name} failed ({reason}) and was begun again"
            if self._failed_s - begun_s > RESTART_S_MAX:
                self._restart_s = RESTART_S_MIN
            await asyncio.sleep(self._restart_s)
            self._restart_s = min(2 * self._restart_s, RESTART_S_MAX)
