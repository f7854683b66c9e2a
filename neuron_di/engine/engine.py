"""The loop of every worker: `step()` is schedule -> run -> postprocess.

One thread owns the scheduler, the backend and every request. Others talk to it through
`submit`, `cancel` and `release`, which only append to an inbox; it answers through one sink
call per step. It never waits for a peer, a socket or a transfer.

Next: neuron_di/transfer/send_buffer.py
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuron_di.backends import Backend, LayerHook
from neuron_di.clock import now_s
from neuron_di.core import (
    BlockCount,
    CompletionToken,
    DecodeBatch,
    DecodeScheduler,
    PrefillChunk,
    PrefillScheduler,
    Scheduler,
    StepPlan,
)
from neuron_di.engine.events import Broken, Emitted, Ended, EngineEvent, Key, PrefillParked, Timing
from neuron_di.engine.live import Live
from neuron_di.engine.next_tokens import next_tokens
from neuron_di.engine.prefix_copies import prefill
from neuron_di.engine.prompt_scores import PromptScores
from neuron_di.engine.sampler import SampledToken, describe_logprobs
from neuron_di.errors import (
    BackendLost,
    ClientError,
    LocalProtocolError,
    NeuronDiError,
    RemoteProtocolError,
    WorkerFailed,
)
from neuron_di.obs import get_logger
from neuron_di.obs.sync_point import is_watched, reach
from neuron_di.request import Finish, Request, RequestStatus, Tokenizer, accept_token
from neuron_di.types import FinishReason
from neuron_di.wire import Token

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)

# Asks the transfer side to fill an admitted request's blocks. Must return at once.
StartTransfer = Callable[[Request], CompletionToken]


class Engine:
    """Runs one model for one worker, whatever its role: the scheduler makes the difference.

    `sink` gets the events of a step, in order, and `on_failure` is called once should a bug of
    ours end the engine: both on the engine's thread, where they must not block.
    `start_transfer` is needed with a DecodeScheduler only. `notify` is called, by whoever put it
    there, after each message that waits for a `turn`: for one who turns the engine without its
    thread.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        *,
        sink: Callable[[list[EngineEvent]], None],
        on_failure: Callable[[], None] = lambda: None,
        start_transfer: StartTransfer | None = None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._sink = sink
        self._on_failure = on_failure
        self._start_transfer = start_transfer
        self._notify = notify
        self.watch_layers: Callable[[PrefillChunk], LayerHook | None] = lambda _: None  # per chunk
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[Key, Live] = {}
        self._events: list[EngineEvent] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        backend.watch(self._lose)
        self.num_steps = 0
        self.blocks: BlockCount = scheduler.count_blocks()  # replaced after each turn
        self.has_failed = False  # by a bug of ours: from then on every request is refused
        self.busy_since_s: float | None = None  # when the turn that runs began to work

    # What other threads may call.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step. Requests that are left end as cancelled. Blocks."""
        self._put(self._stop)
        if self._thread.is_alive():
            self._thread.join()
        else:  # it was never started, or has ended
            self.turn(block=False)

    def submit(self, request: Request) -> None:
        """Take ownership of a request. Its events follow, the last one Ended or Broken.

        The ids it was given get no events, except when they are a whole answer: then Ended
        follows at once, and nothing is computed.
        """
        self._put(lambda: self._add(request))

    def cancel(
        self,
        key: Key,
        reason: FinishReason = "cancelled",
        held_by: CompletionToken | None = None,
    ) -> None:
        """End a request wherever it is, without an event. Unknown and ended ones are ignored.

        `held_by`, on a prefill worker: a peer may be reading the request's blocks until this is
        done. They are quarantined so long; whoever completes it calls `wake`.
        """
        self._put(lambda: self._cancel(key, reason, held_by))

    def release(self, key: Key) -> None:
        """Prefill: the decode worker has this parked request's KV; its blocks are free again."""
        self._put(lambda: self._release(key))

    def wake(self) -> None:
        """Look again: a transfer's token changed. Whoever completes a token calls this."""
        self._put(None)

    def _put(self, message: Callable[[], None] | None) -> None:
        self._inbox.put(message)
        if self._notify is not None:
            self._notify()

    def _lose(self, error: BackendLost) -> None:
        def fail() -> None:
            if not self.has_failed:
                raise error

        self._put(fail)

    # The loop. Everything below runs on the engine's thread.

    def turn(self, *, block: bool) -> bool:
        """Read the inbox, do one step, hand its events to the sink. True: turn again at once.

        False: nothing will change until the next message; `block` waits for one to begin with.
        """
        has_worked = False
        try:
            self._read_inbox(block=block)
            if not self.has_failed:
                has_worked = self.step()
                if not has_worked and self._scheduler.is_idle():
                    self._scheduler.check_integrity()
                self.blocks = self._scheduler.count_blocks()
        except BaseException:  # our books are wrong, or a library panicked: so could answers be
            _log.exception("engine_failed")
            self._give_up()
            has_worked = False
        if self._events:
            events, self._events = self._events, []
            self._sink(events)
        self.busy_since_s = now_s() if has_worked and not self._is_stopping else None
        return has_worked

    def step(self) -> bool:
        """Compute one plan. False when there was nothing to compute."""
        plan = self._schedule()
        if plan is None:
            return False
        self._carry_out(plan)
        self.num_steps += 1
        return True

    def _carry_out(self, plan: StepPlan) -> None:
        try:
            logits = self._prefill(plan) if isinstance(plan, PrefillChunk) else self._decode(plan)
        except BackendLost:
            raise  # no other step can succeed either
        except Exception as error:
            if len(plan.requests) == 1:
                self._fail(plan.requests[0], error)
                return
            _log.exception("step_failed", num_requests=len(plan.requests))
            for request in plan.requests:  # one of them may fail it, and would fail it anywhere
                self._carry_out(DecodeBatch((request,)))
            return
        plan.mark_computed()
        if logits is not None:
            self._postprocess(plan, logits)

    def _schedule(self) -> StepPlan | None:
        scheduler = self._scheduler
        for request, error in scheduler.failures():  # their slots are free at once
            self._break(request, error)
        plan = scheduler.schedule()
        if isinstance(scheduler, DecodeScheduler):
            self._start_transfers(scheduler)
        if isinstance(plan, PrefillChunk) and plan.start == 0:
            live = self._live[plan.request.key]
            live.timing.queued_s, live.since_s = now_s() - live.since_s, now_s()
        return plan

    def _prefill(self, chunk: PrefillChunk) -> "Tensor | None":
        """Logits of the request's next token; None when it gets none now."""
        reach("prefilling")
        after_layer = self.watch_layers(chunk)
        hooks: dict[str, Any] = {} if after_layer is None else {"after_layer": after_layer}
        prompt = self._live[chunk.request.key].prompt
        if chunk.request.needs_all_logits and not chunk.is_replay:
            assert prompt is not None, "its wish was seen when it came"
            hooks["read_logits"] = prompt.read
        last = prefill(self._backend, self._scheduler.prefixes, chunk, **hooks)
        return None if last is None else last.unsqueeze(0)

    def _decode(self, batch: DecodeBatch) -> "Tensor":
        if is_watched() and any(len(each.generated) >= 3 for each in batch.requests):
            reach("decoding")
        return self._backend.decode(batch)

    def _postprocess(self, plan: StepPlan, logits_BV: "Tensor") -> None:
        tokens = next_tokens(self._backend, logits_BV, plan.requests, self._eos_token_ids)
        for request, token in zip(plan.requests, tokens, strict=True):
            try:
                if isinstance(token, Exception):
                    raise token
                self._append(request, token)
            except Exception as error:
                self._fail(request, error)
            if isinstance(plan, PrefillChunk) and request.status is RequestStatus.RUNNING:
                live = self._live[request.key]
                live.timing.prefill_s, live.since_s = now_s() - live.since_s, now_s()
                if isinstance(self._scheduler, PrefillScheduler):
                    self._scheduler.park(request)
                    self._events.append(PrefillParked(request.key, request, live.timing))

    def _append(self, request: Request, sampled: SampledToken) -> None:
        """Give the request its next token, and end it if that was the last."""
        index = len(request.generated)
        logprobs = describe_logprobs(self._tokenizer, sampled, request.output)
        outcome = accept_token(request, sampled.token_id, self._eos_token_ids)
        prompt = self._live[request.key].prompt if index == 0 else None
        token = Token(
            index=index,
            token_id=sampled.token_id,
            text=outcome.text,
            logprobs=logprobs,
            prompt=None if prompt is None else prompt.report(),
            in_reasoning=index == 0 and request.begins_in_reasoning,
        )
        self._events.append(Emitted(request.key, token))
        if outcome.finish is not None:
            self._end(request, outcome.finish)

    def _end(self, request: Request, finish: Finish) -> None:
        live = self._live[request.key]
        phase_s = now_s() - live.since_s
        if request.num_computed == request.num_prefilled:  # no decode step has added to it
            live.timing.prefill_s = phase_s
        else:
            live.timing.decode_s = phase_s
        self._finish(request, finish.reason)
        self._tell_end(request, finish, live.timing)

    def _tell_end(self, request: Request, finish: Finish, timing: Timing) -> None:
        self._events.append(
            Ended(
                request.key,
                finish.reason,
                finish.stop,
                finish.text,
                request.num_prompt,
                len(request.generated),
                request.num_cached,
                timing,
            )
        )

    def _start_transfers(self, scheduler: DecodeScheduler) -> None:
        assert self._start_transfer is not None
        for request in scheduler.transfers_to_start():
            live = self._live[request.key]
            live.timing.queued_s, live.since_s = now_s() - live.since_s, now_s()
            scheduler.transfer_started(request, self._start_transfer(request))

    def _finish(
        self, request: Request, reason: FinishReason, held_by: CompletionToken | None = None
    ) -> None:
        """The one place where a request ends: its blocks are marked, then given back.

        Those that go into quarantine are marked now, too: a reader sees that they were given up.
        """
        self._backend.quiesce(request.block_ids)
        self._retire(request)
        if isinstance(self._scheduler, PrefillScheduler):
            self._scheduler.finish(request, reason, held_by)
        else:
            self._scheduler.finish(request, reason)
        del self._live[request.key]

    def _retire(self, request: Request) -> None:
        """Mark its blocks as given up: those that came, where blocks of it are another worker's."""
        while self._backend.pool.retire(request.block_ids):
            self._scheduler.follow_exchanges()

    def _break(self, request: Request, error: NeuronDiError) -> None:
        self._finish(request, "error")
        self._events.append(Broken(request.key, error))

    def _fail(self, request: Request, error: Exception) -> None:
        if isinstance(error, ClientError):  # such as rules that leave no token to choose
            self._break(request, error)
            return
        _log.exception("step_failed", request=request.request_id)
        if self._scheduler.prefixes is not None:
            self._scheduler.prefixes.forget_prompt(request)
        self._break(request, WorkerFailed(f"the step failed: {type(error).__name__}"))

    def _add(self, request: Request) -> None:
        try:
            if self.has_failed:
                raise WorkerFailed("this worker's engine has failed")
            if request.key in self._live:
                raise LocalProtocolError(f"{request!r} is here already")
            finish = self._accept_given(request)
            if finish is not None:
                self._tell_end(request, finish, Timing())
                return
            self._scheduler.add(request)
        except NeuronDiError as refusal:
            self._events.append(Broken(request.key, refusal))
        else:
            self._live[request.key] = live = Live(request)
            if request.prompt_wish is not None:
                live.prompt = PromptScores(request, request.prompt_wish, self._tokenizer)

    def _accept_given(self, request: Request) -> Finish | None:
        """Bring the request to where its given ids lead; the end, if one of them is that.

        Their text is dropped: the client has it.
        """
        if not all(0 <= token_id < self._backend.num_vocab for token_id in request.given):
            raise RemoteProtocolError("a given token id lies outside the vocabulary")
        for token_id in request.given:
            outcome = accept_token(request, token_id, self._eos_token_ids)
            if outcome.finish is not None:
                request.status = RequestStatus.FINISHED
                request.finish_reason = outcome.finish.reason
                return outcome.finish
        return None

    def _cancel(self, key: Key, reason: FinishReason, held_by: CompletionToken | None) -> None:
        if (live := self._live.get(key)) is not None:
            self._finish(live.request, reason, held_by)

    def _release(self, key: Key) -> None:
        assert isinstance(self._scheduler, PrefillScheduler)
        if (live := self._live.pop(key, None)) is not None:
            self._retire(live.request)
            self._scheduler.release(live.request)

    def _stop(self) -> None:
        self._is_stopping = True
        for live in list(self._live.values()):
            self._finish(live.request, "cancelled")

    def _run(self) -> None:
        has_worked = False
        while not self._is_stopping:
            has_worked = self.turn(block=not has_worked)

    def _give_up(self) -> None:
        """Break every request, and refuse those to come. The pool stays as it is."""
        self.has_failed = True
        error = WorkerFailed("this worker's engine has failed")
        self._events += [Broken(key, error) for key in self._live]
        self._live.clear()
        self._on_failure()

    def _read_inbox(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(block=block)
            self.busy_since_s = now_s()
            while True:
                if message is not None:
                    message()
                message = self._inbox.get_nowait()
