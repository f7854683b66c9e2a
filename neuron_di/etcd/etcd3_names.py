"""The client under etcd3's method names, for plain synchronous code.

    etcd = client(host="127.0.0.1", port=2379)
    lease = etcd.lease(10)
    etcd.put("/name", "value", lease=lease)
    events, cancel = etcd.watch_prefix("/")
    etcd.close()

Unlike etcd3 it works with every protobuf, its watches go on after etcd was away, and it renews
its token. Errors are this project's: PeerGone, PeerTimeout, PeerRefused. There is no `lock`: a
lease that ends while its holder pauses lets two hold it, so what it guarded is not guarded.
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from pathlib import Path
from typing import Any, Never, Self, TypeVar

from neuron_di.errors import PeerGone, PeerTimeout, TooLarge
from neuron_di.etcd.client import CALL_TIMEOUT_S, EtcdClient, MemberStatus
from neuron_di.etcd.daemon_threads import DaemonThreads
from neuron_di.etcd.etcd3_values import (
    SORT_KEYS,
    Comparison,
    DeleteEvent,
    Event,
    KVMetadata,
    Lease,
    LeaseTime,
    PutEvent,
    Transactions,
    WatchCallback,
    WatchResponse,
    as_bytes,
    event_of,
    key_range_of,
    lease_id_of,
    metadata_of,
)
from neuron_di.etcd.key_value import KeyRange, key_value_of
from neuron_di.etcd.security import Pem, Security

WATCH_PAUSE_S_MIN = 0.1
WATCH_PAUSE_S_MAX = 1.0

Found = tuple[bytes, KVMetadata]
T = TypeVar("T")


def client(
    host: str = "localhost",
    port: int = 2379,
    *,
    ca_cert: str | None = None,
    cert_key: str | None = None,
    cert_cert: str | None = None,
    timeout: float | None = None,
    user: str | None = None,
    password: str | None = None,
) -> "Etcd3Client":
    """A client of one member. Certificates are names of files; `timeout` is seconds per call."""
    pem = None
    if ca_cert is not None:
        files = cert_cert, cert_key
        cert, key = (None if file is None else Path(file).read_bytes() for file in files)
        pem = Pem(Path(ca_cert).read_bytes(), cert, key)
    security = Security(
        pem=None if pem is None else lambda: pem,
        user=user,
        password=None if password is None else lambda: password,
    )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Etcd3Client([address], security, timeout=timeout)


class Etcd3Client:
    """Usable from any thread until it is closed. Works on an event loop in a thread of its own.

    Callbacks of watches run one after the other in a further thread, and may call the client.
    """

    transactions = Transactions()

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self.timeout = timeout or CALL_TIMEOUT_S
        self._client = EtcdClient(addresses, security, call_timeout_s=self.timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="etcd", daemon=True)
        self._callbacks = DaemonThreads(1, "etcd-watch")
        self._watch_ids = itertools.count(1)
        self._watches: dict[int, Future[None]] = {}
        self._is_closed = False
        self._thread.start()
        self._run(self._client.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every watch and connection. What iterates a watch ends."""
        if self._is_closed:
            return
        self._run(self._end())
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._callbacks.shutdown(wait=False, cancel_futures=True)

    # Keys.

    def put(self, key: str | bytes, value: str | bytes, lease: Lease | int | None = None) -> int:
        """Set a key. Returns etcd's revision."""
        put = self._client.put(as_bytes(key), as_bytes(value), lease=lease_id_of(lease))
        return self._run(put)

    def get(self, key: str | bytes) -> Found | tuple[None, None]:
        """(value, metadata), or two None where there is no such key."""
        item = self._run(self._client.get(as_bytes(key)))
        return (None, None) if item is None else (item.value, metadata_of(item))

    def get_prefix(
        self, key_prefix: str | bytes, sort_order: str | None = None, sort_target: str = "key"
    ) -> Iterator[Found]:
        """Every key that begins so. `sort_order` is ascend or descend."""
        return self._found(KeyRange.prefix(as_bytes(key_prefix)), sort_order, sort_target)

    def get_range(
        self,
        range_start: str | bytes,
        range_end: str | bytes,
        sort_order: str | None = None,
        sort_target: str = "key",
    ) -> Iterator[Found]:
        """The keys from `range_start` up to `range_end`, which is not among them."""
        return self._found(key_range_of(range_start, range_end), sort_order, sort_target)

    def get_all(self, sort_order: str | None = None, sort_target: str = "key") -> Iterator[Found]:
        """Every key there is."""
        return self._found(KeyRange.prefix(b""), sort_order, sort_target)

    def delete(self, key: str | bytes) -> bool:
        """Delete a key. Returns whether there was one."""
        return self._run(self._client.delete(KeyRange(as_bytes(key)))) > 0

    def delete_prefix(self, prefix: str | bytes) -> int:
        """Delete every key that begins so. Returns how many there were."""
        return self._run(self._client.delete(KeyRange.prefix(as_bytes(prefix))))

    def put_if_not_exists(
        self, key: str | bytes, value: str | bytes, lease: Lease | int | None = None
    ) -> bool:
        """Set a key unless it is there. Returns whether it was set."""
        made = self.transactions
        done, _ = self.transaction([made.version(key) == 0], [made.put(key, value, lease)])
        return done

    def replace(self, key: str | bytes, initial_value: str | bytes, new_value: str | bytes) -> bool:
        """Set a key if it has this value. Returns whether it was set."""
        made = self.transactions
        done, _ = self.transaction([made.value(key) == initial_value], [made.put(key, new_value)])
        return done

    def transaction(
        self,
        compare: Sequence[Comparison],
        success: Sequence[Any] = (),
        failure: Sequence[Any] = (),
    ) -> tuple[bool, list[Any]]:
        """(whether all conditions held, a result for each operation of the branch taken).

        A result is the list of what was found for a get, and etcd's own answer else.
        """
        conditions = [each.message() for each in compare]
        result = self._run(self._client.txn(conditions, success, failure))
        return result.succeeded, [_result_of(each) for each in result.responses]

    # Leases.

    def lease(self, ttl: int) -> Lease:
        """A lease of `ttl` seconds."""
        return Lease(self._run(self._client.grant(ttl)), ttl, self)

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys. Nothing happens when it is unknown."""
        self._run(self._client.revoke(lease_id))

    def refresh_lease(self, lease_id: int) -> list[LeaseTime]:
        """Start a lease's time anew. One entry; its TTL is 0 where the lease is unknown."""
        return [LeaseTime(lease_id, self._run(self._client.keep_alive(lease_id)))]

    def get_lease_info(self, lease_id: int) -> Any:
        """etcd's answer: ID, TTL (-1: unknown), grantedTTL, keys."""
        return self._run(self._client.time_to_live(lease_id))

    def lock(self, *_: object, **__: object) -> Never:
        """Not offered: see this file's first words."""
        raise NotImplementedError(
            "neuron_di.etcd has no lock: a lease is none, because it can end while its holder "
            "pauses; guard what matters by a transaction on its version"
        )

    # Watches.

    def add_watch_callback(
        self,
        key: str | bytes,
        callback: WatchCallback,
        range_end: str | bytes | None = None,
        start_revision: int | None = None,
        *,
        prev_kv: bool = False,
    ) -> int:
        """Call back with each WatchResponse, until it is cancelled. Returns the watch's id.

        PeerTimeout where etcd has not begun it within the client's time-out: then there is none.
        It goes on after etcd was away. What ends it, a revision that was compacted, another etcd
        or a permission that is missing, is the last thing the callback gets: an exception.
        """
        keys = key_range_of(key, range_end)
        watch_id, _ = self._add_watch(keys, callback, start_revision, prev_kv=prev_kv)
        return watch_id

    def add_watch_prefix_callback(
        self, key_prefix: str | bytes, callback: WatchCallback, **words: Any
    ) -> int:
        """As `add_watch_callback`, for every key that begins so."""
        end = KeyRange.prefix(as_bytes(key_prefix)).end
        return self.add_watch_callback(key_prefix, callback, range_end=end, **words)

    def watch(
        self,
        key: str | bytes,
        range_end: str | bytes | None = None,
        start_revision: int | None = None,
        *,
        prev_kv: bool = False,
    ) -> tuple[Iterator[Event], Callable[[], None]]:
        """(events as they come, a function that ends them). PeerTimeout as for a callback."""
        heard: queue.SimpleQueue[WatchResponse | Exception | None] = queue.SimpleQueue()
        keys = key_range_of(key, range_end)
        watch_id, watch = self._add_watch(keys, heard.put, start_revision, prev_kv=prev_kv)
        watch.add_done_callback(lambda _: heard.put(None))

        def events() -> Iterator[Event]:
            while (response := heard.get()) is not None:
                if isinstance(response, Exception):
                    raise response
                yield from response.events

        return events(), lambda: self.cancel_watch(watch_id)

    def watch_prefix(
        self, key_prefix: str | bytes, **words: Any
    ) -> tuple[Iterator[Event], Callable[[], None]]:
        """As `watch`, for every key that begins so."""
        end = KeyRange.prefix(as_bytes(key_prefix)).end
        return self.watch(key_prefix, range_end=end, **words)

    def cancel_watch(self, watch_id: int) -> None:
        """End a watch. Nothing happens when it has ended."""
        watch = self._watches.pop(watch_id, None)
        if watch is not None:
            watch.cancel()

    # The rest.

    def status(self) -> MemberStatus:
        """What the member that answers says of itself."""
        return self._run(self._client.status())

    def compact(self, revision: int) -> None:
        """Forget what was before a revision."""
        self._run(self._client.compact(revision))

    def _found(self, keys: KeyRange, order: str | None, target: str) -> Iterator[Found]:
        listing = self._run(self._client.list_keys(keys))
        if listing.num_left_out:  # a part would pass for all of them
            raise TooLarge(f"there are {listing.num_left_out} keys more than are read at once")
        items = list(listing.items)
        if order is not None:
            items.sort(key=SORT_KEYS[target], reverse=order == "descend")
        return iter([(item.value, metadata_of(item)) for item in items])

    def _add_watch(
        self, keys: KeyRange, callback: WatchCallback, start_revision: int | None, *, prev_kv: bool
    ) -> tuple[int, Future[None]]:
        if self._is_closed:
            raise PeerGone("the client of etcd is closed")
        watch_id = next(self._watch_ids)
        begun: Future[None] = Future()
        following = self._follow(keys, callback, start_revision or 0, begun, prev_kv=prev_kv)
        watch = asyncio.run_coroutine_threadsafe(following, self._loop)
        self._watches[watch_id] = watch
        watch.add_done_callback(lambda _: self._watches.pop(watch_id, None))
        try:
            begun.result(self.timeout)
        except TimeoutError:
            watch.cancel()
            raise PeerTimeout(f"etcd did not begin a watch within {self.timeout:g} s") from None
        return watch_id, watch

    async def _follow(
        self,
        keys: KeyRange,
        callback: WatchCallback,
        revision: int,
        begun: Future[None],
        *,
        prev_kv: bool,
    ) -> None:
        pause_s, before = WATCH_PAUSE_S_MIN, None
        try:
            while True:
                try:
                    stream = self._client.watch(keys, revision, with_previous=prev_kv)
                    async with aclosing(stream) as batches:
                        async for batch in batches:
                            if batch.is_first:
                                await self._client.require_same(keys, batch, before)
                                revision = revision or batch.revision + 1
                            pause_s, before = WATCH_PAUSE_S_MIN, batch
                            if not begun.done():
                                begun.set_result(None)
                            if batch.changes:
                                await self._tell(callback, _response_of(batch))
                            if batch.changes and batch.is_whole:
                                revision = batch.changes[-1].now.mod_revision + 1
                except (PeerGone, PeerTimeout):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, WATCH_PAUSE_S_MAX)
        except Exception as error:
            await self._tell(callback, error)
        finally:
            if not begun.done():
                begun.set_result(None)

    async def _tell(self, callback: WatchCallback, response: WatchResponse | Exception) -> None:
        await self._loop.run_in_executor(self._callbacks, callback, response)

    async def _end(self) -> None:
        for watch in list(self._watches.values()):
            watch.cancel()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=CALL_TIMEOUT_S)
        await self._client.__aexit__(None, None, None)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:  # whoever waits for a call of another thread must hear that it ended
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CALL_TIMEOUT_S)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_closed:
            work.close()
            raise PeerGone("the client of etcd is closed")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except CancelledError:
            raise PeerGone("the client of etcd was closed") from None


def _response_of(batch: Any) -> WatchResponse:
    return WatchResponse(tuple(map(event_of, batch.changes)), batch.revision)


def _result_of(response: Any) -> Any:
    if not response.HasField("response_range"):
        return response
    items = map(key_value_of, response.response_range.kvs)
    return [(item.value, metadata_of(item)) for item in items]


__all__ = [
    "DeleteEvent",
    "Etcd3Client",
    "Event",
    "KVMetadata",
    "Lease",
    "PutEvent",
    "WatchResponse",
    "client",
]
