"""Keeps a worker's record in the registry, whatever happens to the registry."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import PeerError
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.registry.registry import LeaseId, Registry
from neuron_di.registry.supervised import Supervised
from neuron_di.wire import WorkerRecord, encode_json

_log = get_logger(__name__)
# An outage may last for hours: it is said when it begins, and now and then.
_trouble_log = LimitedLogger(__name__, lines_max=2, interval_s=60.0)

ANNOUNCE_TTL_S = 10.0
BEATS_PER_TTL = 3
# A record that has not changed is put again at every second beat: somebody may have deleted or
# overwritten it while its lease lives. A directory keeps its worker for longer (keep_s_for).
BEATS_PER_PUT = 2
# Whoever sees the registry in snapshots only must have one that says that we drain: a key that is
# gone without that is suspicion, and its worker kept.
SEEN_S = 0.15
_WITHDRAW_TIMEOUT_S = 0.3  # a registry that ended before us must not hold up our own end
_BACKOFF_S_MIN = 0.1
_BACKOFF_S_MAX = 2.0


class Announcer:
    """Announces while entered and withdraws at the end.

    The record is asked for at each beat, every third of `ttl_s`, and after `record_changed`;
    its key must stay the same. It is put when it has changed, and at every second beat. An
    unreachable registry is tried again for ever: the worker serves on meanwhile. `on_trouble` hears
    why, and "" once all is well again. Does not own the registry, which must outlive it.
    """

    def __init__(
        self,
        registry: Registry,
        record: Callable[[], WorkerRecord],
        *,
        ttl_s: float = ANNOUNCE_TTL_S,
        on_trouble: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._registry = registry
        self._record = record
        self._ttl_s = ttl_s
        self._on_trouble = on_trouble
        self._changed = asyncio.Event()
        self._lease: LeaseId | None = None
        self._announced: WorkerRecord | None = None  # under this lease
        self._announced_s = 0.0  # when this state of it was
        self._granting: asyncio.Future[LeaseId] | None = None
        self._is_withdrawn = False
        self._backoff_s = _BACKOFF_S_MIN
        self._trouble = ""
        self._announcing = Supervised("announcer", self._run)

    def trouble(self) -> str:
        """Why the record may not be in the registry; empty while all is well."""
        return self._announcing.trouble() or self._trouble

    def record_changed(self) -> None:
        """Announce the record as it is now, without waiting for the next beat."""
        self._changed.set()

    async def __aenter__(self) -> Self:
        await self._announcing.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_withdrawn:
            await self.withdraw(_WITHDRAW_TIMEOUT_S)

    async def withdraw(self, timeout_s: float) -> bool:
        """Announce no more and revoke the lease: the key is gone.

        A worker that drains has said so before: else its end would be taken for a crash.
        False when the registry did not say so in time: then both end with the lease's own time.
        """
        self._is_withdrawn = True
        await self._announcing.__aexit__(None, None, None)
        try:
            async with asyncio.timeout(SEEN_S + timeout_s):
                if self._granting is not None:  # a lease may be ours, and nobody knows of it
                    self._lease = await self._granting
                if self._lease is not None:
                    await self._say_last(self._lease)
                    await self._registry.revoke(self._lease)
        except (PeerError, TimeoutError) as error:
            # As a rule a proxy has ended, and its registry with it. What is left ends by its lease.
            _log.debug("withdraw_failed", reason=type(error).__name__)
            return False
        return True

    async def _say_last(self, lease: LeaseId) -> None:
        record = self._record()
        if record.state != "draining":
            return
        with contextlib.suppress(PeerError):  # such as: this lease is gone already
            if record != self._announced:
                await self._announce(record, lease)
            await asyncio.sleep(max(0.0, self._announced_s + SEEN_S - now_s()))

    async def _announce(self, record: WorkerRecord, lease: LeaseId) -> None:
        await self._registry.put(record.key(), encode_json(record), lease)
        # Its load is another at each beat: that is no news.
        if self._announced is None or record.state != self._announced.state:
            _log.info("announced", key=record.key(), state=record.state)
            self._announced_s = now_s()
        self._announced = record

    async def _run(self) -> None:
        while True:
            try:
                await self._hold_lease()
                _trouble_log.warning("announce_lease_lost")
            except PeerError as error:
                self._note_trouble(error.message)
                reason, retry_s = error.message, self._backoff_s
                _trouble_log.warning("announce_failed", reason=reason, retry_s=retry_s)
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)

    def _note_trouble(self, reason: str) -> None:
        if reason != self._trouble:
            self._trouble = reason
            self._on_trouble(reason)

    async def _hold_lease(self) -> None:
        """Announce under a lease of our own until the registry no longer knows it."""
        lease = await self._own_lease()
        self._announced = None
        beat, num_beats = Deadline.after(self._ttl_s / BEATS_PER_TTL), 0  # since the last put
        while True:
            self._changed.clear()
            record = self._record()
            if num_beats >= BEATS_PER_PUT or record != self._announced:
                await self._announce(record, lease)
                num_beats = 0
                self._backoff_s = _BACKOFF_S_MIN
                self._note_trouble("")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(beat.remaining_s()):
                    await self._changed.wait()
            if beat.has_passed():
                if await self._registry.keep_alive(lease) <= 0:
                    self._lease = None
                    return
                beat, num_beats = Deadline.after(self._ttl_s / BEATS_PER_TTL), num_beats + 1

    async def _own_lease(self) -> LeaseId:
        """The lease that an earlier try left, if the registry still has it, or a fresh one."""
        if self._lease is not None and await self._registry.keep_alive(self._lease) > 0:
            return self._lease
        self._lease = None
        if self._granting is None:
            # Not cancelled with us: a lease that was granted to nobody would stay for its time.
            self._granting = asyncio.ensure_future(self._registry.grant(self._ttl_s))
        try:
            self._lease = await asyncio.shield(self._granting)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._granting = None
            raise
        self._granting = None
        return self._lease
