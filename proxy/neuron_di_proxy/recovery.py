"""Brings a request to its end, over as many attempts as that takes and limits allow.

    attempt 0 --fails--> attempt 1 (another worker, the same request id) --fails--> attempt 2 ...

Before a token reached the client, the next attempt starts from nothing: a *retry*. After it, the
next attempt is given the ids that the client has and goes on with the next one: a *continuation*.
Waiting until a worker is there is not an attempt; `queue_timeout_s` bounds it.
"""

import asyncio
import random

from msgspec import structs

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import CapacityError, NeuronDiError, PeerGone, PeerRefused, WorkerFailed
from neuron_di.obs import LimitedLogger, get_logger
from neuron_di.wire import Finished, Token, WorkerRecord
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.emit import Emit, MakeLane, no_lane
from neuron_di_proxy.failure import RequestTimeout, failure_of
from neuron_di_proxy.health import Health
from neuron_di_proxy.known_models import ModelNotFound
from neuron_di_proxy.launch import Launcher
from neuron_di_proxy.receipts import RequestRecord
from neuron_di_proxy.route import Route, Router
from neuron_di_proxy.workers import Process, Workers, process_of

BACKOFF_S = 0.05
BACKOFF_S_MAX = 1.0
ATTEMPTS_MAX = 900  # workers take numbers of three digits
BACKOFF_GROWTH = 1.5
BACKOFF_JITTER = 0.2
ROUTE_POLL_S = 0.1  # a directory does not tell of its changes
LOOKED_MAX = 64  # kinds of requests that are known to have found nobody just now
BUDGET_BURST = 100.0
CONFIRM_S = 1.0  # until a worker whose connection broke has answered, or is known to be lost

# A model, which weights (None: any), and how long a context: who wants the same finds the same.
_Wanted = tuple[str, str | None, int]

_log = get_logger(__name__)
_limited = LimitedLogger(__name__)


class RetryBudget:
    """Bounds further attempts of all requests together, so that failures do not multiply load."""

    def __init__(self, share: float) -> None:
        self._share = share
        self.left = BUDGET_BURST

    def admit(self) -> None:
        """A request came: it earns its share of a further attempt."""
        self.left = min(self.left + self._share, BUDGET_BURST)

    def take(self) -> bool:
        """Spend one further attempt. False when there is none."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


class RequestRunner:
    """Runs requests. Pure asyncio and `clock`; random numbers come from `rng` only.

        runner = RequestRunner(workers, router, health, limits, random.Random(seed))
        finished = await runner.run(request, record, emit)

    `workers` opens legs (the `Workers` protocol), `router` is a Router over the same `health`.
    `health` should be entered; it never is by this class.
    """

    def __init__(
        self,
        workers: Workers,
        router: Router,
        health: Health,
        limits: LimitOptions,
        rng: random.Random,
    ) -> None:
        self._router = router
        self._health = health
        self._limits = limits
        self._rng = rng
        self._launcher = Launcher(workers, health, limits)
        self._looked_s: dict[_Wanted, float] = {}  # in vain; of those that wait, the last one
        health.on_change(self._looked_s.clear)
        self._is_abandoned = False
        self.budget = RetryBudget(limits.retry_share)

    async def run(
        self,
        request: ChoiceRequest,
        record: RequestRecord,
        emit: Emit,
        make_lane: MakeLane = no_lane,
    ) -> Finished:
        """Give `emit` the request's tokens, indices 0, 1, 2, ..., each once. Returns its end.

        Raises what kept it from its end: a ClientError, the last attempt's failure,
        CapacityError when no worker was there in time, RequestTimeout at the deadline, which
        counts from `record.accepted_s`. `record.attempts` grows with each attempt, and a token is
        counted in `record` before it is given; one that takes a lane of `make_lane` instead is
        counted by the lane. Cancelling closes all legs at once. A token that
        came in the same turn of the loop may still be given then.
        """
        self.budget.admit()
        deadline = Deadline(record.accepted_s + self._limits.request_timeout_s)
        failed_step: WorkerRecord | None = None  # where; or was it this request's fault?
        room: Deadline | None = None  # by when a worker must have some, if the last had none
        count_token = record.count_token

        def give(token: Token) -> None:
            nonlocal failed_step
            count_token(token)
            # A further attempt that gave two tokens got past where one failed.
            if failed_step is not None and attempt.num_tokens > 1:
                self._convict(failed_step, attempt)
                failed_step = None
            emit(token)

        while True:
            tried = record.attempts
            began = next((each for each in tried if each.num_tokens), None) if tried else None
            attempt = Attempt(
                request_id=record.request_id,
                number=len(tried),
                request=request,
                route=await self._find_route(request, record, began, deadline),
                emitted=_given_before(record) if tried else (),
                accepted_s=record.accepted_s,
                deadline=deadline,
                has_given_way=bool(tried) and _has_given_way(record),
                begun_with=began.context_tokens() if began is not None else None,
            )
            tried.append(attempt)
            try:
                # Who failed a step is not known before more tokens were looked at.
                lane = make_lane if failed_step is None else no_lane
                finished = await self._launcher.run(attempt, give, lane)
            except NeuronDiError as error:
                self._learn(attempt, error)
                if attempt.code == WorkerFailed.code:
                    failed_step = attempt.blamed
                room = self._room_after(attempt, room, deadline)
                if not await self._may_go_on(record, error, deadline, room):
                    raise
            else:
                if failed_step is not None:
                    self._convict(failed_step, attempt)
                # The client's prompt was computed for what gave token 0. Later, it was again.
                num_cached = (began or attempt).num_cached
                if finished.num_cached != num_cached:
                    finished = structs.replace(finished, num_cached=num_cached)
                record.finished = finished
                return finished
            await self._back_off(record, deadline)

    def abandon(self) -> None:
        """End every running request with an error, and start no further attempt."""
        self._is_abandoned = True
        self._health.fail_all(PeerGone("the server is shutting down"))

    async def _find_route(
        self,
        request: ChoiceRequest,
        record: RequestRecord,
        began: Attempt | None,
        deadline: Deadline,
    ) -> Route:
        """Wait for workers that can serve the request. Raises CapacityError when none is there."""
        avoid: set[Process] = set()
        for attempt in record.attempts:  # as a rule there was none
            suspects = (attempt.blamed, attempt.accuser, attempt.refused_by)
            avoid |= {process_of(each) for each in suspects if each is not None}
        # Other weights under the same name must not continue what these began, nor a worker
        # whose context would end it earlier.
        digest = began.route.prefill.model_digest if began is not None else None
        context_tokens = began.context_tokens() if began is not None else 0
        wanted = record.model, digest, context_tokens
        queue: Deadline | None = None  # as a rule there is nothing to wait for
        while True:
            if self._is_abandoned:
                raise CapacityError("the server is shutting down")
            if deadline.has_passed():
                raise RequestTimeout("no worker could take the request in time")
            try:
                if queue is None or queue.has_passed() or self._may_look(wanted):
                    return self._router.pick(record.model, avoid, digest, context_tokens, request)
            except CapacityError:
                queue = queue or self._queue_deadline(record, deadline)
                if queue.has_passed():
                    raise
                self._note_vain_look(wanted)
            except ModelNotFound:
                queue = queue or self._queue_deadline(record, deadline)
                if not record.attempts or queue.has_passed():
                    raise
            wait_s = min(ROUTE_POLL_S, queue.remaining_s(), deadline.remaining_s())
            await self._wait_for_workers(record, max(wait_s, 1e-3))

    def _may_look(self, wanted: _Wanted) -> bool:
        """Whether nobody else has just looked for the same in vain.

        Those that wait may be a thousand, and to find that none of a hundred workers will do takes
        a millisecond: of all that look at one moment only the first does.
        """
        return now_s() >= self._looked_s.get(wanted, -ROUTE_POLL_S) + ROUTE_POLL_S / 2

    def _note_vain_look(self, wanted: _Wanted) -> None:
        if len(self._looked_s) >= LOOKED_MAX:
            self._looked_s.clear()
        self._looked_s[wanted] = now_s()

    def _queue_deadline(self, record: RequestRecord, deadline: Deadline) -> Deadline:
        """Who gave way to others would have its whole answer otherwise. So it waits as long as it
        may: the worker drains, say, and takes nobody before it has started again."""
        if _has_given_way(record):
            return deadline
        return Deadline.after(self._limits.queue_timeout_s)

    async def _wait_for_workers(self, record: RequestRecord, timeout_s: float) -> None:
        """One may join or recover. Who waits for that is no request that runs."""
        counts, since_s = record.counts, now_s()
        if counts is not None:
            counts.num_unrouted += 1
        try:
            await self._health.wait_change(timeout_s)
        finally:
            if counts is not None:
                counts.num_unrouted -= 1
            record.unrouted_s += now_s() - since_s

    def _learn(self, attempt: Attempt, error: NeuronDiError) -> None:
        """Tell health who is at fault, or have a pair tested whose workers accuse each other."""
        if failure_of(error).fault == "client":  # nobody here is, and clients bring no lines about
            return
        if attempt.wants_room:  # one that waits for it asks again and again
            worker_id = attempt.refused_by.worker_id if attempt.refused_by else None
            event = "attempt_preempted" if attempt.gave_way else "attempt_refused"
            _limited.info(event, request=attempt.request_id, worker=worker_id)
            return
        _log.warning(
            "attempt_failed",
            request=attempt.request_id,
            attempt=attempt.number,
            first_index=len(attempt.emitted),
            tokens=attempt.num_tokens,
            code=attempt.code,
            blamed=attempt.blamed.worker_id if attempt.blamed else None,
        )
        if attempt.blamed is None or self._is_abandoned:
            return
        is_certain = attempt.accuser is None and attempt.code != WorkerFailed.code
        self._health.blame(attempt.blamed, error, is_certain=is_certain)
        if attempt.code == PeerRefused.code:
            self._router.refuse(attempt.route, error.message)
        elif attempt.accuser is not None:
            self._router.doubt(attempt.route)

    def _convict(self, failed_step: WorkerRecord, attempt: Attempt) -> None:
        """Another worker did what one failed at: it was that worker, not the request."""
        route = attempt.route
        if process_of(failed_step) not in (process_of(route.prefill), process_of(route.decode)):
            error = WorkerFailed(f"worker {failed_step.worker_id} failed a step")
            self._health.blame(failed_step, error)

    def _room_after(
        self, attempt: Attempt, room: Deadline | None, deadline: Deadline
    ) -> Deadline | None:
        """By when a worker must have room, where this attempt ended for want of it."""
        if not attempt.wants_room:
            return None
        if attempt.gave_way or attempt.has_given_way:
            return deadline
        return room or Deadline.after(self._limits.queue_timeout_s)

    async def _is_lost(self, attempt: Attempt) -> bool:
        """Whether the attempt ended because its worker did. It had perhaps hundreds of them, and
        all of them go on: they multiply no load."""
        return attempt.blamed is not None and await self._health.is_lost(attempt.blamed, CONFIRM_S)

    async def _may_go_on(
        self,
        record: RequestRecord,
        error: NeuronDiError,
        deadline: Deadline,
        room: Deadline | None,
    ) -> bool:
        """Whether to try again, and paid for: what waits for room pays nothing."""
        failed = failure_of(error)
        alike = [each for each in record.attempts if each.code == failed.code]
        if failed.code == PeerRefused.code:  # another pair may do, but it is not tried for long
            is_retryable = len(alike) == 1
        elif failed.code == WorkerFailed.code:  # of several workers: it is the request
            processes = {process_of(each.blamed) for each in alike if each.blamed is not None}
            is_retryable = failed.retryable and len(processes) < 2
        else:
            is_retryable = failed.retryable
        if not is_retryable or failed.fault == "client":
            return False
        if self._is_abandoned or deadline.has_passed():
            return False
        is_continuation = bool(record.emitted)
        num_max = self._limits.continuations_max if is_continuation else self._limits.retries_max
        if room is not None:
            # Where it gave way nothing failed that had a limit.
            may_wait = _has_given_way(record) or (num_max > 0 and not room.has_passed())
            return may_wait and len(record.attempts) < ATTEMPTS_MAX
        further = [each for each in record.attempts if not each.wants_room][1:]
        if sum(bool(each.emitted) == is_continuation for each in further) >= num_max:
            return False
        return await self._is_lost(record.attempts[-1]) or self.budget.take()

    async def _back_off(self, record: RequestRecord, deadline: Deadline) -> None:
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S * BACKOFF_GROWTH ** (len(record.attempts) - 1))
        wait_s *= 1 + BACKOFF_JITTER * self._rng.uniform(-1, 1)
        await asyncio.sleep(min(wait_s, deadline.remaining_s()))


def _given_before(record: RequestRecord) -> tuple[int, ...]:
    """The ids that the client has. Attempts that add none share them: who waits for room makes
    hundreds of attempts, and an answer may be long."""
    before = record.attempts[-1].emitted
    return before if len(before) == len(record.emitted) else tuple(record.emitted)


def _has_given_way(record: RequestRecord) -> bool:
    return any(each.gave_way for each in record.attempts)
