"""A prefill leg: prompt in, token 0 out, KV parked until the decode worker has it.

Next: neuron_di/core/prefill_scheduler.py
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

from neuron_di.clock import now_s
from neuron_di.engine import Broken, Emitted, Ended, Engine, Key, PrefillParked
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvIdentity, KvPool
from neuron_di.obs.sync_point import reach
from neuron_di.transfer import LocalWorker, NeuronConnector, TransferToken
from neuron_di.types import BlockId
from neuron_di.wire import Done, LegEvent, Parked, PrefillLeg, Ready
from neuron_di.worker.leg_report import LegReport
from neuron_di.worker.live_legs import HandedOver, LegQueue, LiveLegs
from neuron_di.worker.prompts import PromptReader

DIGESTED_MAX = 2  # requests at once: a short one need not wait for a long one


class PrefillWorker:
    """Glues engine and SendBuffer together, on the event loop. The connector owns the latter."""

    def __init__(
        self,
        local: LocalWorker,
        engine: Engine,
        connector: NeuronConnector,
        pool: KvPool,
        prompts: PromptReader,
        legs: LiveLegs,
        report: LegReport,
    ) -> None:
        self._local = local
        self._engine = engine
        self._pool = pool
        self._prompts = prompts
        self._legs = legs
        self._report = report
        # In the loop's executor they would wait behind prompts of others that are tokenised there.
        self._digesting = ThreadPoolExecutor(DIGESTED_MAX, thread_name_prefix="digests")
        self._send_buffer = connector.open_send_buffer(self.on_hand_over)
        self.signal_port = self._send_buffer.port
        engine.watch_layers = partial(self._send_buffer.layers.watch, pool)

    async def run(self, leg: PrefillLeg) -> AsyncGenerator[LegEvent, None]:
        """Answer one leg. Leaving it, in whatever way, frees the request's blocks."""
        key = (leg.request_id, leg.attempt)
        with self._legs.open(key, leg.timeout_s) as queue:
            outcome = "cancelled"
            self._send_buffer.expect(*key)
            reach("queued")
            try:
                self._engine.submit(await self._prompts.read(leg))
                async with aclosing(self._answers(queue)) as answers:
                    async for event in answers:
                        yield event
                outcome = "the first token ended it"
            except NeuronDiError as error:
                outcome = error.code
                raise
            finally:  # both do nothing for a request that was handed over
                self._send_buffer.drop(*key, reason=outcome)  # knows if somebody reads its blocks
                self._engine.cancel(key)

    def on_hand_over(
        self, key: Key, outcome: Done | NeuronDiError, held_by: TransferToken | None
    ) -> None:
        """The SendBuffer's last word on a parked request: it was pulled, or will not be.

        Its blocks may be reused when `held_by` is done; None: at once.
        """
        if isinstance(outcome, Done) and held_by is None:
            self._engine.release(key)
        else:  # of a request that was handed over, too, a posted send may still run
            self._engine.cancel(key, "error", held_by=held_by)
        if held_by is not None:
            held_by.on_done(lambda _: self._engine.wake())
        if isinstance(outcome, Done):
            self._legs.dispatch([HandedOver(key, outcome)])
        else:
            self._legs.dispatch([Broken(key, outcome)])

    async def _answers(self, queue: LegQueue) -> AsyncGenerator[LegEvent, None]:
        parked: PrefillParked | None = None
        verify_s = 0.0
        num_blocks = 0
        while True:
            event = await queue.get()
            if isinstance(event, Emitted):
                yield event.token
            elif isinstance(event, PrefillParked):
                parked, num_blocks = event, len(event.request.block_ids)
                start_s = now_s()
                ready = await self._ready(event)
                verify_s = now_s() - start_s
                reach("parked")
                self._send_buffer.park(ready)
                request = event.request
                yield Parked(num_prompt=request.num_prompt, num_cached=request.num_cached)
            elif isinstance(event, HandedOver):
                assert parked is not None
                yield self._report.released(
                    parked.timing,
                    num_prompt=parked.request.num_prompt,
                    num_generated=len(parked.request.generated),
                    kv_blocks=num_blocks,
                    verify_s=verify_s,
                    done=event.done,
                )
                return
            elif isinstance(event, Ended):
                yield self._report.finished(event)
                return
            else:
                raise event.error

    async def _ready(self, event: PrefillParked) -> Ready:
        # Reading a parked request off its engine's thread is safe: nothing changes it until
        # this worker releases or cancels it.
        request, local = event.request, self._local
        identity = KvIdentity(
            worker_id=local.worker_id,
            incarnation=local.incarnation,
            request_id=request.request_id,
            attempt=request.attempt,
            layout_digest=local.layout_digest,
        )
        block_ids = list(request.block_ids)
        generations = self._pool.generations(block_ids)
        digested = block_ids, identity, request.num_computed
        num_bytes = len(block_ids) * self._pool.layout.block_bytes
        if num_bytes <= self._pool.digested_at_once_bytes:
            digests = self._digests(*digested)
        else:
            loop = asyncio.get_running_loop()
            digests = await loop.run_in_executor(self._digesting, self._digests, *digested)
        return Ready(
            request_id=request.request_id,
            attempt=request.attempt,
            worker_id=local.worker_id,
            incarnation=local.incarnation,
            layout_digest=local.layout_digest,
            prompt_ids=request.prompt_ids,
            generated=list(request.generated),
            block_ids=list(block_ids),
            generations=generations,
            digests=digests,
            num_tokens=request.num_computed,
            in_reasoning=request.begins_in_reasoning,
        )

    def _digests(
        self, block_ids: list[BlockId], identity: KvIdentity, num_tokens: int
    ) -> list[int]:
        """Of the KV in these blocks. An error where the pool is closed: then nobody needs them."""
        pool = self._pool
        with pool.view(block_ids[0]):  # it keeps the memory while it is read
            return pool.digests(block_ids, identity, num_tokens)
