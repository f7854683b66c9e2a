"""Runs a request: both legs start at once, and their tokens become one sequence (seed N-24, N-25).

      prefill   Token 0 -> Parked ------------------> Released     (or Token 0 -> Finished)
      decode    (connects, reserves, waits for KV) -> Token 1 -> Token 2 -> ... -> Finished
      client    Token 0 ----------------------------> Token 1 -> Token 2 -> ... -> Finished

Decode's answer is not read further than its first event while prefill still speaks, so
decode can be early without being buffered here.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine

from neuron_di.errors import KvMissing, NeuronDiError, PeerError, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.wire import DecodeLeg, Finished, Parked, PrefillLeg, Released, Token
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.openai_request import ClientRequest
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.route import Pair, Route
from neuron_di_proxy.worker_client import Leg, Progress, WorkerClient

RELEASE_TIMEOUT_S = 1.0  # from the end of decode to prefill's word that its blocks are free

_log = get_logger(__name__)

Generation = AsyncGenerator[Token | Finished, None]


async def run_request(
    client: WorkerClient, route: Route, request: ClientRequest, record: RequestRecord
) -> Generation:
    """Yield the request's tokens, indices 0, 1, 2, …, each once, and then its `Finished`.

    Raises the first failure of a leg that the request cannot do without. However it ends,
    also when it is closed early, no leg stays open.
    """
    context_tokens = None
    if isinstance(route, Pair):
        context_tokens = min(route.prefill.context_tokens, route.decode.context_tokens)
    leg = PrefillLeg(
        request_id=record.request_id,
        attempt=record.attempt,
        endpoint=request.endpoint,
        prompt=request.prompt,
        sampling=request.sampling,
        context_tokens=context_tokens,
    )
    if isinstance(route, Pair):
        decode_leg = DecodeLeg(
            request_id=record.request_id,
            attempt=record.attempt,
            sampling=request.sampling,
            prefill=route.prefill.peer_address(),
            context_tokens=context_tokens,
        )
        prefill = client.open_leg(route.prefill, "prefill", leg)
        decode = client.open_leg(route.decode, "decode", decode_leg)
        legs = [prefill, decode]
        events = _PairRun(prefill, decode, record).events()
    else:
        whole = client.open_leg(route.worker, "whole", leg)
        legs = [whole]
        events = _run_whole(whole, record)
    try:
        async for event in events:
            if isinstance(event, Token):
                _check_index(event, record)
                record.count_token()
            elif event.reason in ("cancelled", "error"):
                raise PeerError(f"the request ended early: {event.reason}")
            else:
                record.finished = event
            yield event
    finally:
        await events.aclose()
        for open_leg in legs:
            open_leg.close()


def _check_index(token: Token, record: RequestRecord) -> None:
    if token.index != record.num_tokens:
        raise RemoteProtocolError(
            f"a worker sent token {token.index} where token {record.num_tokens} was due"
        )


async def _run_whole(leg: Leg, record: RequestRecord) -> Generation:
    while True:
        event = await leg.next()
        if isinstance(event, Finished):
            record.prefill = record.decode = event.receipt
            yield event
            return
        yield _expect_token(event)


class _PairRun:
    """One request on two workers. Ends every task it starts."""

    def __init__(self, prefill: Leg, decode: Leg, record: RequestRecord) -> None:
        self._prefill = prefill
        self._decode = decode
        self._record = record
        self._tasks: list[asyncio.Task[Progress]] = []

    async def events(self) -> Generation:
        try:
            prefill_next = self._start(self._prefill.next())
            decode_next = self._start(self._decode.next())  # neither waits for the other
            yield _expect_token(await _prefill_event(prefill_next, decode_next))

            prefill_next = self._start(self._prefill.next())
            event = await _prefill_event(prefill_next, decode_next)
            if isinstance(event, Finished):
                self._record.prefill = event.receipt
                yield event
                return
            if not isinstance(event, Parked):
                raise RemoteProtocolError("a prefill leg did not park after its token")

            prefill_next = self._start(self._prefill.next())
            event = await _first_of_decode(prefill_next, decode_next)
            while not isinstance(event, Finished):
                yield _expect_token(event)
                event = await self._decode.next()
            self._record.decode = event.receipt
            await self._note_release(prefill_next)
            yield event
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, event: Coroutine[None, None, Progress]) -> asyncio.Task[Progress]:
        task = asyncio.create_task(event)
        self._tasks.append(task)
        return task

    async def _note_release(self, prefill_next: asyncio.Task[Progress]) -> None:
        """Keep prefill's receipt. Its absence does not spoil a complete answer."""
        await asyncio.wait({prefill_next}, timeout=RELEASE_TIMEOUT_S)
        if prefill_next.done() and prefill_next.exception() is None:
            event = prefill_next.result()
            if isinstance(event, Released):
                self._record.prefill = event.receipt
                return
        _log.warning(
            "release_unseen", request=self._record.request_id, worker=self._prefill.worker_id
        )


async def _prefill_event(
    prefill_next: asyncio.Task[Progress], decode_next: asyncio.Task[Progress]
) -> Progress:
    """Wait for prefill's next event; a failure of decode ends the wait, unless prefill caused it.

    When prefill fails, or finishes with token 0, decode hears "never" from it and fails with
    KvMissing, perhaps before prefill's own word arrives here. That word is what counts.
    """
    await asyncio.wait({prefill_next, decode_next}, return_when=asyncio.FIRST_COMPLETED)
    if not prefill_next.done():
        error = decode_next.exception()
        if isinstance(error, NeuronDiError) and failure_of(error).code == KvMissing.code:
            return await prefill_next
        if error is not None:
            raise error
    return await prefill_next


async def _first_of_decode(
    prefill_next: asyncio.Task[Progress], decode_next: asyncio.Task[Progress]
) -> Progress:
    """Wait for decode's first event; a failure of prefill ends the wait.

    Once decode has spoken it holds the KV, and what becomes of prefill no longer matters.
    """
    await asyncio.wait({prefill_next, decode_next}, return_when=asyncio.FIRST_COMPLETED)
    if not decode_next.done() and not isinstance(prefill_next.result(), Released):
        raise RemoteProtocolError("a prefill leg went on after it had parked")
    return await decode_next


def _expect_token(event: Progress) -> Token:
    if not isinstance(event, Token):
        raise RemoteProtocolError(f"a worker sent {type(event).__name__} where a token was due")
    return event
