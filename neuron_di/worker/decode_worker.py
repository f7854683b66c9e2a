"""A decode leg: wait for prefill, pull its KV, then token 1, 2, ... to the end.

Next: neuron_di/transfer/recv_buffer.py
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from neuron_di.clock import now_s
from neuron_di.engine import Broken, Emitted, Ended, Engine, Key, StartTransfer
from neuron_di.errors import (
    KvMissing,
    LocalProtocolError,
    NeuronDiError,
    RemoteProtocolError,
)
from neuron_di.kv import KvLayout
from neuron_di.obs.sync_point import reach
from neuron_di.request import Request, TokenRules, resolve_max_tokens
from neuron_di.transfer import Arrival, NeuronConnector, RecvBuffer, TransferToken
from neuron_di.types import BlockId
from neuron_di.wire import DecodeLeg, LegEvent, Ready
from neuron_di.wire.sampling_rules import check_sampling
from neuron_di.worker.leg_report import LegReport
from neuron_di.worker.live_legs import LiveLegs
from neuron_di.worker.prompts import PromptReader


@dataclass(slots=True)
class _Incoming:
    """A hand-over from lookup to the last block."""

    buffer: RecvBuffer
    ready: Ready
    pulled: Arrival | None = None


class DecodeWorker:
    """Glues connector and engine together, on the event loop. Owns neither."""

    def __init__(
        self,
        make_engine: Callable[[StartTransfer], Engine],
        connector: NeuronConnector,
        layout: KvLayout,
        prompts: PromptReader,
        legs: LiveLegs,
        report: LegReport,
    ) -> None:
        self._connector = connector
        self._layout = layout
        self._prompts = prompts
        self._legs = legs
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._incoming: dict[Key, _Incoming] = {}
        self.engine = make_engine(self.start_transfer)
        self.kv_bytes_received = 0

    async def run(self, leg: DecodeLeg) -> AsyncGenerator[LegEvent, None]:
        """Answer one leg. Leaving it, in whatever way, frees the slot and blocks on both sides."""
        key, came_s = (leg.request_id, leg.attempt), now_s() - leg.waited_s
        with self._legs.open(key, leg.timeout_s) as queue:
            reach("queued")
            self._connector.maybe_setup_buffer(leg.prefill)
            with queue.interruptible():
                rules = await self._prompts.rules_of(leg.sampling)  # while prefill computes
                buffer = self._connector.maybe_setup_buffer(leg.prefill)  # another one by now?
                ready = await buffer.lookup(*key, queue.deadline, self._on_lost)
            incoming = self._incoming[key] = _Incoming(buffer, ready)
            try:
                self.engine.submit(self._request(leg, came_s, incoming, rules))
                while True:
                    event = await queue.get()
                    if isinstance(event, Emitted):
                        yield event.token
                    elif isinstance(event, Ended):
                        yield self._finished(event, incoming)
                        return
                    elif isinstance(event, Broken):
                        raise event.error
            finally:  # both do nothing for a request that is over
                self.engine.cancel(key)
                buffer.cancel(*key, reason="the decode leg ended")
                del self._incoming[key]

    def start_transfer(self, request: Request) -> TransferToken:
        """The engine admitted a request: pull its KV. Called on the engine's thread."""
        token = TransferToken()
        token.on_done(lambda _: self.engine.wake())
        self._loop.call_soon_threadsafe(self._pull, request.key, list(request.block_ids), token)
        return token

    def _pull(self, key: Key, block_ids: list[BlockId], token: TransferToken) -> None:
        incoming = self._incoming.get(key)
        if incoming is None:
            token.complete(KvMissing("the leg ended before its transfer"))
            return
        ready = incoming.ready
        # The request holds blocks for a part of its answer, too; the prompt's KV fills the first.
        destination = block_ids[: self._layout.num_blocks_for(ready.num_tokens)]
        reach("transferring")
        try:
            pulled = incoming.pulled = incoming.buffer.pull(ready, destination)
        except Exception as error:  # a token that never ends would hold its blocks for ever
            token.complete(LocalProtocolError(f"the pull failed: {type(error).__name__}"))
            raise
        pulled.on_done(lambda done: token.complete(done.error()))

    def _on_lost(self, key: Key, error: NeuronDiError) -> None:
        """The KV that a leg waits for will not arrive."""
        self._legs.dispatch([Broken(key, error)])

    def _request(
        self, leg: DecodeLeg, came_s: float, incoming: _Incoming, rules: TokenRules | None
    ) -> Request:
        """Check the peer's word, then take over where prefill stopped: its tokens are given."""
        ready, layout = incoming.ready, incoming.buffer.layout
        num_vocab = self._prompts.num_vocab
        check_sampling(leg.sampling, num_vocab)
        num_prompt, num_given = len(ready.prompt_ids), len(ready.generated)
        if (
            num_given != leg.num_emitted + 1
            or ready.num_tokens != num_prompt + leg.num_emitted
            or len(ready.block_ids) != layout.num_blocks_for(ready.num_tokens)
            or not all(0 <= token < num_vocab for token in ready.prompt_ids)
            or not all(0 <= token < num_vocab for token in ready.generated)
        ):
            raise RemoteProtocolError("prefill's Ready does not add up")
        return Request(
            leg.request_id,
            leg.attempt,
            prompt_ids=ready.prompt_ids,
            sampling=leg.sampling,
            max_tokens=resolve_max_tokens(
                leg.sampling, num_prompt, self._prompts.context_of(leg.context_tokens)
            ),
            output=self._prompts.output_text(leg.sampling, ready.prompt_ids),
            given=ready.generated,
            num_prefilled=ready.num_tokens,
            rules=rules,
            begins_in_reasoning=ready.in_reasoning,
            age_order=came_s,
        )

    def _finished(self, event: Ended, incoming: _Incoming) -> LegEvent:
        if incoming.pulled is None:
            raise RemoteProtocolError("prefill handed over an answer that is complete already")
        reach("finishing")
        self.kv_bytes_received += incoming.pulled.kv_bytes
        return self._report.finished(
            event,
            kv_blocks=self._layout.num_blocks_for(incoming.ready.num_tokens),
            arrived=incoming.pulled,
        )
