"""Prefill: one prompt at a time, its KV kept until the decode worker has it.

    WAITING --schedule--> RUNNING --park--> TRANSFERRING --release--> FINISHED

The rules (N-56 to N-59): one request runs; running and transferring ones together are at
most `batch_size`; so the next prompt starts as soon as the last one is parked, while its KV is
still being moved, unless decode is so far behind that `batch_size` are parked.
"""

from collections.abc import Iterable

from neuron_di.core.block_count import BlockCount
from neuron_di.core.block_pool import BlockPool
from neuron_di.core.completion import CompletionToken
from neuron_di.core.plan import PrefillChunk
from neuron_di.core.prefix_cache import PrefixCache
from neuron_di.core.quarantine import Quarantine
from neuron_di.core.require import require
from neuron_di.core.waiting_queue import WaitingQueue
from neuron_di.errors import NeuronDiError
from neuron_di.request import Request, RequestStatus
from neuron_di.types import BlockId, FinishReason


class PrefillScheduler:
    """Runs prompts in chunks of at most `chunk_tokens`. Reserves blocks for what it computes only:
    the prompt, and the tokens that are given with it. What `prefixes` has is not computed again.

    After the last chunk and before the next `schedule()` the engine parks or finishes the request.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        batch_size: int,
        chunk_tokens: int,
        waiting_max: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.prefixes = prefixes
        self._pool = pool
        self._block_size = block_size
        self._batch_size = batch_size
        self._chunk_tokens = chunk_tokens
        self._waiting = WaitingQueue(
            pool,
            block_size=block_size,
            waiting_max=waiting_max,
            num_tokens=lambda request: request.num_prefilled,
            num_tokens_at_most=lambda request: request.num_prefilled,
            prefixes=prefixes,
        )
        self._running: Request | None = None
        self._transferring: list[Request] = []
        # Blocks of requests that ended while a peer may have been reading. They take no slot.
        self._quarantine = Quarantine(pool)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    @property
    def num_transferring(self) -> int:
        return len(self._transferring)

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError: the queue is full. TooLarge: it can never fit."""
        require(
            request.num_prefilled == request.num_prompt + len(request.generated),
            f"{request!r}: prefill computes every position that is known",
        )
        self._waiting.add(request)

    def failures(self) -> list[tuple[Request, NeuronDiError]]:
        """None: what started has all its blocks."""
        return []

    def schedule(self) -> PrefillChunk | None:
        """The next chunk of the running prompt; starts the next prompt when none runs."""
        self._quarantine.poll()
        if self._running is None and len(self._transferring) < self._batch_size:
            self._running = self._waiting.pop_startable()
            if self._running is not None:
                self._running.status = RequestStatus.RUNNING
        if self._running is None:
            return None
        found = self.prefixes and self.prefixes.next_of(self._running)
        return found or PrefillChunk.next_of(self._running, self._chunk_tokens)

    def park(self, request: Request) -> None:
        """Keep the finished prompt's KV until `release`; the next prompt may run."""
        require(request is self._running, f"{request!r} is not running")
        require(request.num_computed == request.num_prefilled, f"{request!r} lacks KV")
        request.status = RequestStatus.TRANSFERRING
        self._running = None
        self._transferring.append(request)

    def release(self, request: Request) -> None:
        """The decode worker has the KV: the request ends here, without a finish reason."""
        require(request in self._transferring, f"{request!r} is not parked")
        self.finish(request, None)

    def finish(
        self, request: Request, reason: FinishReason | None, held_by: CompletionToken | None = None
    ) -> None:
        """End a request in any state: its token ended it, it failed or was cancelled.

        Its slot is free at once. Of a parked one a decode worker may be reading the blocks right
        now: they are quarantined until `held_by` is done. Without it they are free at once; a
        reader still notices their reuse by the blocks' generations.
        """
        if request is self._running:
            self._running = None
        elif request in self._transferring:
            self._transferring.remove(request)
        else:
            self._waiting.remove(request)
        self._quarantine.give_back(request.block_ids, held_by)
        request.block_ids = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def follow_exchanges(self) -> None:
        """Of parked requests: a decode worker took their blocks and gave others."""
        self._pool.follow_exchanges(request.block_ids for request in self._transferring)

    def is_idle(self) -> bool:
        """True when no request is left and no block is quarantined; then every block is free."""
        is_empty = not (self._waiting or self._running or self._transferring)
        return is_empty and self._quarantine.is_empty()

    def count_blocks(self) -> BlockCount:
        return BlockCount(
            total=self._pool.num_blocks,
            free=self._pool.num_unused,
            running=len(self._running.block_ids) if self._running else 0,
            parked=sum(len(request.block_ids) for request in self._transferring),
            cached=self._pool.num_kept,
            quarantined=self._quarantine.num_blocks,
        )

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless states, limits and blocks add up."""
        self.count_blocks().check()
        running = [] if self._running is None else [self._running]
        for request in running:
            require(request.status is RequestStatus.RUNNING, f"{request!r} runs")
        for request in self._transferring:
            require(request.status is RequestStatus.TRANSFERRING, f"{request!r} is parked")
        started = running + self._transferring
        require(len(started) <= self._batch_size, f"{len(started)} requests were started")
        self._waiting.check_integrity()
        for request in started:
            is_whole = len(request.block_ids) == -(-request.num_prefilled // self._block_size)
            require(is_whole, f"{request!r} does not hold what it reserved")
        owned = [request.block_ids for request in started]
        kept: Iterable[list[BlockId]] = ()
        if self.prefixes is not None:
            self.prefixes.check_integrity()
            kept = self.prefixes.owned()
        self._pool.check_integrity([*owned, *self._quarantine.owned()], kept)
