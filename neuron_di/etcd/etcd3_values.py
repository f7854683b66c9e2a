"""What etcd3's methods return and take, under etcd3's names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from neuron_di.errors import BadRequest
from neuron_di.etcd.key_value import Change, KeyRange, KeyValue
from neuron_di.etcd.messages import (
    Compare,
    DeleteRangeRequest,
    PutRequest,
    RangeRequest,
    RequestOp,
)

_RESULTS = {"==": 0, ">": 1, "<": 2, "!=": 3}

# What a listing is sorted by, by etcd3's names.
SORT_KEYS: dict[str, Callable[[KeyValue], Any]] = {
    "key": lambda item: item.key,
    "version": lambda item: item.version,
    "create": lambda item: item.create_revision,
    "mod": lambda item: item.mod_revision,
    "value": lambda item: item.value,
}


def as_bytes(text: str | bytes) -> bytes:
    """Keys and values may be text, too."""
    return text.encode() if isinstance(text, str) else text


@dataclass(frozen=True, slots=True)
class KVMetadata:
    """What is known of a key beside its value."""

    key: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int


def metadata_of(item: KeyValue) -> KVMetadata:
    """A key's metadata."""
    return KVMetadata(item.key, item.create_revision, item.mod_revision, item.version, item.lease)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a key."""

    key: bytes
    value: bytes
    mod_revision: int
    version: int
    prev_value: bytes | None


class PutEvent(Event):
    """A key was put."""


class DeleteEvent(Event):
    """A key was deleted."""


def event_of(change: Change) -> Event:
    """A change under etcd3's names."""
    made = DeleteEvent if change.is_deletion else PutEvent
    now, before = change.now, change.before
    previous = None if before is None else before.value
    return made(now.key, now.value, now.mod_revision, now.version, previous)


@dataclass(frozen=True, slots=True)
class WatchResponse:
    """What a watch's callback gets: events, in order."""

    events: Sequence[Event]
    revision: int


WatchCallback = Callable[[WatchResponse | Exception], object]


class LeaseKeeper(Protocol):
    """The methods of a client that a lease needs."""

    def revoke_lease(self, lease_id: int) -> None: ...

    def refresh_lease(self, lease_id: int) -> Sequence["LeaseTime"]: ...

    def get_lease_info(self, lease_id: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class LeaseTime:
    """What a lease has after it was refreshed; 0: it is unknown."""

    ID: int
    TTL: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease of `ttl` seconds."""

    id: int
    ttl: int
    etcd_client: LeaseKeeper

    def revoke(self) -> None:
        """End it, and delete its keys."""
        self.etcd_client.revoke_lease(self.id)

    def refresh(self) -> Sequence[LeaseTime]:
        """Start its time anew. One entry; its TTL is 0 where the lease is unknown."""
        return self.etcd_client.refresh_lease(self.id)

    @property
    def remaining_ttl(self) -> int:
        remaining: int = self.etcd_client.get_lease_info(self.id).TTL
        return remaining

    @property
    def granted_ttl(self) -> int:
        granted: int = self.etcd_client.get_lease_info(self.id).grantedTTL
        return granted

    @property
    def keys(self) -> list[bytes]:
        return list(self.etcd_client.get_lease_info(self.id).keys)


class Comparison:
    """`transactions.value("/key") == "x"`: a condition of a transaction."""

    __hash__ = None  # type: ignore[assignment]  # == builds a condition and compares nothing

    def __init__(self, target: int, field: str, key: str | bytes) -> None:
        self._target = target
        self._field = field
        self._key = key
        self._operator = ""
        self._other: Any = None

    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        return self._that("==", other)

    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        return self._that("!=", other)

    def __lt__(self, other: object) -> Self:
        return self._that("<", other)

    def __gt__(self, other: object) -> Self:
        return self._that(">", other)

    def _that(self, operator: str, other: object) -> Self:
        self._operator, self._other = operator, other
        return self

    def message(self) -> Any:
        """BadRequest for a condition that compares with nothing."""
        if not self._operator:
            raise BadRequest("a condition compares by ==, !=, < or >")
        other = as_bytes(self._other) if self._field == "value" else self._other
        return Compare(
            result=_RESULTS[self._operator],
            target=self._target,
            key=as_bytes(self._key),
            **{self._field: other},
        )


class Transactions:
    """Conditions and operations: the attribute `transactions` of a client."""

    @staticmethod
    def version(key: str | bytes) -> Comparison:
        return Comparison(0, "version", key)

    @staticmethod
    def create(key: str | bytes) -> Comparison:
        return Comparison(1, "create_revision", key)

    @staticmethod
    def mod(key: str | bytes) -> Comparison:
        return Comparison(2, "mod_revision", key)

    @staticmethod
    def value(key: str | bytes) -> Comparison:
        return Comparison(3, "value", key)

    @staticmethod
    def put(key: str | bytes, value: str | bytes, lease: "Lease | int | None" = None) -> Any:
        request = PutRequest(key=as_bytes(key), value=as_bytes(value), lease=lease_id_of(lease))
        return RequestOp(request_put=request)

    @staticmethod
    def get(key: str | bytes) -> Any:
        return RequestOp(request_range=RangeRequest(key=as_bytes(key)))

    @staticmethod
    def delete(key: str | bytes) -> Any:
        return RequestOp(request_delete_range=DeleteRangeRequest(key=as_bytes(key)))


def lease_id_of(lease: "Lease | int | None") -> int:
    """A lease is named by itself or by its id; 0: none."""
    if isinstance(lease, Lease):
        return lease.id
    return lease or 0


def key_range_of(key: str | bytes, range_end: str | bytes | None) -> KeyRange:
    """The keys that a watch names."""
    return KeyRange(as_bytes(key), b"" if range_end is None else as_bytes(range_end))
