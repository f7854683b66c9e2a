"""A client of etcd v3 for asyncio: keys, leases, transactions, watches.

    async with EtcdClient(["etcd-1:2379", "etcd-2:2379"]) as etcd:
        lease = await etcd.grant(10)
        await etcd.put(b"/name", b"value", lease=lease)

Every call ends before its deadline: after `call_timeout_s` seconds where none is given. It goes
from member to member until one answers. See neuron_di/etcd/connection.py for what it raises.
"""

import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Self

from neuron_di.clock import Deadline, now_s
from neuron_di.errors import PeerRefused, PeerTimeout
from neuron_di.etcd.connection import MESSAGE_BYTES_MAX, TRY_TIMEOUT_S, Connection, Endpoint
from neuron_di.etcd.failures import AnswerTooLarge, HistoryGone, UnknownLease
from neuron_di.etcd.key_value import KeyRange, KeyValue, Listing, Page, key_value_of
from neuron_di.etcd.messages import (
    COMPACT,
    DELETE_RANGE,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    LEASE_TIME_TO_LIVE,
    PUT,
    RANGE,
    STATUS,
    TXN,
    CompactionRequest,
    DeleteRangeRequest,
    LeaseGrantRequest,
    LeaseKeepAliveRequest,
    LeaseRevokeRequest,
    LeaseTimeToLiveRequest,
    PutRequest,
    RangeRequest,
    StatusRequest,
    TxnRequest,
)
from neuron_di.etcd.packages import grpc
from neuron_di.etcd.security import Security
from neuron_di.etcd.watch_stream import WatchBatch, raise_end, watch_stream, write

CALL_TIMEOUT_S = 3.0
PAGE_KEYS = 1000  # for each page etcd counts all that come behind it, which takes it long
LIST_KEYS_MAX = 100_000
LIST_BYTES_MAX = 64 << 20  # of what a listing keeps
LIST_STARTS_MAX = 3  # a compaction between two pages begins a listing anew


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What the member that answered says of itself."""

    version: str
    db_size: int  # bytes
    leader: int  # member id; 0: none
    raft_index: int
    raft_term: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`responses` has one entry per operation of the branch that was taken."""

    succeeded: bool
    responses: Sequence[Any]
    revision: int


class EtcdClient:
    """The members at `addresses`, HOST:PORT each, of one etcd, while entered.

    Used from one event loop, by any number of tasks. Nothing has to listen yet.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        security: Security | None = None,
        *,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self._call_timeout_s = call_timeout_s
        self._connection = Connection(addresses, security or Security())
        self._page_keys = PAGE_KEYS  # less while pages do not come in time

    @property
    def num_attempts(self) -> int:
        """Tries of all calls, streams and authentications so far."""
        return self._connection.num_attempts

    @property
    def num_authentications(self) -> int:
        """Tokens asked for so far."""
        return self._connection.num_authentications

    async def __aenter__(self) -> Self:
        self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    # Keys.

    async def put(
        self, key: bytes, value: bytes, *, lease: int = 0, deadline: Deadline | None = None
    ) -> int:
        """Set a key; UnknownLease for a lease that is not there. Returns etcd's revision."""
        request = PutRequest(key=key, value=value, lease=lease)
        revision: int = (await self._call(PUT, request, deadline)).header.revision
        return revision

    async def get(
        self, key: bytes, *, revision: int = 0, deadline: Deadline | None = None
    ) -> KeyValue | None:
        """A key as it is now, agreed upon by most members, or was at a revision; None: no key."""
        answer = await self._call(RANGE, RangeRequest(key=key, revision=revision), deadline)
        return key_value_of(answer.kvs[0]) if answer.kvs else None

    async def delete(self, keys: KeyRange, *, deadline: Deadline | None = None) -> int:
        """Delete these keys. Returns how many there were."""
        request = DeleteRangeRequest(key=keys.first, range_end=keys.end)
        num_deleted: int = (await self._call(DELETE_RANGE, request, deadline)).deleted
        return num_deleted

    async def list_keys(self, keys: KeyRange) -> Listing:
        """These keys at one revision, in order: LIST_KEYS_MAX and LIST_BYTES_MAX at most."""
        for _ in range(LIST_STARTS_MAX - 1):
            try:
                return await self._list(keys)
            except HistoryGone:
                continue
        return await self._list(keys)

    async def _list(self, keys: KeyRange) -> Listing:
        items: list[KeyValue] = []
        num_bytes = 0
        async with aclosing(self.pages(keys)) as pages:
            async for page in pages:
                for num_read, item in enumerate(page.items):
                    num_bytes += len(item.key) + len(item.value)
                    if len(items) >= LIST_KEYS_MAX or num_bytes > LIST_BYTES_MAX:
                        num_left_out = page.num_left - num_read
                        return Listing(items, page.revision, page.cluster_id, num_left_out)
                    items.append(item)
        return Listing(items, page.revision, page.cluster_id, num_left_out=0)

    async def pages(self, keys: KeyRange) -> AsyncGenerator[Page, None]:
        """These keys, in order, as they were at the first page's revision. One page at least.

        Where one does not come in time, whoever asks again gets smaller ones. HistoryGone where
        the revision is gone meanwhile.
        """
        start, revision, cluster_id = keys.first, 0, 0
        while True:
            page_keys = self._page_keys
            request = RangeRequest(
                key=start, range_end=keys.end, limit=page_keys, revision=revision
            )
            asked_s = now_s()
            try:
                page = await self._call(RANGE, request, None)
            except (AnswerTooLarge, PeerTimeout) as error:
                self._page_keys = max(1, page_keys // 8)
                if page_keys == 1 or isinstance(error, PeerTimeout):
                    raise
                continue
            is_quick = 4 * (now_s() - asked_s) < TRY_TIMEOUT_S
            if revision == 0:
                revision, cluster_id = page.header.revision, page.header.cluster_id
            items = tuple(map(key_value_of, page.kvs))
            yield Page(items, revision, cluster_id, num_left=page.count)
            if not page.more or not items:
                return
            start = items[-1].key + b"\0"
            num_bytes = sum(len(item.key) + len(item.value) for item in items)
            if is_quick and 4 * num_bytes < MESSAGE_BYTES_MAX:
                self._page_keys = min(2 * page_keys, PAGE_KEYS)

    async def txn(
        self,
        compare: Sequence[Any],
        success: Sequence[Any],
        failure: Sequence[Any] = (),
        *,
        deadline: Deadline | None = None,
    ) -> TxnResult:
        """Compare, then do the operations of one branch, at one moment.

        The arguments are messages Compare and RequestOp. It is not sent again where it may
        have happened: after PeerTimeout or PeerGone look what there is.
        """
        request = TxnRequest(compare=compare, success=success, failure=failure)
        answer = await self._call(TXN, request, deadline, may_repeat=False)
        return TxnResult(answer.succeeded, answer.responses, answer.header.revision)

    async def compact(self, revision: int, *, deadline: Deadline | None = None) -> None:
        """Forget what was before a revision."""
        await self._call(COMPACT, CompactionRequest(revision=revision), deadline)

    # Leases.

    async def grant(self, ttl_s: float, *, deadline: Deadline | None = None) -> int:
        """A lease of at least `ttl_s` seconds. Returns its id, which is a random number."""
        # An id of our own: asked for twice, because an answer was lost, it is still one lease.
        request = LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=secrets.randbits(62) + 1)
        try:
            await self._call(LEASE_GRANT, request, deadline)
        except PeerRefused as error:
            if "lease already exists" not in error.message:
                raise
        lease: int = request.ID
        return lease

    async def keep_alive(self, lease: int, *, deadline: Deadline | None = None) -> int:
        """Start a lease's time anew. Returns the seconds it has; 0 when it is unknown."""
        request = LeaseKeepAliveRequest(ID=lease)

        async def attempt(
            endpoint: Endpoint, metadata: tuple[tuple[str, str], ...], timeout_s: float
        ) -> int:
            call = endpoint.stub(LEASE_KEEP_ALIVE)(timeout=timeout_s, metadata=metadata)
            try:
                await write(call, request)
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    await raise_end(call)
                ttl_s: int = answer.TTL
                return max(0, ttl_s)
            finally:
                call.cancel()

        try:
            return await self._connection.persist(attempt, self._deadline(deadline))
        except UnknownLease:
            return 0

    async def revoke(self, lease: int, *, deadline: Deadline | None = None) -> bool:
        """End a lease and delete its keys. Returns False when it is unknown."""
        try:
            await self._call(LEASE_REVOKE, LeaseRevokeRequest(ID=lease), deadline)
        except UnknownLease:
            return False
        return True

    async def time_to_live(self, lease: int, *, deadline: Deadline | None = None) -> Any:
        """What etcd says of a lease: ID, TTL (-1: unknown), grantedTTL, keys."""
        request = LeaseTimeToLiveRequest(ID=lease, keys=True)
        return await self._call(LEASE_TIME_TO_LIVE, request, deadline)

    # Watches, and the rest.

    def watch(
        self, keys: KeyRange, start_revision: int = 0, *, with_previous: bool = False
    ) -> AsyncGenerator[WatchBatch, None]:
        """One stream of changes, until it breaks: see neuron_di/etcd/watch_stream.py."""
        return watch_stream(self._connection, keys, start_revision, with_previous=with_previous)

    async def require_same(
        self, keys: KeyRange, batch: WatchBatch, before: WatchBatch | None
    ) -> None:
        """HistoryGone where a stream's first word comes from another etcd than what was `before`.

        Of a stream that goes on at a revision which is not there yet etcd says nothing until it is.
        """
        if before is None:
            return
        cluster_id, revision = batch.cluster_id, batch.revision
        if revision < before.revision:  # a member may lag behind, but not most of them
            async with aclosing(self.pages(KeyRange(keys.first))) as pages:
                page = await anext(pages)
            cluster_id, revision = page.cluster_id, page.revision
        if cluster_id != before.cluster_id or revision < before.revision:
            raise HistoryGone("this is another etcd than before, or one that lost what it had")

    async def status(self, *, deadline: Deadline | None = None) -> MemberStatus:
        """What a member says of itself."""
        answer = await self._call(STATUS, StatusRequest(), deadline)
        return MemberStatus(
            version=answer.version,
            db_size=answer.dbSize,
            leader=answer.leader,
            raft_index=answer.raftIndex,
            raft_term=answer.raftTerm,
            errors=tuple(answer.errors),
        )

    async def _call(
        self, method: Any, request: Any, deadline: Deadline | None, *, may_repeat: bool = True
    ) -> Any:
        return await self._connection.call(
            method, request, self._deadline(deadline), may_repeat=may_repeat
        )

    def _deadline(self, deadline: Deadline | None) -> Deadline:
        return deadline or Deadline.after(self._call_timeout_s)
