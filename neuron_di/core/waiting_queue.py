"""The requests that wait for a start: bounded, the oldest first, holding nothing.

A later attempt is as old as its request. Its client has waited before, and has a part of the answer
as a rule: behind all others it would wait twice.
"""

from bisect import insort
from collections.abc import Callable

from neuron_di.core.block_pool import BlockPool
from neuron_di.core.prefix_cache import PrefixCache
from neuron_di.core.require import require
from neuron_di.errors import CapacityError, TooLarge
from neuron_di.request import Request, RequestStatus


class WaitingQueue:
    """Lets its first request start once the pool holds the blocks that it starts with.

    `num_tokens` says for how many token positions that is, `num_tokens_at_most` for how many it
    can ever have blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        waiting_max: int,
        num_tokens: Callable[[Request], int],
        num_tokens_at_most: Callable[[Request], int],
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._waiting_max = waiting_max
        self._num_tokens = num_tokens
        self._num_tokens_at_most = num_tokens_at_most
        self._prefixes = prefixes
        self._requests: list[Request] = []  # oldest first; those of one age as they came

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError: the queue is full. TooLarge: it could never start."""
        require(request.status is RequestStatus.WAITING, f"{request!r} was added before")
        require(request not in self._requests, f"{request!r} was added before")
        require(request.num_prompt > 0, f"{request!r} has no prompt")
        num_blocks = self._num_blocks(self._num_tokens_at_most(request))
        if num_blocks > self._pool.num_blocks:
            raise TooLarge(
                f"the request needs {num_blocks} KV blocks of {self._block_size} tokens,"
                f" this worker has {self._pool.num_blocks}"
            )
        if len(self._requests) >= self._waiting_max:
            raise CapacityError(f"{len(self._requests)} requests are waiting already")
        insort(self._requests, request, key=lambda each: each.age_order)

    def pop_startable(self, num_kept: int = 0) -> Request | None:
        """Remove the first request and give it its blocks, so that `num_kept` others stay free;
        None when it must wait on."""
        if not self._requests:
            return None
        num_blocks = self._num_blocks(self._num_tokens(self._requests[0]))
        if num_blocks + num_kept > self._pool.num_free:
            return None
        request = self._requests.pop(0)
        if self._prefixes is not None:
            self._prefixes.touch(request)
        request.block_ids = self._pool.allocate(num_blocks)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out that gave up."""
        require(request in self._requests, f"{request!r} is not waiting here")
        self._requests.remove(request)

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless none of them holds blocks."""
        for request in self._requests:
            require(request.status is RequestStatus.WAITING, f"{request!r} is in the queue")
            require(not request.block_ids, f"{request!r} holds blocks")

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
