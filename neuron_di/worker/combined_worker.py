"""A whole leg: prompt in, every token out, on one worker. The baseline of every comparison."""

from collections.abc import AsyncGenerator

from neuron_di.engine import Broken, Emitted, Ended, Engine
from neuron_di.wire import LegEvent, PrefillLeg
from neuron_di.worker.leg_report import LegReport
from neuron_di.worker.live_legs import LiveLegs
from neuron_di.worker.prompts import PromptReader


class CombinedWorker:
    """Answers legs with an engine of role "both"."""

    def __init__(
        self, engine: Engine, prompts: PromptReader, legs: LiveLegs, report: LegReport
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._legs = legs
        self._report = report

    async def run(self, leg: PrefillLeg) -> AsyncGenerator[LegEvent, None]:
        """Answer one leg. Leaving it, in whatever way, frees the request's slot and blocks."""
        key = (leg.request_id, leg.attempt)
        with self._legs.open(key, leg.timeout_s) as queue:
            try:
                self._engine.submit(await self._prompts.read(leg))
                while True:
                    event = await queue.get()
                    if isinstance(event, Emitted):
                        yield event.token
                    elif isinstance(event, Ended):
                        yield self._report.finished(event)
                        return
                    elif isinstance(event, Broken):
                        raise event.error
            finally:
                self._engine.cancel(key)
