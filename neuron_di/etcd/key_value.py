"""etcd's keys, values and changes as plain values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_EVERY = b"\0"  # as etcd writes "no end"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as it is at one moment. `lease` is 0 where it has none."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Change:
    """A key was put or deleted. After a deletion `now` has the key and no value."""

    now: KeyValue
    is_deletion: bool
    before: KeyValue | None  # where it was asked for, and had not been compacted


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys from `first` up to `end`, which is not among them; no end: `first` alone."""

    first: bytes
    end: bytes = b""

    @classmethod
    def prefix(cls, prefix: bytes) -> "KeyRange":
        """Every key that begins so; of an empty prefix, every key there is."""
        bare = prefix.rstrip(b"\xff")
        if not bare:
            return cls(prefix or _EVERY, _EVERY)
        return cls(prefix, bare[:-1] + bytes([bare[-1] + 1]))


@dataclass(frozen=True, slots=True)
class Page:
    """Some keys of a range, in order. `num_left`: they, and those of the range behind them."""

    items: Sequence[KeyValue]
    revision: int
    cluster_id: int
    num_left: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The keys of a range at one revision of one cluster, in order.

    `num_left_out` counts those that were more than are read at once.
    """

    items: Sequence[KeyValue]
    revision: int
    cluster_id: int
    num_left_out: int


def key_value_of(message: Any) -> KeyValue:
    """A message's key and value."""
    return KeyValue(
        key=message.key,
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        version=message.version,
        lease=message.lease,
    )


def change_of(message: Any) -> Change:
    """A message's change."""
    before = key_value_of(message.prev_kv) if message.HasField("prev_kv") else None
    return Change(key_value_of(message.kv), is_deletion=message.type == 1, before=before)
