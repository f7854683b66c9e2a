"""A prefix cache that runs prompts, for its tests."""

from core_kit import make_request

from neuron_di.core import BlockPool, CombinedScheduler, PrefillChunk, PrefillScheduler, PrefixCache
from neuron_di.request import Request

BLOCK_SIZE = 4
CHUNK = 8  # and a piece, of two blocks
PIECES = {letter: [index] * CHUNK for index, letter in enumerate("abcdefgh")}


def ids(pieces: str, num_more: int = 1) -> list[int]:
    """The ids of a prompt of these pieces, and so many behind them."""
    return [token for letter in pieces for token in PIECES[letter]] + [99] * num_more


class Worker:
    """A cache and its pool. Runs one prompt after the other, and copies nothing."""

    def __init__(
        self, num_blocks: int = 32, block_size: int = BLOCK_SIZE, chunk_tokens: int = CHUNK
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size, self.chunk_tokens = block_size, chunk_tokens
        self.cache = PrefixCache(self.pool, block_size=block_size, chunk_tokens=chunk_tokens)
        self.copies: list[tuple[list[int], list[int]]] = []  # what `keep` asked for
        self.spans: list[tuple[int, int, bool]] = []  # of the last prompt: start, end, is reused
        self.running: list[Request] = []

    def start(self, request: Request) -> Request:
        """As the queue does."""
        self.cache.touch(request)
        request.block_ids = self.pool.allocate(-(-request.num_prefilled // self.block_size))
        self.running.append(request)
        return request

    def step(self, request: Request) -> PrefillChunk:
        chunk = self.cache.next_of(request) or PrefillChunk.next_of(request, self.chunk_tokens)
        self.copies.append(self.cache.keep(chunk))
        chunk.mark_computed()
        return chunk

    def end(self, request: Request) -> None:
        self.pool.free(request.block_ids)
        self.running.remove(request)
        self.check()

    def run(self, request: Request) -> int:
        """Compute a prompt, and end it. How many of its positions were found."""
        self.copies, self.spans = [], []
        self.start(request)
        while request.num_computed < request.num_prefilled:
            chunk = self.step(request)
            self.spans.append((chunk.start, chunk.end, bool(chunk.reused)))
            self.check()
        self.end(request)
        return request.num_cached

    def ask(self, prompt_ids: list[int], **fields: object) -> int:
        return self.run(make_request("any", prompt_ids=prompt_ids, **fields))

    def check(self) -> None:
        self.cache.check_integrity()
        owned = [request.block_ids for request in self.running]
        self.pool.check_integrity(owned, self.cache.owned())

    def found(self, pieces: str) -> str:
        """Which of the pieces of this prompt are kept. Changes nothing."""
        keys = self.cache._keys(make_request("any", prompt_ids=ids(pieces)))
        return "".join(
            letter for letter, key in zip(pieces, keys, strict=True) if key in self.cache._pieces
        )


def make_prefill(worker: Worker) -> PrefillScheduler:
    return PrefillScheduler(
        worker.pool,
        block_size=4,
        batch_size=2,
        chunk_tokens=8,
        waiting_max=4,
        prefixes=worker.cache,
    )


def make_combined(worker: Worker) -> CombinedScheduler:
    limits = {"batch_size": 2, "chunk_tokens": 8, "waiting_max": 4, "reserve_tokens": 8}
    return CombinedScheduler(worker.pool, block_size=4, **limits, prefixes=worker.cache)
