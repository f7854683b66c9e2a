"""Runs one attempt: both legs start at once, their tokens become one sequence (seed N-24, N-25).

      prefill   Token k -> Parked ------------------> Released     (or Token k -> Finished)
      decode    (connects, reserves, waits for KV) -> Token k+1 -> Token k+2 -> ... -> Finished
      client    Token k ----------------------------> Token k+1 -> Token k+2 -> ... -> Finished

The LAUNCH table of `wire/handoff.py` says what may follow what, and what to do about it. k is
the number of tokens that the client has from earlier attempts.

Next: neuron_di/wire/legs.py
"""

import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, aclosing
from functools import partial

from neuron_di.clock import Deadline
from neuron_di.config import LimitOptions
from neuron_di.errors import (
    KvMissing,
    NeuronDiError,
    PeerError,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.obs import get_logger
from neuron_di.wire import DecodeLeg, Finished, Parked, PrefillLeg, Released, Token, WorkerRecord
from neuron_di.wire.handoff import LaunchAction, LaunchEvent, LaunchState, launch_step
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.failure import LegFailed, RequestTimeout, failure_of
from neuron_di_proxy.health import Health, Praise
from neuron_di_proxy.inbox import Heard, Inbox, Side
from neuron_di_proxy.route import Pair
from neuron_di_proxy.workers import Leg, Workers

RELEASE_TIMEOUT_S = 1.0  # from the end of decode to prefill's word that its blocks are free
DENIED_TIMEOUT_S = 1.0  # from prefill's word that decode gave up to decode's own why

_log = get_logger(__name__)

Generation = AsyncGenerator[Token | Finished, None]

_EVENTS = {
    ("prefill", Token): LaunchEvent.PREFILL_TOKEN,
    ("prefill", Parked): LaunchEvent.PREFILL_PARKED,
    ("prefill", Released): LaunchEvent.PREFILL_RELEASED,
    ("prefill", Finished): LaunchEvent.PREFILL_FINISHED,
    ("decode", Token): LaunchEvent.DECODE_TOKEN,
    ("decode", Finished): LaunchEvent.DECODE_FINISHED,
}


class Launcher:
    """Runs attempts at requests."""

    def __init__(self, workers: Workers, health: Health, limits: LimitOptions) -> None:
        self._workers = workers
        self._health = health
        self._limits = limits

    async def run(self, attempt: Attempt) -> Generation:
        """Yield the attempt's tokens, indices from `attempt.first_index` on, then its `Finished`.

        Raises the failure that ended it, after writing into `attempt` who is at fault. However
        it ends, also when it is closed early, no leg stays open: all are closed before anything
        is awaited. `Finished` comes after that.
        """
        if attempt.deadline.has_passed():
            attempt.code = RequestTimeout.code
            raise RequestTimeout("the request was not complete in time")
        sides = self._sides(attempt)
        inbox = Inbox()
        praises: dict[Side, Praise] = {}
        running = _Running(attempt, inbox, praises, self._limits)
        events = running.pair() if isinstance(attempt.route, Pair) else running.whole()
        watched = ExitStack()
        finished: Finished | None = None
        try:
            for side, (record, leg) in sides.items():
                inbox.read(side, leg, pause=side == "decode")
                watching = self._health.watching(record, partial(inbox.lose, side))
                praises[side] = watched.enter_context(watching)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished):
                        finished = event
                    else:
                        yield event
        except NeuronDiError as error:
            _note_failure(attempt, running.speaker, error)
            raise
        finally:
            for _, leg in sides.values():
                leg.close()
            watched.close()
            await inbox.close()
        assert finished is not None, "the events of an attempt end with it, or raise"
        yield finished

    def _sides(self, attempt: Attempt) -> dict[Side, tuple[WorkerRecord, Leg]]:
        """Each leg and its worker. Nothing is sent yet."""
        route, request = attempt.route, attempt.request
        timeout_s = max(attempt.deadline.remaining_s(), 1e-3)
        leg = PrefillLeg(
            request_id=attempt.request_id,
            attempt=attempt.number,
            endpoint=request.endpoint,
            prompt=request.prompt,
            sampling=request.sampling,
            timeout_s=timeout_s,
            context_tokens=attempt.context_tokens(),
            emitted=attempt.emitted,
        )
        if not isinstance(route, Pair):
            return {"whole": (route.worker, self._workers.open_leg(route.worker, "whole", leg))}
        decode_leg = DecodeLeg(
            request_id=attempt.request_id,
            attempt=attempt.number,
            sampling=request.sampling,
            prefill=route.prefill.peer_address(),
            timeout_s=timeout_s,
            context_tokens=attempt.context_tokens(),
            num_emitted=attempt.first_index,
        )
        prefill = self._workers.open_leg(route.prefill, "prefill", leg)
        decode = self._workers.open_leg(route.decode, "decode", decode_leg)
        return {"prefill": (route.prefill, prefill), "decode": (route.decode, decode)}


class _Running:
    """One attempt while it runs. `speaker` is whose words are being dealt with."""

    def __init__(
        self,
        attempt: Attempt,
        inbox: Inbox,
        praises: Mapping[Side, Praise],
        limits: LimitOptions,
    ) -> None:
        self._attempt = attempt
        self._inbox = inbox
        self._praises = praises
        self._limits = limits
        self._stall: Deadline | None = None  # runs while a decode worker owes the next token
        self._denied: Deadline | None = None  # runs once prefill said that decode gave up
        self._is_prefill_over = False
        self.speaker: Side | None = None

    async def whole(self) -> Generation:
        """The events of a worker that does it all. Between tokens it may prefill for others."""
        while True:
            heard = await self._hear()
            assert heard is not None, "nothing is held back here"
            said = heard.said
            if isinstance(said, Exception):
                raise said
            if isinstance(said, Finished):
                self._attempt.prefill = self._attempt.decode = said.receipt
                yield self._complete(said)
                return
            if not isinstance(said, Token):
                raise RemoteProtocolError(f"a worker sent {type(said).__name__} to a whole leg")
            yield self._due(said)

    async def pair(self) -> Generation:
        """The events of both legs, as the table moves them."""
        state = LaunchState.LAUNCHED
        held: dict[Side, Heard] = {}  # put aside until the other leg has said more
        due: Heard | None = None  # was held, and is to be looked at again
        while state is not LaunchState.OVER:
            heard = due or (await self._hear() if len(held) < 2 else None)
            event = LaunchEvent.OVERDUE
            if heard is None:  # or each of them waits for the other
                heard = held["prefill"]
                self.speaker = "prefill"
            else:
                self.speaker = heard.side
                event = _event_of(heard)
            state, actions = launch_step(state, event)
            if LaunchAction.HOLD_BACK in actions:
                held[heard.side], due = heard, None
                if heard.side == "prefill":
                    self._denied = Deadline.after(DENIED_TIMEOUT_S)
                continue
            due = held.pop("decode" if heard.side == "prefill" else "prefill", None)
            if heard.side == "decode":
                self._denied = None
                self._inbox.resume()
            if event is LaunchEvent.PREFILL_PARKED:
                self._attempt.is_parked = True
                self._praise()
            if LaunchAction.FAIL in actions:
                assert isinstance(heard.said, Exception), "only a failure fails"
                raise heard.said
            if LaunchAction.KEEP_RECEIPT in actions:
                self._keep_receipt(heard)
                if state is LaunchState.PARKED:  # decode has the KV, and owes a token
                    self._stall = Deadline.after(self._limits.stall_timeout_s)
            if LaunchAction.EMIT in actions:
                assert isinstance(heard.said, Token), "only tokens are given"
                yield self._due(heard.said)
                if heard.side == "decode":
                    self._stall = Deadline.after(self._limits.stall_timeout_s)
            if LaunchAction.FINISH in actions:
                assert isinstance(heard.said, Finished), "only this finishes"
                finished = self._complete(heard.said)
                if heard.side == "decode":
                    await self._note_release()
                yield finished

    async def _hear(self) -> Heard | None:
        """The next word of any leg. None where decode does not say in time why it gave up."""
        wait_s = self._attempt.deadline.remaining_s()
        stall_s = self._stall.remaining_s() if self._stall is not None else math.inf
        denied_s = self._denied.remaining_s() if self._denied is not None else math.inf
        try:
            heard = await self._inbox.next(min(wait_s, stall_s, denied_s))
        except TimeoutError:
            if denied_s < min(wait_s, stall_s):
                return None
            if stall_s >= wait_s:
                self.speaker = None
                raise RequestTimeout("the request was not complete in time") from None
            self.speaker = "decode"
            worker_id = self._attempt.workers()[1].worker_id
            raise PeerTimeout(f"worker {worker_id} sent no token for too long") from None
        self.speaker = heard.side
        if heard.side == "prefill" and isinstance(heard.said, Exception | Released):
            self._is_prefill_over = True
        return heard

    def _due(self, token: Token) -> Token:
        """Count a token. Raises RemoteProtocolError unless it is the next one."""
        due = self._attempt.first_index + self._attempt.num_tokens
        if token.index != due:
            raise RemoteProtocolError(f"a worker sent token {token.index} where {due} was due")
        self._attempt.num_tokens += 1
        if self.speaker != "prefill":  # which has not parked yet
            self._praise()
        return token

    def _complete(self, finished: Finished) -> Finished:
        """Check an end. Raises where a worker gave up, or where tokens were lost on the way."""
        num_given = self._attempt.first_index + self._attempt.num_tokens
        if finished.reason in ("cancelled", "error"):
            raise PeerError(f"the request ended early: {finished.reason}")
        if finished.num_generated != num_given:
            raise RemoteProtocolError(
                f"a worker ended after {finished.num_generated} tokens, of which {num_given} came"
            )
        self._praise()
        return finished

    def _praise(self) -> None:
        """The speaker did what it was asked for: it is worth a further request."""
        assert self.speaker is not None, "somebody spoke"
        self._praises[self.speaker]()

    def _keep_receipt(self, heard: Heard) -> None:
        assert isinstance(heard.said, Finished | Released), "only these have receipts"
        if heard.side == "prefill":
            self._attempt.prefill = heard.said.receipt
        else:
            self._attempt.decode = heard.said.receipt

    async def _note_release(self) -> None:
        """Keep prefill's receipt. Its absence does not spoil a complete answer."""
        deadline = Deadline.after(RELEASE_TIMEOUT_S)
        while not self._is_prefill_over:
            try:
                heard = await self._inbox.next(deadline.remaining_s())
            except TimeoutError:
                break
            if isinstance(heard.said, Released):
                self._attempt.prefill = heard.said.receipt
                return
            self._is_prefill_over = True
        if self._attempt.prefill is None:
            _log.warning("release_unseen", request=self._attempt.request_id)


def _event_of(heard: Heard) -> LaunchEvent:
    side, said = heard
    if not isinstance(said, Exception):
        event = _EVENTS.get((side, type(said)))
        if event is None:
            raise RemoteProtocolError(f"a worker sent {type(said).__name__} to a {side} leg")
        return event
    if not isinstance(said, NeuronDiError):
        raise said  # a bug of ours
    is_denied = failure_of(said).code == KvMissing.code
    if side == "prefill":
        return LaunchEvent.PREFILL_DENIED if is_denied else LaunchEvent.PREFILL_FAILED
    return LaunchEvent.DECODE_DENIED if is_denied else LaunchEvent.DECODE_FAILED


def _note_failure(attempt: Attempt, speaker: Side | None, error: NeuronDiError) -> None:
    """Write down why the attempt failed, and who is at fault."""
    failed = failure_of(error)
    attempt.code = failed.code
    if speaker is None or failed.fault == "client":
        return
    prefill, decode = attempt.workers()
    own, partner = (decode, prefill) if speaker == "decode" else (prefill, decode)
    is_accused = isinstance(attempt.route, Pair) and isinstance(error, LegFailed)
    if failed.http_status in (429, 503):
        attempt.refused_by = own
    elif is_accused and failed.fault == "peer":
        attempt.blamed, attempt.accuser = partner, own
    elif failed.http_status >= 500:
        attempt.blamed = own
