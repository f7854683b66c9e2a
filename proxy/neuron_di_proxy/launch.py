"""Runs one attempt: both legs start at once, their tokens become one sequence (N-24, N-25).

      prefill   Token k -> Parked ------------------> Released     (or Token k -> Finished)
      decode    (connects, reserves, waits for KV) -> Token k+1 -> Token k+2 -> ... -> Finished
      client    Token k ----------------------------> Token k+1 -> Token k+2 -> ... -> Finished

The LAUNCH table of `wire/handoff.py` says what may follow what, and what to do about it
(`leg_merge.py`). k is the number of tokens that the client has from earlier attempts.

Next: neuron_di/wire/legs.py
"""

from functools import partial

from msgspec import structs

from neuron_di.clock import now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import DeadlinePassed, NeuronDiError
from neuron_di.wire import DecodeLeg, Finished, PrefillLeg, WorkerRecord
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.emit import Emit, MakeLane, no_lane
from neuron_di_proxy.failure import LegFailed, failure_of
from neuron_di_proxy.health import Health
from neuron_di_proxy.inbox import Side
from neuron_di_proxy.leg_merge import PairOfLegs
from neuron_di_proxy.watch import Watching
from neuron_di_proxy.whole_leg import WholeLeg
from neuron_di_proxy.workers import Leg, Workers


class Launcher:
    """Runs attempts at requests."""

    def __init__(self, workers: Workers, health: Health, limits: LimitOptions) -> None:
        self._workers = workers
        self._health = health
        self._limits = limits

    async def run(self, attempt: Attempt, emit: Emit, make_lane: MakeLane = no_lane) -> Finished:
        """Give `emit` the attempt's tokens, indices from `len(attempt.emitted)` on.

        Tokens that may go to the client with nothing else to be done take a lane of `make_lane`
        instead, if it makes one; they are in `attempt.num_tokens` at the end.
        Raises the failure that ended it, after writing into `attempt` who is at fault. However
        it ends, also when it is cancelled, no leg stays open: all are closed before it is over,
        and nothing is awaited in between.
        """
        sides = self._sides(attempt)
        stall_timeout_s = self._limits.stall_timeout_s
        running = (
            PairOfLegs(attempt, emit, stall_timeout_s, make_lane)
            if len(sides) > 1
            else WholeLeg(attempt, emit, make_lane)
        )
        inbox = running.inbox
        watched: list[Watching] = []
        try:
            for side, record, leg in sides:
                hear = inbox.listen(side, pause=side == "decode")
                watching = self._health.watching(record, partial(inbox.lose, side))
                running.praises[side] = watching.praise
                running.legs[side] = leg
                watched.append(watching)
                watching.begin()
                if watching.is_trial:
                    running.trials.add(side)
                if not running.is_over:
                    leg.open(hear)
            return await running.wait()
        except NeuronDiError as error:
            _note_failure(attempt, running.speaker, error)
            raise
        finally:
            for _, _, leg in sides:
                leg.close()
            for watching in watched:
                watching.end()
            if not running.is_over:
                running.close()

    def _sides(self, attempt: Attempt) -> list[tuple[Side, WorkerRecord, Leg]]:
        """Each leg and its worker. Nothing is sent yet."""
        route, request = attempt.route, attempt.request
        timeout_s = max(attempt.deadline.remaining_s(), 1e-3)
        waited_s = max(now_s() - attempt.accepted_s, 0.0)
        context_tokens = attempt.context_tokens()
        options = request.options
        if attempt.emitted and options.report:  # it came with token 0
            options = structs.replace(options, report=False, logprobs=None)
        leg = PrefillLeg(
            request_id=attempt.request_id,
            attempt=attempt.number,
            endpoint=request.endpoint,
            prompt=request.prompt,
            sampling=request.sampling,
            timeout_s=timeout_s,
            waited_s=waited_s,
            context_tokens=context_tokens,
            emitted=attempt.emitted,
            options=options,
            cache_scope=request.cache_scope,
            traceparent=request.traceparent,
        )
        if not route.is_pair:
            return [("whole", route.decode, self._workers.open_leg(route.decode, "whole", leg))]
        decode_leg = DecodeLeg(
            request_id=attempt.request_id,
            attempt=attempt.number,
            sampling=request.sampling,
            prefill=route.prefill.peer_address(),
            timeout_s=timeout_s,
            waited_s=waited_s,
            context_tokens=context_tokens,
            num_emitted=len(attempt.emitted),
            traceparent=request.traceparent,
        )
        prefill = self._workers.open_leg(route.prefill, "prefill", leg)
        decode = self._workers.open_leg(route.decode, "decode", decode_leg)
        return [("prefill", route.prefill, prefill), ("decode", route.decode, decode)]


def _note_failure(attempt: Attempt, speaker: Side | None, error: NeuronDiError) -> None:
    """Write down why the attempt failed, and who is at fault."""
    failed = failure_of(error)
    attempt.code = failed.code
    if speaker is None or failed.fault == "client":
        return
    if failed.code == DeadlinePassed.code:  # of the request's own time, which is nobody's fault
        return
    own, partner = attempt.route.prefill, attempt.route.decode
    if speaker == "decode":
        own, partner = partner, own
    is_accused = attempt.route.is_pair and isinstance(error, LegFailed)
    if failed.http_status in (429, 503):
        attempt.refused_by = own
    elif is_accused and failed.fault == "peer":
        attempt.blamed, attempt.accuser = partner, own
    elif failed.http_status >= 500:
        attempt.blamed = own
