"""What a registry must be able to do: keys that live as long as a lease, and watchers of them.

The shape is etcd's. A vanished key is suspicion, not death, and a present key is not life: who
routes by a registry probes as well.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

LeaseId = NewType("LeaseId", int)


class Registry(Protocol):
    """What a worker needs: keys under a lease, which vanish when nobody keeps it alive.

    Every method raises PeerTimeout or PeerGone where the registry cannot be reached, and
    PeerRefused for an unknown lease or more than a limit allows.
    """

    async def grant(self, ttl_s: float) -> LeaseId:
        """A lease that ends after `ttl_s` seconds unless it is kept alive."""
        ...

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        """Set a key. It belongs to this lease from now on, whichever it belonged to before."""
        ...

    async def keep_alive(self, lease: LeaseId) -> float:
        """Start the lease's time anew. Returns the seconds it has; 0 when it is unknown."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End a lease and delete its keys. Nothing happens when it is unknown."""
        ...


@dataclass(frozen=True, slots=True)
class KeyChanged:
    """A key has a value, new or as before."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """A key was deleted, or its lease ended."""

    key: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All there is at one moment. Replaces everything heard before."""

    values: Mapping[str, bytes]


RegistryEvent = KeyChanged | KeyDeleted | Snapshot


class WatchableRegistry(Protocol):
    """What a directory needs."""

    num_dropped: int  # keys so far that it did not tell of, as nobody's or too many

    def watch(self, prefix: str) -> AsyncGenerator[RegistryEvent, None]:
        """What happens to the keys with this prefix: a Snapshot, then each change in order.

        Never ends and raises nothing: it resumes by itself where it was interrupted, and where
        that is impossible, because too much has happened since, it says a Snapshot again.
        """
        ...

    def trouble(self) -> str:
        """Why nothing is heard from it now, in words; empty while all is well. At once."""
        ...
