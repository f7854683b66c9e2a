"""How the KV of running requests grows: some blocks at a time, and the youngest gives way.

A request starts with blocks for what is known and for `reserve_tokens` of its answer, and gets as
many again when these are full. Where none are left, the youngest is *preempted*: it ends on this
worker, and another attempt computes its KV anew, from the ids that its client has. The oldest
never is, and alone it fits into the pool; where it waits, it starts next: so it always comes to an
end. It may stand still while transfers hold what it needs, and these have deadlines. Nobody is
started unless all who run could grow once more.
"""

from collections.abc import Iterable, Sequence

from neuron_di.core.block_pool import BlockPool
from neuron_di.errors import NeuronDiError, Preempted
from neuron_di.request import Request


class Growth:
    """Owns nothing: blocks are the pool's and the requests'."""

    def __init__(self, pool: BlockPool, *, block_size: int, reserve_tokens: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._reserve_tokens = reserve_tokens
        self._step = -(-reserve_tokens // block_size)  # blocks

    def num_tokens(self, request: Request) -> int:
        """For how many token positions a request has blocks when it starts."""
        return min(request.num_prefilled + self._reserve_tokens, request.num_kv_at_most)

    def num_kept(self, started: Iterable[Request]) -> int:
        """How many blocks stay free for these, whoever else wants them."""
        return sum(min(self._step, self._num_to_come(request)) for request in started)

    def failures(self, running: Sequence[Request]) -> list[tuple[Request, NeuronDiError]]:
        """Who has to give way, so that all others can compute a token. Never the oldest.

        Of one age, those that come later in `running` are younger.
        """
        num_short, num_free = sum(map(self._is_full, running)), self._pool.num_free
        if num_short <= num_free:
            return []
        by_age = sorted(running, key=lambda request: request.age_order)
        last = len(by_age)
        while num_short > num_free and last > 1:
            last -= 1
            num_free += len(by_age[last].block_ids)
            num_short -= self._is_full(by_age[last])
        return [
            (request, Preempted("older requests needed this one's KV blocks"))
            for request in by_age[last:]
        ]

    def grow(self, running: Sequence[Request]) -> list[Request]:
        """Give blocks to those whose own are full. Returns who can compute a token: all, unless
        blocks are held that come free by themselves."""
        full = [request for request in running if self._is_full(request)]
        for place, request in enumerate(full):
            num_free = self._pool.num_free
            num_left = max(num_free - (len(full) - place - 1), 1)  # one for each of the others
            num_blocks = min(self._step, self._num_to_come(request), num_left, num_free)
            request.block_ids += self._pool.allocate(num_blocks)
        return [request for request in running if not (full and self._is_full(request))]

    def is_share(self, request: Request) -> bool:
        """Whether a started request has what it may have, and what it has KV for."""
        num_blocks = len(request.block_ids)
        num_used = max(self.num_tokens(request), request.num_computed)
        return self._num_blocks(num_used) <= num_blocks <= self._num_blocks(request.num_kv_at_most)

    def _is_full(self, request: Request) -> bool:
        """Whether the KV of its next token finds no place."""
        return request.num_computed >= len(request.block_ids) * self._block_size

    def _num_to_come(self, request: Request) -> int:
        return self._num_blocks(request.num_kv_at_most) - len(request.block_ids)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
