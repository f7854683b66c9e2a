"""KV of the beginnings of prompts, kept for later prompts that begin alike.

    prompt    | piece | piece | piece | rest     a piece is as long as a chunk of a prefill
    key          k0  ->  k1  ->  k2              of all ids up to its end, and of the scope

What is kept are copies, in blocks of their own: a request's blocks are its alone, so that they can
change owner when it is handed over. Pieces end where chunks end, for only where a prompt is cut
alike is its KV bit for bit the same. So an answer does not depend on what was found.

Kept blocks count as free. Whoever needs them gets them; the pieces that were not used for longest
go first. Keys are SHA-256: no other ids can be meant by one, nor another scope, such as a tenant.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from math import lcm

from neuron_di.core.block_pool import BlockPool
from neuron_di.core.plan import PrefillChunk
from neuron_di.core.require import require
from neuron_di.request import Request
from neuron_di.types import BlockId


class PrefixCache:
    """Bookkeeping of one pool's kept blocks. Whoever computes copies KV: it is told which."""

    def __init__(self, pool: BlockPool, *, block_size: int, chunk_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._piece_tokens = lcm(block_size, chunk_tokens)
        self._num_blocks = self._piece_tokens // block_size  # of a piece
        self._pieces: OrderedDict[bytes, list[BlockId]] = OrderedDict()  # the longest unused first
        pool.forget = self._forget

    def touch(self, request: Request) -> None:
        """It is about to start: what it could use is the last that others are given."""
        for key in self._keys(request):
            if key in self._pieces:
                self._pieces.move_to_end(key)

    def next_of(self, request: Request) -> PrefillChunk | None:
        """The positions that come after those computed, if their KV is kept; else None."""
        index, rest = divmod(request.num_computed, self._piece_tokens)
        end = request.num_computed + self._piece_tokens
        keys = self._keys(request)
        # The last position is computed in any case: the next token comes from its logits.
        if rest or index >= len(keys) or end >= request.num_prefilled or request.needs_all_logits:
            return None
        found = self._pieces.get(keys[index])
        if found is None:
            return None
        self._pieces.move_to_end(keys[index])
        return PrefillChunk(request, request.num_computed, end, tuple(found))

    def keep(self, chunk: PrefillChunk) -> tuple[list[BlockId], list[BlockId]]:
        """After a chunk was computed: from which blocks to which its KV is to be copied at once.

        Both are empty where no piece ends with it, or it is kept, or has no room: pieces of the
        request itself stay. Should the copy fail, `forget_piece` must be called.
        """
        request, index = chunk.request, chunk.end // self._piece_tokens - 1
        if chunk.is_replay or chunk.reused or chunk.end % self._piece_tokens:
            return [], []
        keys = self._keys(request)
        if keys[index] in self._pieces or not self._make_room(keys):
            return [], []
        block_ids = self._pool.allocate(self._num_blocks)
        self._pool.keep(block_ids)
        self._pieces[keys[index]] = block_ids
        first = index * self._num_blocks
        return request.block_ids[first : first + self._num_blocks], list(block_ids)

    def forget_piece(self, chunk: PrefillChunk) -> None:
        """What `keep` named for this chunk does not hold its KV."""
        key = self._keys(chunk.request)[chunk.end // self._piece_tokens - 1]
        self._pool.let_go(self._pieces.pop(key))

    def forget_prompt(self, request: Request) -> None:
        """Its answer failed: what was kept of its prompt, or found, may be what it failed by."""
        for key in self._keys(request):
            if (block_ids := self._pieces.pop(key, None)) is not None:
                self._pool.let_go(block_ids)

    def owned(self) -> Iterable[list[BlockId]]:
        return self._pieces.values()

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless each piece has its blocks."""
        for block_ids in self._pieces.values():
            require(len(block_ids) == self._num_blocks, "a piece lacks blocks")

    def _keys(self, request: Request) -> list[bytes]:
        """One per piece of its prompt, made once."""
        if request.piece_keys is None:
            request.piece_keys, key = [], sha256(request.cache_scope.encode()).digest()
            for end in range(self._piece_tokens, request.num_prompt + 1, self._piece_tokens):
                ids = array("q", request.prompt_ids[end - self._piece_tokens : end])
                key = sha256(key + ids.tobytes()).digest()
                request.piece_keys.append(key)
        return request.piece_keys

    def _make_room(self, own: list[bytes]) -> bool:
        """Whether a piece finds unused blocks: the longest unused one gives way, unless it is of
        this request. A prompt longer than the room keeps its beginning."""
        while self._pool.num_unused < self._num_blocks:
            oldest = next(iter(self._pieces), None)
            if oldest is None or oldest in own:
                return False
            self._pool.let_go(self._pieces.pop(oldest))
        return True

    def _forget(self, num_blocks: int) -> None:
        """Somebody needs so many of the kept blocks."""
        wanted = self._pool.num_unused + num_blocks
        while self._pool.num_unused < wanted:
            _, block_ids = self._pieces.popitem(last=False)
            self._pool.let_go(block_ids)
