"""A prefill leg: prompt in, token 0 out, KV parked until the decode worker has it.

Next: neuron_di/core/prefill_scheduler.py
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from neuron_di.engine import Broken, Emitted, Ended, Engine, Key, PrefillParked
from neuron_di.errors import NeuronDiError
from neuron_di.kv import KvPool
from neuron_di.transfer import NeuronConnector
from neuron_di.wire import Done, LegEvent, Parked, PrefillLeg, Ready
from neuron_di.worker.leg_report import LegReport
from neuron_di.worker.live_legs import HandedOver, LegQueue, LiveLegs
from neuron_di.worker.prompts import PromptReader


class PrefillWorker:
    """Glues engine and SendBuffer together, on the event loop. The connector owns the latter."""

    def __init__(
        self,
        engine: Engine,
        connector: NeuronConnector,
        pool: KvPool,
        prompts: PromptReader,
        legs: LiveLegs,
        report: LegReport,
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._prompts = prompts
        self._legs = legs
        self._report = report
        self._send_buffer = connector.open_send_buffer(self.on_hand_over)
        self.signal_port = self._send_buffer.port

    async def run(self, leg: PrefillLeg) -> AsyncGenerator[LegEvent, None]:
        """Answer one leg. Leaving it, in whatever way, frees the request's blocks."""
        key = (leg.request_id, leg.attempt)
        with self._legs.open(key) as queue:
            outcome = "cancelled"
            self._send_buffer.expect(*key)
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
                self._engine.cancel(key)
                self._send_buffer.drop(*key, reason=outcome)

    def on_hand_over(self, key: Key, outcome: Done | NeuronDiError) -> None:
        """The SendBuffer's last word on a parked request: it was pulled, or will not be."""
        if isinstance(outcome, Done):
            self._engine.release(key)
            self._legs.dispatch([HandedOver(key, outcome)])
        else:
            self._engine.cancel(key, "error")
            self._legs.dispatch([Broken(key, outcome)])

    async def _answers(self, queue: LegQueue) -> AsyncGenerator[LegEvent, None]:
        parked: PrefillParked | None = None
        num_blocks = 0
        while True:
            event = await queue.get()
            if isinstance(event, Emitted):
                yield event.token
            elif isinstance(event, PrefillParked):
                parked, num_blocks = event, len(event.request.block_ids)
                self._send_buffer.park(self._ready(event))
                yield Parked(num_prompt=event.request.num_prompt)
            elif isinstance(event, HandedOver):
                assert parked is not None
                num_prompt = parked.request.num_prompt
                yield self._report.released(parked.timing, num_prompt, num_blocks, event.done)
                return
            elif isinstance(event, Ended):
                yield self._report.finished(event)
                return
            else:
                raise event.error

    def _ready(self, event: PrefillParked) -> Ready:
        # Reading a parked request off its engine's thread is safe: nothing changes it until
        # this worker releases or cancels it.
        request = event.request
        return Ready(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt_ids=request.prompt_ids,
            first_token=request.generated[0],
            block_ids=list(request.block_ids),
            generations=self._pool.generations(request.block_ids),
            num_tokens=request.num_computed,
        )
