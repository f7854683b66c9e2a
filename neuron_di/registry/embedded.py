"""A registry inside one process: what a single machine uses in place of etcd.

Nothing is kept across a restart: workers notice that their lease is unknown and announce
themselves anew.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from neuron_di.clock import now_s
from neuron_di.errors import LocalProtocolError, PeerRefused
from neuron_di.registry.registry import (
    KeyChanged,
    KeyDeleted,
    LeaseId,
    RegistryEvent,
    Snapshot,
)
from neuron_di.wire import RECORD_BYTES_MAX

KEYS_MAX = 10_000
LEASES_MAX = 10_000
KEY_BYTES_MAX = 1024
TTL_S_MIN = 1.0
TTL_S_MAX = 3600.0
PAGE_BYTES_MAX = RECORD_BYTES_MAX  # of keys and values, unless a single one is larger
HISTORY_MAX = 4096  # changes a watcher may fall behind before it gets a snapshot


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    ends_s: float
    keys: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    value: bytes
    lease: LeaseId


class EmbeddedRegistry:
    """Keys, their leases, and the latest changes for watchers. Used from one event loop.

    Leases end only in `expire`, which the owner calls from time to time. `clock` counts seconds
    and never goes back.
    """

    num_dropped = 0

    def __init__(self, clock: Callable[[], float] = now_s) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._identity = secrets.token_hex(8)  # another registry's versions are not ours
        self._revision = 0  # number of changes so far; the history holds the latest of them
        self._history: deque[KeyChanged | KeyDeleted] = deque(maxlen=HISTORY_MAX)
        self._changed = asyncio.Event()  # set at the next change, and replaced by a fresh one
        self._trouble_of_server: Callable[[], str] = lambda: ""

    def trouble(self) -> str:
        """Why others cannot reach it; empty while they can, or nobody serves it to others."""
        return self._trouble_of_server()

    def is_served_by(self, trouble: Callable[[], str]) -> None:
        """Others reach it through somebody who says by `trouble` what is wrong with that."""
        self._trouble_of_server = trouble

    async def grant(self, ttl_s: float) -> LeaseId:
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise PeerRefused(f"a lease lasts from {TTL_S_MIN} to {TTL_S_MAX} s, not {ttl_s}")
        if len(self._leases) >= LEASES_MAX:
            raise PeerRefused(f"the registry has {LEASES_MAX} leases, its limit")
        # Random, so that a lease of this registry's predecessor is unknown here and not, by a
        # count that began again, somebody else's.
        lease = LeaseId(secrets.randbits(63))
        self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
        return lease

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX:
            raise PeerRefused(f"a key has 1 to {KEY_BYTES_MAX} bytes")
        if len(value) > RECORD_BYTES_MAX:
            raise PeerRefused(f"a value has at most {RECORD_BYTES_MAX} bytes, not {len(value)}")
        holder = self._leases.get(lease)
        if holder is None:
            raise PeerRefused("the lease is unknown")
        former = self._entries.get(key)
        if former is not None:
            self._leases[former.lease].keys.discard(key)
        elif len(self._entries) >= KEYS_MAX:
            raise PeerRefused(f"the registry has {KEYS_MAX} keys, its limit")
        self._entries[key] = _Entry(value, lease)
        holder.keys.add(key)
        if former is None or former.value != value:  # else nothing is new to those who watch
            self._record(KeyChanged(key, value))

    async def keep_alive(self, lease: LeaseId) -> float:
        holder = self._leases.get(lease)
        if holder is None:
            return 0.0
        holder.ends_s = self._clock() + holder.ttl_s
        return holder.ttl_s

    async def revoke(self, lease: LeaseId) -> None:
        if lease in self._leases:
            self._drop(lease)

    def expire(self) -> None:
        """Drop every lease that has ended, and its keys."""
        now = self._clock()
        for lease in [name for name, each in self._leases.items() if each.ends_s <= now]:
            self._drop(lease)

    async def wait_change(self) -> None:
        """Wait for the next change of a key."""
        await self._changed.wait()

    def extend_all(self, duration_s: float) -> None:
        """Let every lease last longer, for time in which it could not be kept alive."""
        for each in self._leases.values():
            each.ends_s += duration_s

    async def watch(self, prefix: str) -> AsyncGenerator[RegistryEvent, None]:
        seen = -1
        while True:
            if seen < self._revision - len(self._history):  # at first, or fallen behind
                seen = self._revision
                yield Snapshot(
                    {
                        key: entry.value
                        for key, entry in self._entries.items()
                        if key.startswith(prefix)
                    }
                )
            elif seen < self._revision:
                event = self._history[seen - self._revision]
                seen += 1
                if event.key.startswith(prefix):
                    yield event
            else:
                await self._changed.wait()

    @property
    def version(self) -> str:
        """Names what there is now, in this registry."""
        return f"{self._identity}-{self._revision}"

    def page(self, prefix: str, after: str) -> tuple[dict[str, bytes], bool]:
        """Some keys with this prefix behind `after`, in order, and whether they are the last."""
        keys = sorted(key for key in self._entries if key.startswith(prefix) and key > after)
        page: dict[str, bytes] = {}
        num_bytes = 0
        for key in keys:
            value = self._entries[key].value
            num_bytes += len(key.encode()) + len(value)
            if page and num_bytes > PAGE_BYTES_MAX:
                return page, False
            page[key] = value
        return page, True

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless keys and leases agree and no limit is exceeded."""
        if len(self._entries) > KEYS_MAX or len(self._leases) > LEASES_MAX:
            raise LocalProtocolError(f"{len(self._entries)} keys, {len(self._leases)} leases")
        for key, entry in self._entries.items():
            if key not in self._leases[entry.lease].keys:
                raise LocalProtocolError(f"{key} is unknown to its lease")
        num_held = sum(len(each.keys) for each in self._leases.values())
        if num_held != len(self._entries):
            raise LocalProtocolError(f"{num_held} keys are held, {len(self._entries)} exist")

    def _drop(self, lease: LeaseId) -> None:
        for key in sorted(self._leases.pop(lease).keys):
            del self._entries[key]
            self._record(KeyDeleted(key))

    def _record(self, event: KeyChanged | KeyDeleted) -> None:
        self._history.append(event)
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()
