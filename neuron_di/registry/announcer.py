"""Keeps a worker's record in the registry, whatever happens to the registry."""

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Self

from neuron_di.clock import Deadline
from neuron_di.errors import PeerError
from neuron_di.obs import get_logger
from neuron_di.registry.registry import LeaseId, Registry
from neuron_di.wire import WorkerRecord, encode_json

_log = get_logger(__name__)

ANNOUNCE_TTL_S = 10.0
_WITHDRAW_TIMEOUT_S = 0.3  # a registry that ended before us must not hold up our own end
_BACKOFF_S_MIN = 0.1
_BACKOFF_S_MAX = 2.0


class Announcer:
    """Announces while entered and withdraws at the end.

    The record is asked for at each beat, every third of `ttl_s`, and after `record_changed`;
    its key must stay the same. An unreachable registry is tried again for ever: the worker
    serves on meanwhile. Does not own the registry, which must outlive it.
    """

    def __init__(
        self,
        registry: Registry,
        record: Callable[[], WorkerRecord],
        *,
        ttl_s: float = ANNOUNCE_TTL_S,
    ) -> None:
        self._registry = registry
        self._record = record
        self._ttl_s = ttl_s
        self._changed = asyncio.Event()
        self._lease: LeaseId | None = None
        self._backoff_s = _BACKOFF_S_MIN

    def record_changed(self) -> None:
        """Announce the record as it is now, without waiting for the next beat."""
        self._changed.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._lease is not None:
            with contextlib.suppress(PeerError, TimeoutError):  # then the lease ends by itself
                async with asyncio.timeout(_WITHDRAW_TIMEOUT_S):
                    await self._registry.revoke(self._lease)
        if not self._task.cancelled():
            self._task.result()  # it had failed, which is our own bug: show it

    async def _run(self) -> None:
        while True:
            try:
                await self._hold_lease()
                _log.warning("announce_lease_lost")
            except PeerError as error:
                _log.warning("announce_failed", reason=error.message, retry_s=self._backoff_s)
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)

    async def _hold_lease(self) -> None:
        """Announce under a lease of our own until the registry no longer knows it."""
        self._lease = await self._registry.grant(self._ttl_s)
        announced: WorkerRecord | None = None
        beat = Deadline.after(self._ttl_s / 3)
        while True:
            self._changed.clear()
            record = self._record()
            if record != announced:
                await self._registry.put(record.key(), encode_json(record), self._lease)
                _log.info("announced", key=record.key(), state=record.state)
                announced = record
                self._backoff_s = _BACKOFF_S_MIN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat.remaining_s()):
                    await self._changed.wait()
            if beat.has_passed():
                if await self._registry.keep_alive(self._lease) <= 0:
                    return
                beat = Deadline.after(self._ttl_s / 3)
