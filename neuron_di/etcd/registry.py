"""etcd as a registry: what workers announce themselves in and proxies watch.

Keys are said without the prefix: `/workers/decode/10.0.0.7/8101` is, with the default prefix,
etcd's `/neuron-di/workers/decode/10.0.0.7/8101`.

A watch lists at a revision and follows from the next one. When the stream breaks it goes on where
it was; when it cannot, because etcd has compacted that or is a new one, it lists again. What a
broken watch of etcd's may have lost all the same is found by listing from time to time. A listing
reads all keys, as far as its bounds let it: who they are of is seen by their values only.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from neuron_di.clock import now_s
from neuron_di.errors import PeerError, PeerRefused
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.failures import HistoryGone
from neuron_di.etcd.key_value import Change, KeyRange
from neuron_di.etcd.selection import JUNK_MAX, Selection
from neuron_di.etcd.watch_stream import WatchBatch
from neuron_di.obs import LimitedLogger
from neuron_di.registry.embedded import KEY_BYTES_MAX, KEYS_MAX, TTL_S_MAX, TTL_S_MIN
from neuron_di.registry.record_reader import is_record
from neuron_di.registry.registry import (
    KeyChanged,
    KeyDeleted,
    LeaseId,
    RegistryEvent,
    Snapshot,
)
from neuron_di.wire import RECORD_BYTES_MAX

_log = LimitedLogger(__name__)

RELIST_S = 30.0  # a change that a watch has lost is seen after this
RELIST_AFTER_BREAK_S = 2.0  # a new etcd can look like the old one, as far as a watch can see
PAUSE_S_MIN = 0.1
PAUSE_S_MAX = 1.0
WORTH_A_WARNING_S = 0.8  # a pause of so long
REFUSED_PAUSE_S = 5.0  # nothing will change until somebody mends it
LONG_LIFE_S = 2.0  # a watch that lived so long is tried again at once
SCAN_BYTES_MAX = 256 << 20  # of keys that a listing reads
SCAN_S_MAX = 15.0
LIST_STARTS_MAX = 3  # what it reads may be gone between two pages


@dataclass(slots=True)
class _Place:
    """How far a watch has come: everything up to `revision` of this cluster was said."""

    revision: int
    cluster_id: int
    records: set[str]  # keys that were said and are there, with a worker's record
    junk: set[str]  # the same, with something else
    listed_s: float
    list_again_s: float
    heard_since_s: float | None = None  # of the stream that is open
    has_broken: bool = False  # a stream, since it was listed

    def counted(self, cluster_id: int) -> int:
        """Up to which revision of a cluster everything was seen."""
        return self.revision if cluster_id == self.cluster_id else 0

    def forget(self, key: str) -> bool:
        """Whether the key was said."""
        is_known = key in self.records or key in self.junk
        self.records.discard(key)
        self.junk.discard(key)
        return is_known


class EtcdRegistry:
    """A Registry, and watchable, at a client that is entered and outlives it.

    `num_dropped` counts what was left out, each change once: keys whose names or values can be no
    record's, and what is more than KEYS_MAX records or JUNK_MAX of all else. `num_lists` and
    `num_breaks` count what watches went through.
    """

    def __init__(self, client: EtcdClient, prefix: str, *, relist_s: float = RELIST_S) -> None:
        self._client = client
        self._prefix = prefix.rstrip("/")
        self._relist_s = relist_s
        self._trouble = ""
        self._num_unread = 0  # keys that the last listing did not come to
        self.num_dropped = 0
        self.num_lists = 0
        self.num_breaks = 0

    def trouble(self) -> str:
        """Why nothing is heard from etcd now, in words; empty while all is well."""
        return self._trouble

    async def grant(self, ttl_s: float) -> LeaseId:
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise PeerRefused(f"a lease lasts from {TTL_S_MIN} to {TTL_S_MAX} s, not {ttl_s}")
        return LeaseId(await self._client.grant(ttl_s))

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX or not key.startswith("/"):
            raise PeerRefused(f"a key begins with / and has at most {KEY_BYTES_MAX} bytes")
        if len(value) > RECORD_BYTES_MAX:
            raise PeerRefused(f"a value has at most {RECORD_BYTES_MAX} bytes, not {len(value)}")
        await self._client.put((self._prefix + key).encode(), value, lease=lease)

    async def keep_alive(self, lease: LeaseId) -> float:
        return float(await self._client.keep_alive(lease))

    async def revoke(self, lease: LeaseId) -> None:
        await self._client.revoke(lease)

    async def watch(self, prefix: str) -> AsyncGenerator[RegistryEvent, None]:
        """As WatchableRegistry says. While etcd cannot be reached nothing is said."""
        keys = KeyRange.prefix((self._prefix + (prefix or "/")).encode())
        place: _Place | None = None
        last: _Place | None = None  # where it was listed last, whatever became of that
        pause_s = PAUSE_S_MIN
        while True:
            try:
                if place is None or now_s() >= place.list_again_s:
                    snapshot, place = await self._list(keys, last)
                    last = place
                    yield snapshot
                async with aclosing(self._follow(keys, place)) as events:
                    async for event in events:
                        yield event
                continue  # it is time to list again
            except HistoryGone as error:
                _log.warning("etcd_history_gone", reason=error.message)
                if place is not None and now_s() - place.listed_s >= LONG_LIFE_S:
                    pause_s = PAUSE_S_MIN
                place = None
            except PeerError as error:
                self.num_breaks += 1
                self._trouble = error.message
                pause_s = self._pause_after(error, place, pause_s)
                # At first it is no news: a proxy that ends takes an etcd of its own along.
                log = _log.warning if pause_s >= WORTH_A_WARNING_S else _log.info
                log("etcd_watch_broken", reason=error.message, retry_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _pause_after(self, error: PeerError, place: _Place | None, pause_s: float) -> float:
        """Seconds to wait after a break of the watch."""
        since_s = None
        if place is not None:
            since_s, place.heard_since_s, place.has_broken = place.heard_since_s, None, True
        if isinstance(error, PeerRefused):
            return REFUSED_PAUSE_S
        has_lived = since_s is not None and now_s() - since_s >= LONG_LIFE_S
        return min(pause_s, PAUSE_S_MIN) if has_lived else pause_s

    async def _list(self, keys: KeyRange, last: _Place | None) -> tuple[Snapshot, _Place]:
        """All there is. `last`: what was said before."""
        for _ in range(LIST_STARTS_MAX - 1):
            try:
                return await self._list_once(keys, last)
            except HistoryGone:
                continue
        return await self._list_once(keys, last)

    async def _list_once(self, keys: KeyRange, last: _Place | None) -> tuple[Snapshot, _Place]:
        selection = Selection(set() if last is None else last.records)
        until_s = now_s() + SCAN_S_MAX
        num_bytes, num_dropped, num_unread = 0, 0, 0
        revision, cluster_id = 0, 0
        async with aclosing(self._client.pages(keys)) as pages:
            async for page in pages:
                revision, cluster_id = page.revision, page.cluster_id
                for item in page.items:
                    num_bytes += len(item.key) + len(item.value)
                    if not selection.take(self._name_of(item.key), item.value):
                        counted = 0 if last is None else last.counted(cluster_id)
                        num_dropped += item.mod_revision > counted
                if num_bytes > SCAN_BYTES_MAX or now_s() >= until_s:
                    num_unread = page.num_left - len(page.items)
                    break
        if num_unread > 0:
            num_dropped += max(0, num_unread - self._num_unread)
            await self._add_missing(selection, revision)
        self._num_unread = num_unread
        self.num_lists += 1
        self._count_dropped(num_dropped)
        now = now_s()
        listed = _Place(
            revision=revision,
            cluster_id=cluster_id,
            records=set(selection.records),
            junk=set(selection.junk),
            listed_s=now,
            list_again_s=now + self._relist_s,
        )
        return Snapshot(selection.values()), listed

    async def _add_missing(self, selection: Selection, revision: int) -> None:
        """There is more than can be read: ask for those that are known."""
        for name in selection.missing():
            item = await self._client.get((self._prefix + name).encode(), revision=revision)
            if item is not None:
                selection.take(name, item.value)

    async def _follow(self, keys: KeyRange, place: _Place) -> AsyncGenerator[RegistryEvent, None]:
        """What happens after `place`, which goes along. Ends when it is time to list again."""
        # From the revision itself on, though it was said: of a stream that begins in the future
        # etcd 3.4.38, 3.5.22 and 3.6.2 say no progress until that is there.
        stream = self._client.watch(keys, place.revision)
        async with aclosing(stream) as batches:
            async for batch in batches:
                if place.heard_since_s is None:
                    self._check_same(batch, place)
                for change in batch.changes:
                    if change.now.mod_revision <= place.revision:
                        continue
                    event = self._event_of(change, place)
                    if event is not None:
                        yield event
                if batch.changes and batch.is_whole:
                    place.revision = max(place.revision, batch.changes[-1].now.mod_revision)
                if now_s() >= place.list_again_s:
                    return

    def _check_same(self, batch: WatchBatch, place: _Place) -> None:
        """The first word of a stream: is it the etcd that was listed?"""
        if batch.cluster_id != place.cluster_id:
            raise HistoryGone("this is another etcd than before")
        if batch.revision < place.revision:
            raise HistoryGone(
                f"etcd's revision went back from {place.revision} to {batch.revision}"
            )
        self._trouble = ""
        place.heard_since_s = now_s()
        if place.has_broken:
            soon_s = place.heard_since_s + RELIST_AFTER_BREAK_S
            place.list_again_s = min(place.list_again_s, soon_s)

    def _event_of(self, change: Change, place: _Place) -> RegistryEvent | None:
        key = self._name_of(change.now.key)
        if key is None:
            self._count_dropped(1)
            return None
        value, is_known = change.now.value, place.forget(key)
        if change.is_deletion:
            return KeyDeleted(key)
        if is_record(key, value):
            kind, limit = place.records, KEYS_MAX
        else:
            kind, limit = place.junk, JUNK_MAX
        if len(kind) >= limit or len(value) > RECORD_BYTES_MAX:
            self._count_dropped(1)
            return KeyDeleted(key) if is_known else None
        kind.add(key)
        return KeyChanged(key, value)

    def _name_of(self, key: bytes) -> str | None:
        """A key of etcd's without our prefix; None for one that can be none of ours."""
        if len(key) > len(self._prefix) + KEY_BYTES_MAX:
            return None
        try:
            return key.decode().removeprefix(self._prefix)
        except UnicodeDecodeError:
            return None

    def _count_dropped(self, num: int) -> None:
        if num:
            self.num_dropped += num
            _log.warning("etcd_keys_dropped", num=num, num_so_far=self.num_dropped)
