"""Decode: continue requests whose KV a prefill worker computed.

    WAITING --schedule--> TRANSFERRING --schedule, once its KV is here--> RUNNING --> FINISHED

The rules (N-60 to N-64): running and transferring requests together are at most
`batch_size`; a request runs only after its transfer is done; none waits while a slot and its
blocks are free; the scheduler decides and polls, it moves nothing; blocks that a transfer may
still write to are given to nobody.
"""

from neuron_di.core.block_count import BlockCount
from neuron_di.core.block_pool import BlockPool
from neuron_di.core.completion import CompletionToken
from neuron_di.core.growth import Growth
from neuron_di.core.plan import DecodeBatch
from neuron_di.core.quarantine import Quarantine
from neuron_di.core.require import require
from neuron_di.core.waiting_queue import WaitingQueue
from neuron_di.errors import NeuronDiError
from neuron_di.request import Request, RequestStatus
from neuron_di.types import FinishReason


class DecodeScheduler:
    """Runs all received requests in one batch, one token per step.

    A request is added when its prompt and its first token, or more of them, are known. In each
    step the engine finishes `failures()`, calls `schedule()`, and starts
    `transfers_to_start()` before it computes the batch, so that receiving and decoding overlap.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        batch_size: int,
        waiting_max: int,
        reserve_tokens: int,
    ) -> None:
        self.prefixes = None  # it computes no prompts
        self._pool = pool
        self._batch_size = batch_size
        self._growth = Growth(pool, block_size=block_size, reserve_tokens=reserve_tokens)
        self._waiting = WaitingQueue(
            pool,
            block_size=block_size,
            waiting_max=waiting_max,
            num_tokens=self._growth.num_tokens,
            num_tokens_at_most=lambda request: request.num_kv_at_most,
        )
        # None until the transfer is started. In order of admission.
        self._transferring: dict[Request, CompletionToken | None] = {}
        self._running: list[Request] = []
        # Blocks of requests that ended during their transfer. They take no slot.
        self._quarantine = Quarantine(pool)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_transferring(self) -> int:
        return len(self._transferring)

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError: the queue is full. TooLarge: it can never fit."""
        num_given = len(request.generated)
        require(num_given >= 1, f"{request!r} has no token to go on from")
        require(request.max_tokens > num_given, f"{request!r} is complete already")
        require(
            request.num_prefilled == request.num_prompt + num_given - 1,
            f"{request!r}: a transfer brings the KV of all tokens but the newest",
        )
        self._waiting.add(request)

    def schedule(self) -> DecodeBatch | None:
        """All requests whose KV is here, those that just arrived included; None: nobody's is."""
        self._quarantine.poll()
        self._join_received()
        ready = self._growth.grow(self._running)
        self._admit_waiting()
        return DecodeBatch(tuple(ready)) if ready else None

    def transfers_to_start(self) -> list[Request]:
        """The admitted requests whose blocks wait for the prefill worker's KV."""
        return [request for request, token in self._transferring.items() if token is None]

    def transfer_started(self, request: Request, token: CompletionToken) -> None:
        """Poll this token from now on. Its transfer writes to the request's blocks."""
        require(request in self._transferring, f"{request!r} was not admitted")
        require(self._transferring[request] is None, f"{request!r} is being received already")
        self._transferring[request] = token

    def failures(self) -> list[tuple[Request, NeuronDiError]]:
        """The requests whose KV will not come, and those that are preempted."""
        failed: list[tuple[Request, NeuronDiError]] = []
        for request, token in self._transferring.items():
            if token is not None and token.is_done() and (error := token.error()) is not None:
                failed.append((request, error))
        return failed + self._growth.failures(self._running)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state. Its slot is free at once.

        Its blocks are free too, unless a transfer may still write to them: then they are
        quarantined until its token is done.
        """
        token = None
        if request in self._transferring:
            token = self._transferring.pop(request)
        elif request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._quarantine.give_back(request.block_ids, held_by=token)
        request.block_ids = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def follow_exchanges(self) -> None:
        """Of requests that are received: their KV lies in blocks that came for their own."""
        self._pool.follow_exchanges(request.block_ids for request in self._transferring)

    def is_idle(self) -> bool:
        """True when no request is left and no block is quarantined; then every block is free."""
        is_empty = not (self._waiting or self._transferring or self._running)
        return is_empty and self._quarantine.is_empty()

    def count_blocks(self) -> BlockCount:
        return BlockCount(
            total=self._pool.num_blocks,
            free=self._pool.num_free,
            running=sum(len(request.block_ids) for request in self._running),
            receiving=sum(len(request.block_ids) for request in self._transferring),
            quarantined=self._quarantine.num_blocks,
        )

    def check_integrity(self) -> None:
        """Raise LocalProtocolError unless states, limits and blocks add up."""
        self.count_blocks().check()
        for request in self._transferring:
            require(request.status is RequestStatus.TRANSFERRING, f"{request!r} is received")
        for request in self._running:
            require(request.status is RequestStatus.RUNNING, f"{request!r} runs")
            is_whole = request.num_prefilled <= request.num_computed
            require(is_whole, f"{request!r} runs with KV of {request.num_computed} positions")
        started = [*self._transferring, *self._running]
        require(len(started) <= self._batch_size, f"{len(started)} requests were started")
        self._waiting.check_integrity()
        for request in started:
            require(self._growth.is_share(request), f"{request!r} does not hold its share")
        owned = [request.block_ids for request in started]
        self._pool.check_integrity([*owned, *self._quarantine.owned()])

    def _join_received(self) -> None:
        received = [
            request
            for request, token in self._transferring.items()
            if token is not None and token.is_done() and token.error() is None
        ]
        # After that look at the tokens: none of these runs on blocks that it has no more.
        self.follow_exchanges()
        for request in received:
            del self._transferring[request]
            request.num_computed = request.num_prefilled
            request.status = RequestStatus.RUNNING
            self._running.append(request)

    def _admit_waiting(self) -> None:
        while self._waiting and len(self._transferring) + len(self._running) < self._batch_size:
            started = (*self._transferring, *self._running)
            request = self._waiting.pop_startable(self._growth.num_kept(started))
            if request is None:
                return
            request.status = RequestStatus.TRANSFERRING
            self._transferring[request] = None
