"""A digest per KV block, by which a receiver knows whose bytes it got, and that they are whole.

XXH3, 64 bits, at memory speed: made against damage and mix-ups, not against an attacker, who
would have to be on the signal link. It is seeded by the identity of the hand-over and by the
block's place in its request, so that the right bytes of the wrong request do not match either.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from xxhash import xxh3_64_intdigest

from neuron_di.types import BlockId, Incarnation, RequestId, WorkerId

_SEED_MASK = (1 << 64) - 1


class BlockMemory(Protocol):
    """Where blocks lie. A KvPool is one."""

    def view(self, block_id: BlockId) -> memoryview:
        """The bytes of one block, as the host sees them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """Whose KV it is: computed by which process, for which attempt, in which layout."""

    worker_id: WorkerId
    incarnation: Incarnation
    request_id: RequestId
    attempt: int
    layout_digest: str

    def seed(self) -> int:
        """64 bits that differ for any other identity."""
        # Each field with its length: no two identities write the same bytes.
        fields = b"".join(b"%d:%b" % (len(text), text) for text in map(_encoded, astuple(self)))
        return int.from_bytes(hashlib.sha256(fields).digest()[:8], "little")


def block_digests(
    memory: BlockMemory, block_ids: Sequence[BlockId], identity: KvIdentity
) -> list[int]:
    """One unsigned 64-bit number per block, in order. Reads every byte of them."""
    seed = identity.seed()
    return [
        xxh3_64_intdigest(memory.view(block_id), seed=(seed + place) & _SEED_MASK)
        for place, block_id in enumerate(block_ids)
    ]


def _encoded(field: object) -> bytes:
    return str(field).encode()
