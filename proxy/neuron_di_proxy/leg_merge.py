"""Makes one sequence of tokens of what the legs of an attempt say, and finds its end.

Everything is done where it is heard, on the event loop: no task takes part before the end. Where
the LAUNCH table says of a token no more than "emit", it takes the inbox's short way, or a lane,
which is shorter still: what the lane took is counted here when something else is heard.
"""

import asyncio
import math
from abc import ABC, abstractmethod

from neuron_di.clock import now_s
from neuron_di.errors import NeuronDiError, PeerError, PeerTimeout, RemoteProtocolError
from neuron_di.obs import get_logger
from neuron_di.wire import Finished, Parked, Released, Token
from neuron_di.wire.handoff import LaunchAction, LaunchEvent, LaunchState, launch_step
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.emit import Emit, MakeLane, no_lane
from neuron_di_proxy.failure import RequestTimeout
from neuron_di_proxy.inbox import Heard, Inbox, Side
from neuron_di_proxy.leg_events import event_of, is_steady
from neuron_di_proxy.token_lane import Lane
from neuron_di_proxy.watch import LATE_S, Praise
from neuron_di_proxy.workers import Leg

RELEASE_TIMEOUT_S = 1.0  # from the end of decode to prefill's word that its blocks are free
DENIED_TIMEOUT_S = 1.0  # from prefill's word that decode gave up to decode's own why
TIMER_S = 1e-3  # a timer may be early by as much
LANE_TRY_TOKENS = 16  # an answer that is no plain text yet is asked again after so many tokens

_log = get_logger(__name__)

_PREFILL_TERMINAL = (Exception, Released)
_WITH_RECEIPT = (Finished, Released)

# Names of their own: to look a member up in its Enum takes longer than what is done with it.
_PREFILL_TOKEN, _DECODE_TOKEN = LaunchEvent.PREFILL_TOKEN, LaunchEvent.DECODE_TOKEN
_PARKED = LaunchState.PARKED
_EMIT, _FINISH, _FAIL = LaunchAction.EMIT, LaunchAction.FINISH, LaunchAction.FAIL
_KEEP_RECEIPT, _HOLD_BACK = LaunchAction.KEEP_RECEIPT, LaunchAction.HOLD_BACK


class Running(ABC):
    """One attempt while it runs. `speaker` is whose words are dealt with, or were last."""

    def __init__(self, attempt: Attempt, emit: Emit, make_lane: MakeLane = no_lane) -> None:
        self.inbox = Inbox(self._deal)
        self.praises: dict[Side, Praise] = {}
        self.trials: set[Side] = set()  # whose praise is waited for
        self.legs: dict[Side, Leg] = {}
        self.speaker: Side | None = None
        self._attempt = attempt
        self._emit = emit
        self._make_lane = make_lane
        self._lane: Lane | None = None
        self._lane_side: Side | None = None  # whose tokens are to take one
        self._is_first_lane = False  # it is for the first token only
        self._due = len(attempt.emitted)  # the next token's index
        self._tokens_max = attempt.tokens_max()
        self.is_over = False
        self._outcome: Finished | Exception | None = None  # until it is told
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._first_look_s = attempt.deadline.at_s  # when to see whether it is `next_s`

    async def wait(self) -> Finished:
        """Return or raise what becomes of the attempt, once."""
        if not self.is_over:
            self.wake_by(self._first_look_s)
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            loop.call_soon(self._take_first_lane)  # once the legs were sent
            await self._waiter
        outcome, self._outcome = self._outcome, None
        assert outcome is not None, "it has ended, and was not told"
        if isinstance(outcome, Exception):
            try:
                raise outcome
            finally:
                del outcome  # its traceback has this frame: see end()
        return outcome

    def close(self) -> None:
        """Hear nothing more, and leave no timer."""
        self.inbox.close()
        self._stop_timer()
        self.leave_lane()

    @abstractmethod
    def step(self, heard: Heard) -> None:
        """Deal with one event. What it raises ends the attempt."""

    def next_s(self) -> float:
        """When something is to be done although nobody has said anything."""
        return self._attempt.deadline.at_s

    def on_time(self) -> None:
        """Nobody said anything until then. What it raises ends the attempt."""
        self.speaker = None
        raise RequestTimeout("the request was not complete in time")

    def end(self, outcome: Finished | Exception) -> None:
        """The first outcome counts. Nothing is heard after it."""
        if not self.is_over:
            if isinstance(outcome, NeuronDiError):
                # Its frames have what was heard, which is the error itself: in such a circle all of
                # the request, its body too, would stay until the collector looks, which is rare.
                outcome.__traceback__ = None
            self.is_over, self._outcome = True, outcome
            self.close()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def give(self, token: Token) -> None:
        """Count a token and emit it. RemoteProtocolError unless it is the next of those wanted."""
        if self._lane is not None:
            self.catch_up(self._lane)
        if token.index != self._due:
            raise RemoteProtocolError(
                f"a worker sent token {token.index} where {self._due} was due"
            )
        if self._due >= self._tokens_max:
            raise RemoteProtocolError(f"a worker sent more than {self._tokens_max} tokens")
        self._due += 1
        self._attempt.num_tokens += 1
        self._emit(token)
        if self._lane is not None:
            self._lane.due = self._due
        elif self._lane_side is not None and self._due % LANE_TRY_TOKENS == 0:
            self.take_lane(self._lane_side)

    def take_lane(self, side: Side) -> None:
        """Let this side's tokens take a lane from now on, or as soon as there can be one."""
        if not self.is_over:
            self._lane_side = side
            self._lane = self._make_lane(is_first=False)
            if self._lane is not None:
                self._lane.end = self._tokens_max
                self.legs[side].relay(self._lane)

    def _take_first_lane(self) -> None:
        """Let the first token take a lane as well, unless anybody has said anything.

        Whatever is heard next closes it. So all that the lane must know of is this one token.
        """
        if not self.is_over and self.speaker is None and not self.trials:
            try:
                self._lane = self._make_lane(is_first=True)
            except Exception as error:  # a response's head that cannot be made
                self.end(error)
            if self._lane is not None:
                self._is_first_lane = True
                self.legs[next(iter(self.legs))].relay(self._lane)

    def leave_lane(self) -> None:
        """No token takes a lane from now on."""
        lane, self._lane, self._lane_side = self._lane, None, None
        if lane is not None:
            self.catch_up(lane)
            lane.close()
        self._is_first_lane = False

    def catch_up(self, lane: Lane) -> None:
        """Count the tokens that took the lane since this was last called."""
        num_taken = lane.take()
        if num_taken:
            self._due += num_taken
            self._attempt.num_tokens += num_taken
            self.note_taken(lane)

    @abstractmethod
    def note_taken(self, lane: Lane) -> None:
        """Some tokens took the lane."""

    def complete(self, finished: Finished) -> None:
        """Check an end. Raises where a worker gave up, or where tokens were lost on the way."""
        if finished.reason in ("cancelled", "error"):
            raise PeerError(f"the request ended early: {finished.reason}")
        if finished.num_generated != self._due:
            raise RemoteProtocolError(
                f"a worker ended after {finished.num_generated} tokens, of which {self._due} came"
            )
        if self.speaker != "decode":
            self._attempt.num_cached = finished.num_cached
        self.praise()

    def praise(self) -> None:
        """The speaker did what it was asked for: it is worth a further request."""
        assert self.speaker is not None, "somebody spoke"
        self.praises[self.speaker]()

    def _deal(self, heard: Heard) -> None:
        self.speaker = heard.side
        try:
            if self._is_first_lane:
                self.leave_lane()
            elif self._lane is not None:
                self.catch_up(self._lane)
            self.step(heard)
        except Exception as error:
            self.end(error)

    def wake_by(self, at_s: float) -> None:
        """See to it that `on_time` is called by then. One that comes too early is set again."""
        if at_s < self._timer_s and not self.is_over:
            self._stop_timer()
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, at_s - now_s()), self._ring)
            self._timer_s = at_s

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, math.inf

    def _ring(self) -> None:
        self._timer, self._timer_s = None, math.inf
        try:
            if self._lane is not None:
                self.catch_up(self._lane)
            if self.next_s() - now_s() < TIMER_S:
                self.on_time()
        except Exception as error:
            self.end(error)
        self.wake_by(self.next_s())


class PairOfLegs(Running):
    """Both legs, as the table moves them."""

    def __init__(
        self,
        attempt: Attempt,
        emit: Emit,
        stall_timeout_s: float,
        make_lane: MakeLane = no_lane,
    ) -> None:
        super().__init__(attempt, emit, make_lane)
        self._state = LaunchState.LAUNCHED
        self._held: dict[Side, Heard] = {}  # put aside until the other leg has said more
        self._stall_timeout_s = stall_timeout_s
        self._stall_s = math.inf  # until then decode owes the next token
        self._denied_s = math.inf  # until then decode may say why it gave up
        self._release_s = math.inf  # until then prefill may say that its blocks are free
        # A stall is most of what a timer is for: the first one comes in time for any.
        self._first_look_s = min(attempt.deadline.at_s, now_s() + stall_timeout_s)
        self._finished: Finished | None = None  # while that is waited for
        self._is_prefill_over = False
        self._is_relayed = False

    def step(self, heard: Heard) -> None:
        if heard.side == "prefill" and isinstance(heard.said, _PREFILL_TERMINAL):
            self._is_prefill_over = True
        if self._finished is not None:
            self._note_release(heard)
            return
        due: Heard | None = heard
        while due is not None:
            due = self._move(due, event_of(due))
        if self.is_over:
            return
        # What the table says of a token from now on is done by `_relay`.
        is_alone = self._is_prefill_over and "decode" not in self.trials
        relayed = not self._held and is_steady(self._state, is_alone=is_alone)
        if relayed is not self._is_relayed:
            self._is_relayed = relayed
            self.inbox.relay("decode" if relayed else None, self._relay)
            if relayed:
                self.take_lane("decode")
            else:
                self.leave_lane()

    def next_s(self) -> float:
        return min(self._attempt.deadline.at_s, self._stall_s, self._denied_s, self._release_s)

    def on_time(self) -> None:
        deadline_s = self._attempt.deadline.at_s
        if self._finished is not None:
            self._end_complete()
        elif self._denied_s < min(deadline_s, self._stall_s):
            self._move(self._held["prefill"], LaunchEvent.OVERDUE)
        elif deadline_s <= self._stall_s:
            super().on_time()
        else:
            self.speaker = "decode"
            worker_id = self._attempt.route.decode.worker_id
            raise PeerTimeout(f"worker {worker_id} sent no token for too long")

    def _ring(self) -> None:
        # This process stood still: what came meanwhile is still to be read.
        if now_s() - self._timer_s > LATE_S and self._stall_s < math.inf:
            self._stall_s = now_s() + self._stall_timeout_s
        super()._ring()

    def _move(self, heard: Heard, event: LaunchEvent) -> Heard | None:
        """Do what the table says. Returns what was put aside, and is to be looked at again."""
        self.speaker, said = heard.side, heard.said
        is_decode = heard.side == "decode"
        self._state, actions = launch_step(self._state, event)
        if _HOLD_BACK in actions:
            self._held[heard.side] = heard
            if not is_decode:
                self._denied_s = now_s() + DENIED_TIMEOUT_S
                self.wake_by(self._denied_s)
            if len(self._held) < 2:
                return None
            # They wait for each other.
            return self._move(self._held["prefill"], LaunchEvent.OVERDUE)
        due = self._held.pop("prefill" if is_decode else "decode", None)
        if is_decode:
            self._denied_s = math.inf
            self.inbox.resume()
        if isinstance(said, Parked):
            self._attempt.is_parked = True
            self._attempt.num_prompt, self._attempt.num_cached = said.num_prompt, said.num_cached
            self.praise()
        if _FAIL in actions:
            assert isinstance(said, Exception), "only a failure fails"
            raise said
        if _KEEP_RECEIPT in actions:
            self._keep_receipt(heard)
            if self._state is _PARKED:  # decode has the KV, and owes a token
                self._stall_s = now_s() + self._stall_timeout_s
                self.wake_by(self._stall_s)
        if _EMIT in actions:
            assert isinstance(said, Token), "only tokens are given"
            if is_decode:
                self._relay(said)
                self.wake_by(self._stall_s)
                self.praise()
            else:  # which has not parked yet
                self.give(said)
        if _FINISH in actions:
            assert isinstance(said, Finished), "only this finishes"
            self.complete(said)
            self._finish(said, is_decode=is_decode)
            return None
        return due

    def _relay(self, token: Token) -> None:
        """A token of decode, which then owes the next one."""
        self.give(token)
        self._note_given()
        self._stall_s = now_s() + self._stall_timeout_s

    def note_taken(self, lane: Lane) -> None:
        if self._is_first_lane:
            self._state, _ = launch_step(self._state, _PREFILL_TOKEN)
        else:
            self._note_given()
        self._stall_s = max(self._stall_s, lane.last_s + self._stall_timeout_s)

    def _note_given(self) -> None:
        """Decode's first token was relayed: it is for this to move the table, and to praise."""
        if self._state is _PARKED:
            self._state, _ = launch_step(self._state, _DECODE_TOKEN)
            self.praises["decode"]()

    def _keep_receipt(self, heard: Heard) -> None:
        assert isinstance(heard.said, _WITH_RECEIPT), "only these have receipts"
        if heard.side == "prefill":
            self._attempt.prefill = heard.said.receipt
        else:
            self._attempt.decode = heard.said.receipt

    # The end. Prefill's receipt is waited for; its absence does not spoil a complete answer.

    def _finish(self, finished: Finished, *, is_decode: bool) -> None:
        self._finished = finished
        if not is_decode or self._is_prefill_over:
            self._end_complete()
        else:
            self._stall_s = math.inf
            self._release_s = now_s() + RELEASE_TIMEOUT_S
            self.wake_by(self._release_s)

    def _note_release(self, heard: Heard) -> None:
        if isinstance(heard.said, Released):
            self._attempt.prefill = heard.said.receipt
        if self._is_prefill_over:
            self._end_complete()

    def _end_complete(self) -> None:
        assert self._finished is not None, "decode said so, or prefill did"
        if self._attempt.prefill is None:
            _log.warning("release_unseen", request=self._attempt.request_id)
        self.end(self._finished)
