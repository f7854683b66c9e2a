"""A registry on an `etcd3.Client` that somebody else has made: their TLS, their user.

Calls go to threads. The watch looks at etcd's revision several times a second instead of using
etcd3's: etcd3 0.12.0 spins on a core while etcd is down, and forgets its watches after that.

A call that was given up goes on in its thread until the client's own time-out. So puts are made
one after the other: what was put last is what stays.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self, TypeVar

from neuron_di.clock import now_s
from neuron_di.errors import ConfigError, PeerError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.etcd.daemon_threads import DaemonThreads
from neuron_di.etcd.failures import one_line
from neuron_di.etcd.selection import Selection
from neuron_di.obs import LimitedLogger
from neuron_di.registry.embedded import KEY_BYTES_MAX, TTL_S_MAX, TTL_S_MIN
from neuron_di.registry.registry import LeaseId, RegistryEvent, Snapshot
from neuron_di.wire import RECORD_BYTES_MAX

_log = LimitedLogger(__name__)

WATCH_INTERVAL_S = 0.25
RELIST_S = 30.0
CALL_TIMEOUT_S = 3.0
THREADS_MAX = 4  # calls at once

T = TypeVar("T")


class Etcd3Registry:
    """A Registry, and watchable, while entered. The client stays its maker's, who closes it.

    ConfigError for a client without a time-out: its calls would hold our threads for as long as
    etcd hangs.

    `num_dropped` counts keys that were left out, as EtcdRegistry does.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        if not getattr(client, "timeout", None):
            raise ConfigError("this etcd3 client has no time-out: make it by client(timeout=1)")
        self._client = client
        self._last_put: asyncio.Future[Any] | None = None
        self._prefix = prefix.rstrip("/")
        self._trouble = ""
        self._counted = (0, 0)  # cluster, and up to which of its revisions keys were counted
        self.num_dropped = 0

    async def __aenter__(self) -> Self:
        self._threads = DaemonThreads(THREADS_MAX, "etcd3")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def trouble(self) -> str:
        """Why nothing is heard from etcd now, in words; empty while all is well."""
        return self._trouble

    async def grant(self, ttl_s: float) -> LeaseId:
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise PeerRefused(f"a lease lasts from {TTL_S_MIN} to {TTL_S_MAX} s, not {ttl_s}")
        lease = await self._call(lambda: self._client.lease(math.ceil(ttl_s)))
        return LeaseId(lease.id)

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX or not key.startswith("/"):
            raise PeerRefused(f"a key begins with / and has at most {KEY_BYTES_MAX} bytes")
        if len(value) > RECORD_BYTES_MAX:
            raise PeerRefused(f"a value has at most {RECORD_BYTES_MAX} bytes, not {len(value)}")
        await self._call(
            lambda: self._client.put(self._prefix + key, value, lease=lease), is_put=True
        )

    async def keep_alive(self, lease: LeaseId) -> float:
        answers = await self._call(lambda: list(self._client.refresh_lease(lease)))
        return float(max(0, answers[-1].TTL)) if answers else 0.0

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._call(lambda: self._client.revoke_lease(lease))
        except PeerRefused as error:
            if "lease not found" not in error.message:
                raise

    async def watch(self, prefix: str) -> AsyncGenerator[RegistryEvent, None]:
        """As WatchableRegistry says, in snapshots only."""
        start = self._prefix + (prefix or "/")
        seen, list_again_s, known = (0, 0), 0.0, set[str]()
        while True:
            try:
                if now_s() >= list_again_s or await self._now(start) != seen:
                    seen, selection = await self._all(start, known)
                    list_again_s, known = now_s() + RELIST_S, set(selection.records)
                    yield Snapshot(selection.values())
                self._trouble = ""
            except PeerError as error:
                self._trouble = error.message
                _log.warning("etcd_unreachable", reason=error.message)
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _now(self, start: str) -> tuple[int, int]:
        """(cluster, revision of all keys) as most members have it."""
        header = (await self._call(lambda: self._client.get_response(start))).header
        return header.cluster_id, header.revision

    async def _all(self, start: str, known: set[str]) -> tuple[tuple[int, int], Selection]:
        """As EtcdRegistry lists, but in one message: etcd3 cannot ask for a page."""
        answer = await self._call(lambda: self._client.get_prefix_response(start))
        header, selection, num_dropped = answer.header, Selection(known), 0
        for item in answer.kvs:
            if not selection.take(self._name_of(item.key), item.value):
                num_dropped += (header.cluster_id, item.mod_revision) > self._counted
        self._counted = (header.cluster_id, header.revision)
        if num_dropped:
            self.num_dropped += num_dropped
            _log.warning("etcd_keys_dropped", num=num_dropped, num_so_far=self.num_dropped)
        return self._counted, selection

    def _name_of(self, key: bytes) -> str | None:
        try:
            return key.decode().removeprefix(self._prefix)
        except UnicodeDecodeError:
            return None

    async def _call(self, call: Callable[[], T], *, is_put: bool = False) -> T:
        """What a call returns; its failure, whatever library's it is, as one of ours."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if not is_put:
                    return await loop.run_in_executor(self._threads, call)
                while self._last_put is not None and not self._last_put.done():
                    await asyncio.wait([self._last_put])
                # Not cancelled with us: then nobody would know when it ends.
                self._last_put = loop.run_in_executor(self._threads, call)
                self._last_put.add_done_callback(_note_failure)
                result: T = await asyncio.shield(self._last_put)
                return result
        except TimeoutError:
            raise PeerTimeout(f"etcd did not answer within {CALL_TIMEOUT_S} s") from None
        except PeerError:
            raise
        except Exception as error:
            raise _ours(error) from None


def _note_failure(put: "asyncio.Future[Any]") -> None:
    """Nobody may be left who asks for it."""
    if not put.cancelled():
        put.exception()


def _ours(error: Exception) -> PeerError:
    """By name: neither etcd3 nor its gRPC need be installed to read this file."""
    name = type(error).__name__
    if name == "ConnectionTimeoutError":
        return PeerTimeout("etcd did not answer in time")
    if name in ("ConnectionFailedError", "InternalServerError"):
        return PeerGone(f"etcd cannot be reached ({name})")
    details = getattr(error, "details", None)
    words = details() if callable(details) else name
    return PeerRefused(f"etcd refused: {one_line(words)}")
