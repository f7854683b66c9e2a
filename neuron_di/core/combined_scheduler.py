"""Both phases in one worker: continuous batching, the baseline of every comparison (N-16).

    WAITING --schedule--> RUNNING (prompt, then tokens) --> FINISHED

A waiting prompt goes before decode whenever the batch has a free slot. It runs alone, all its
chunks back to back, so every running stream stalls for the whole prefill: the stall that
separate workers do not have.
"""

from collections.abc import Iterable

from neuron_di.core.block_count import BlockCount
from neuron_di.core.block_pool import BlockPool
from neuron_di.core.growth import Growth
from neuron_di.core.plan import DecodeBatch, PrefillChunk, StepPlan
from neuron_di.core.prefix_cache import PrefixCache
from neuron_di.core.require import require
from neuron_di.core.waiting_queue import WaitingQueue
from neuron_di.errors import NeuronDiError
from neuron_di.request import Request, RequestStatus
from neuron_di.types import BlockId, FinishReason


class CombinedScheduler:
    """Runs at most `batch_size` requests: at most one prefills, the last that was started."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        batch_size: int,
        chunk_tokens: int,
        waiting_max: int,
        reserve_tokens: int,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self.prefixes = prefixes
        self._pool = pool
        self._batch_size = batch_size
        self._chunk_tokens = chunk_tokens
        self._growth = Growth(pool, block_size=block_size, reserve_tokens=reserve_tokens)
        self._waiting = WaitingQueue(
            pool,
            block_size=block_size,
            waiting_max=waiting_max,
            num_tokens=self._growth.num_tokens,
            num_tokens_at_most=lambda request: request.num_kv_at_most,
            prefixes=prefixes,
        )
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_transferring(self) -> int:
        return 0

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError: the queue is full. TooLarge: it can never fit."""
        require(
            request.num_prefilled == request.num_prompt + len(request.generated),
            f"{request!r}: prefill computes every position that is known",
        )
        self._waiting.add(request)

    def failures(self) -> list[tuple[Request, NeuronDiError]]:
        if self._is_prefilling():  # so nobody is given a token now
            return []
        return self._growth.failures(self._running)

    def schedule(self) -> StepPlan | None:
        """The next chunk of a prompt if one runs or may start, else a token for everyone."""
        has_place = not self._is_prefilling() and len(self._running) < self._batch_size
        if has_place and self._waiting:
            request = self._waiting.pop_startable(self._growth.num_kept(self._running))
            if request is not None:
                request.status = RequestStatus.RUNNING
                self._running.append(request)
        if self._is_prefilling():
            found = self.prefixes and self.prefixes.next_of(self._running[-1])
            return found or PrefillChunk.next_of(self._running[-1], self._chunk_tokens)
        ready = self._growth.grow(self._running)
        return DecodeBatch(tuple(ready)) if ready else None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state. Its slot and blocks are free at once."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def follow_exchanges(self) -> None:
        self._pool.follow_exchanges(request.block_ids for request in self._running)

    def is_idle(self) -> bool:
        """True when no request is left; then every block is free."""
        return not (self._waiting or self._running)

    def count_blocks(self) -> BlockCount:
        return BlockCount(
            total=self._pool.num_blocks,
            free=self._pool.num_unused,
            running=sum(len(request.block_ids) for request in self._running),
            cached=self._pool.num_kept,
        )

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless states, limits and blocks add up."""
        self.count_blocks().check()
        require(len(self._running) <= self._batch_size, f"{len(self._running)} requests run")
        for request in self._running:
            require(request.status is RequestStatus.RUNNING, f"{request!r} runs")
            require(self._growth.is_share(request), f"{request!r} does not hold its share")
        for request in self._running[:-1]:
            require(request.num_computed >= request.num_prefilled, f"{request!r} was overtaken")
        self._waiting.check_integrity()
        kept: Iterable[list[BlockId]] = ()
        if self.prefixes is not None:
            self.prefixes.check_integrity()
            kept = self.prefixes.owned()
        self._pool.check_integrity((request.block_ids for request in self._running), kept)

    def _is_prefilling(self) -> bool:
        if not self._running:
            return False
        return self._running[-1].num_computed < self._running[-1].num_prefilled
