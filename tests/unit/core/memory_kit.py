"""A model of KV memory for the random schedules: whose KV stands where, and what it was made of."""

from math import lcm

from neuron_di.core import BlockPool, DecodeBatch, PrefillChunk, PrefixCache
from neuron_di.request import Request
from neuron_di.types import BlockId

# What the KV of one position is made of: the scope and all ids up to it, and how the prompt was cut
# there, for that decides its last bits; None behind the prompt, where each position is a step.
_Origin = tuple[str, tuple[int, ...], tuple[int, int] | None]
_Cell = tuple[Request | None, _Origin]  # nobody's where it is kept


class KvMemory:
    """What stands in the blocks. Computes and copies as an engine does.

    It looks at what stands in kept blocks, and not at keys, so that it is a second opinion on what
    is to be found, and what is to be kept.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, chunk_tokens: int, prefixes: PrefixCache | None
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._piece_tokens = lcm(block_size, chunk_tokens)
        self._prefixes = prefixes
        self._cells: dict[tuple[BlockId, int], _Cell] = {}
        self._kept: dict[tuple[BlockId, ...], list[_Cell]] = {}  # as it was copied there
        self._origins: dict[Request, list[_Origin]] = {}
        self._num_found: dict[Request, int] = {}
        self.num_reused = 0  # pieces

    def write(
        self,
        request: Request,
        block_ids: list[BlockId],
        start: int,
        end: int,
        cut: tuple[int, int] | None = None,
    ) -> None:
        """KV of these positions comes, of a prompt that was cut as it should be if not as said."""
        for position in range(start, end):
            origin = self._origin(request, position)
            if cut is not None:
                origin = (*origin[:2], cut)
            self._cells[self._place(block_ids, position)] = (request, origin)

    def check(self, request: Request, end: int, block_ids: list[BlockId] | None = None) -> None:
        """Fail unless positions [0, end) of the request are in its blocks, intact."""
        blocks = request.block_ids if block_ids is None else block_ids
        for position in range(end):
            expected = request, self._origin(request, position)
            assert self._cells.get(self._place(blocks, position)) == expected

    def compute(self, plan: PrefillChunk | DecodeBatch, copy_fails: bool = False) -> bool:
        """Do what an engine does: read the KV that is there, write the new positions.

        False: it was to be kept, and the copy failed.
        """
        if isinstance(plan, PrefillChunk):
            if not self._prefill(plan, copy_fails):
                return False
        else:
            for request in plan.requests:
                fed = request.num_prompt + len(request.generated) - 1
                assert request.num_computed == fed
                self.check(request, fed)
                self.write(request, request.block_ids, fed, fed + 1)
        plan.mark_computed()
        for request in plan.requests:
            assert request.num_cached == self._num_found.get(request, 0)
        return True

    def check_kept(self) -> None:
        """Fail unless what was copied to kept blocks is there, and no two hold the same."""
        if self._prefixes is None:
            return
        pieces = [self._piece(block_ids) for block_ids in self._prefixes.owned()]
        assert pieces == [self._kept[tuple(block_ids)] for block_ids in self._prefixes.owned()]
        assert all(pieces.count(piece) == 1 for piece in pieces)

    def _prefill(self, chunk: PrefillChunk, copy_fails: bool) -> bool:
        request, size = chunk.request, self._block_size
        assert chunk.is_replay or chunk.end <= request.num_prompt
        self.check(request, chunk.start)
        assert list(chunk.reused) == self._findable(request)
        if not chunk.reused:
            cut = None if chunk.is_replay else (chunk.start, chunk.end)
            self.write(request, request.block_ids, chunk.start, chunk.end, cut)
            return self._prefixes is None or self._keep(self._prefixes, chunk, copy_fails)
        assert chunk.end - chunk.start == self._piece_tokens
        own = request.block_ids[chunk.start // size : chunk.end // size]
        for place, (_, origin) in zip(self._places(own), self._piece(chunk.reused), strict=True):
            self._cells[place] = request, origin
        self._num_found[request] = self._num_found.get(request, 0) + self._piece_tokens
        self.num_reused += 1
        return True

    def _keep(self, prefixes: PrefixCache, chunk: PrefillChunk, copy_fails: bool) -> bool:
        request, size, first = chunk.request, self._block_size, chunk.end - self._piece_tokens
        sources, targets = prefixes.keep(chunk)
        assert bool(sources) == bool(targets)
        if targets:
            assert sources == request.block_ids[first // size : chunk.end // size]
            if copy_fails:
                prefixes.forget_piece(chunk)
                assert targets not in list(prefixes.owned())
                return False
            kept = [(None, origin) for _, origin in self._piece(sources)]
            self._kept[tuple(targets)] = kept
            self._cells.update(zip(self._places(targets), kept, strict=True))
        if chunk.end % self._piece_tokens or chunk.is_replay:
            assert not targets
        elif self._wanted(request, first) not in map(self._piece, prefixes.owned()):
            self._check_no_room(prefixes, request)
        return True

    def _check_no_room(self, prefixes: PrefixCache, request: Request) -> None:
        """Only its own beginning stays, where nothing else can give way."""
        ends = range(self._piece_tokens, request.num_prompt + 1, self._piece_tokens)
        own = [self._wanted(request, end - self._piece_tokens) for end in ends]
        assert self._pool.num_unused < self._piece_tokens // self._block_size
        assert all(self._piece(block_ids) in own for block_ids in prefixes.owned())

    def _findable(self, request: Request) -> list[BlockId]:
        """The kept blocks with what the request needs next; its last position it computes."""
        start, end = request.num_computed, request.num_computed + self._piece_tokens
        is_piece = not start % self._piece_tokens and end <= request.num_prompt
        if self._prefixes is None or not is_piece or end >= request.num_prefilled:
            return []
        wanted = self._wanted(request, start)
        return next((ids for ids in self._prefixes.owned() if self._piece(ids) == wanted), [])

    def _wanted(self, request: Request, start: int) -> list[_Cell]:
        end = start + self._piece_tokens
        return [(None, self._origin(request, position)) for position in range(start, end)]

    def _origin(self, request: Request, position: int) -> _Origin:
        """As it should be."""
        origins = self._origins.setdefault(request, [])
        while position >= len(origins):
            end = len(origins) + 1
            ids = tuple(request.token_ids(0, end))
            assert len(ids) == end, "KV of an id that nobody knows"
            origins.append((request.cache_scope, ids, self._cut(request, end - 1)))
        return origins[position]

    def _cut(self, request: Request, position: int) -> tuple[int, int] | None:
        start = position - position % self._chunk_tokens
        end = min(start + self._chunk_tokens, request.num_prompt)
        return (start, end) if position < request.num_prompt else None

    def _place(self, block_ids: list[BlockId], position: int) -> tuple[BlockId, int]:
        index, offset = divmod(position, self._block_size)
        return block_ids[index], offset

    def _places(self, block_ids: list[BlockId]) -> list[tuple[BlockId, int]]:
        return [(block, offset) for block in block_ids for offset in range(self._block_size)]

    def _piece(self, block_ids: tuple[BlockId, ...] | list[BlockId]) -> list[_Cell]:
        return [self._cells[place] for place in self._places(list(block_ids))]


def is_whole(chunk: PrefillChunk, chunk_tokens: int) -> bool:
    """True unless the chunk stops before it must: at its limit, the prompt's end or the end. Of one
    that is reused KvMemory knows what it has to be."""
    if chunk.reused:
        return True
    request = chunk.request
    is_border = chunk.end in (request.num_prompt, request.num_prefilled)
    size = chunk.end - chunk.start
    return 0 < size <= chunk_tokens and (is_border or size == chunk_tokens)
