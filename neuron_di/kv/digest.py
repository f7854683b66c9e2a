"""A digest per KV block, by which a receiver knows whose bytes it got, and that they are whole.

XXH3, 64 bits, at memory speed: made against damage and mix-ups, not against an attacker, who
would have to be on the signal link. It is seeded by the identity of the hand-over and by the
block's place in its request, so that the right bytes of the wrong request do not match either.
"""

import ctypes
import hashlib
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from neuron_di.errors import LocalProtocolError
from neuron_di.kv.layout import KvLayout
from neuron_di.kv.runs import BlockIds, Memory, ids_below
from neuron_di.types import Incarnation, RequestId, WorkerId
from neuron_di_bindings.block_hash import hash_blocks

_SEED_MASK = (1 << 64) - 1


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
        texts = [str(field).encode() for field in astuple(self)]
        fields = b"".join(b"%d:%b" % (len(text), text) for text in texts)
        return int.from_bytes(hashlib.sha256(fields).digest()[:8], "little")


def block_digests(
    memory: Memory,
    block_ids: BlockIds,
    identity: KvIdentity,
    layout: KvLayout,
    num_tokens: int,
    *,
    first_place: int = 0,
) -> list[int]:
    """One unsigned 64-bit number per block, in order: of the bytes of the tokens it holds.

    The memory's blocks are of `layout`; `num_tokens` tokens lie in these blocks, and the first of
    the blocks is the request's block number `first_place`. Bytes are read in the order in which
    they lie, of replicated heads the first replica only. So a pool and a landing memory that hold
    the same KV have equal digests. LocalProtocolError for a block outside of the memory, and for
    too many or too few blocks.
    """
    block_bytes = layout.block_bytes
    num_blocks = memory.num_bytes // block_bytes
    ids = ids_below(block_ids, num_blocks)
    if ids is None:
        raise LocalProtocolError(f"a block outside of a memory of {num_blocks}")
    _check_count(len(ids), layout, num_tokens)
    seed, num_whole = identity.seed() + first_place, _num_whole(layout, num_tokens)
    found = hash_blocks(memory.address, ids[:num_whole], block_bytes, seed)
    for place, block_id in enumerate(ids[num_whole:].tolist(), num_whole):
        address = memory.address + block_id * block_bytes
        block = memoryview((ctypes.c_uint8 * block_bytes).from_address(address))
        found.append(_used_digest(block, layout, num_tokens, place, seed))
    return found


def digests_of(
    blocks: Iterable[memoryview],
    num_blocks: int,
    identity: KvIdentity,
    layout: KvLayout,
    num_tokens: int,
    *,
    first_place: int = 0,
) -> list[int]:
    """The same, of `num_blocks` blocks' bytes wherever they are. Each is read before the next is
    asked for."""
    _check_count(num_blocks, layout, num_tokens)
    seed, num_whole = identity.seed() + first_place, _num_whole(layout, num_tokens)
    digests = []
    for place, block in enumerate(blocks):
        if place < num_whole:
            digests.append(xxh3_64_intdigest(block, seed=(seed + place) & _SEED_MASK))
        else:
            digests.append(_used_digest(block, layout, num_tokens, place, seed))
    return digests


def _check_count(num_blocks: int, layout: KvLayout, num_tokens: int) -> None:
    if num_blocks != layout.num_blocks_for(num_tokens):
        raise LocalProtocolError(f"{num_blocks} blocks for {num_tokens} tokens")


def _num_whole(layout: KvLayout, num_tokens: int) -> int:
    """Blocks of which each byte is read, in the order in which they lie."""
    return num_tokens // layout.block_size if layout.num_replicas == 1 else 0


def _used_digest(
    block: memoryview, layout: KvLayout, num_tokens: int, place: int, seed: int
) -> int:
    """Of the tokens that it holds, each head once. `seed` is that of the block at place 0."""
    num_used = min(layout.block_size, num_tokens - place * layout.block_size)
    num_rows = layout.num_layers * 2 * layout.num_rank_heads
    used_bytes = layout.rank_bytes // num_rows // layout.block_size * num_used
    ranks = np.frombuffer(block, np.uint8).reshape(layout.num_ranks, num_rows, -1)
    state = xxh3_64(seed=(seed + place) & _SEED_MASK)
    for rank in ranks[:: layout.num_replicas]:
        state.update(np.ascontiguousarray(rank[:, :used_bytes]).data)
    return state.intdigest()
