"""Proves of each prefill and decode worker that they can hand over, before clients find out.

A test is a real request of two tokens: prefill computes the first, decode the second from KV
that was moved and verified. A pair that failed is not used while another works, is shown by
`GET /health`, and is tried again after a while. A pair of which one accused the other while it
served a request is tested at the next look for pairs that are due. Pairs are tested one at a time.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import msgspec

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import DeadlinePassed, NeuronDiError, PeerTimeout
from neuron_di.obs import get_logger
from neuron_di.types import RequestId
from neuron_di.wire import SamplingParams, Token, WorkerRecord
from neuron_di_proxy.attempt import Attempt
from neuron_di_proxy.choice_request import ChoiceRequest
from neuron_di_proxy.failure import RequestTimeout, failure_of
from neuron_di_proxy.health import Health
from neuron_di_proxy.launch import Launcher
from neuron_di_proxy.route import Directory, Kind, Route, fits, kind_of
from neuron_di_proxy.ticks import look_every
from neuron_di_proxy.workers import Process, Workers, process_of

ID_PREFIX = "self-test-"
LOOK_INTERVAL_S = 1.0  # for pairs that are due; whenever a worker's health changes, too
RETRY_S = 10.0
TEST_TIMEOUT_S = 30.0
NUM_TOKENS = 2

_TIMEOUTS = (RequestTimeout.code, DeadlinePassed.code, PeerTimeout.code)

_log = get_logger(__name__)


class PairResult(NamedTuple):
    """The outcome of a pair's last test. skipped: the workers cannot run it, say no more."""

    prefill: WorkerRecord
    decode: WorkerRecord
    outcome: Literal["ok", "failed", "skipped"]
    reason: str
    tested_s: float


class PairBook:
    """What is known of pairs of processes. A pair that nobody tested is taken to work."""

    def __init__(self) -> None:
        self._results: dict[tuple[Process, Process], PairResult] = {}
        self._failed: set[tuple[Process, Process]] = set()  # by their last results
        self._doubted: set[tuple[Process, Process]] = set()

    def has_failed(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        if not self._failed:  # as a rule, and for each request
            return False
        return (process_of(prefill), process_of(decode)) in self._failed

    def result_of(self, prefill: WorkerRecord, decode: WorkerRecord) -> PairResult | None:
        return self._results.get((process_of(prefill), process_of(decode)))

    def results(self) -> list[PairResult]:
        """In the order in which pairs were first tested."""
        return list(self._results.values())

    def note(self, result: PairResult) -> None:
        pair = process_of(result.prefill), process_of(result.decode)
        self._results[pair] = result
        self._doubted.discard(pair)
        if result.outcome == "failed":
            self._failed.add(pair)
        else:
            self._failed.discard(pair)

    def doubt(self, prefill: WorkerRecord, decode: WorkerRecord) -> None:
        """Have the pair tested at the next look. Until then it is taken to be what it was."""
        self._doubted.add((process_of(prefill), process_of(decode)))

    def refuse(self, prefill: WorkerRecord, decode: WorkerRecord, reason: str) -> None:
        """The pair failed without a test."""
        self.note(PairResult(prefill, decode, "failed", reason, now_s()))

    def is_pair_settled(self, prefill: Process, decode: Process) -> bool:
        """Whether these were tested, and need not be tested again."""
        pair = prefill, decode
        return pair in self._results and pair not in self._failed and pair not in self._doubted

    @property
    def is_settled(self) -> bool:
        """Whether no pair of those that were tested is to be tested again."""
        return not self._failed and not self._doubted

    def keep_only(self, records: tuple[WorkerRecord, ...]) -> None:
        """Forget the pairs of processes that are gone."""
        here = {process_of(record) for record in records}
        for prefill, decode in list(self._results):
            if prefill not in here or decode not in here:
                del self._results[prefill, decode]
        self._doubted = {pair for pair in self._doubted if here.issuperset(pair)}
        self._failed &= self._results.keys()


class SelfTest:
    """Tests pairs while entered, and writes the outcomes into `pairs`."""

    def __init__(
        self,
        workers: Workers,
        directory: Directory,
        health: Health,
        limits: LimitOptions,
        pairs: PairBook,
        rng: random.Random,
    ) -> None:
        self._directory = directory
        self._health = health
        self._launcher = Launcher(workers, health, limits)
        self._pairs = pairs
        self._rng = rng
        self._overdue_s: dict[tuple[Process, Process], float] = {}  # when a test was too slow
        self._hurry = asyncio.Event()  # look for pairs that are due
        self._all_tested: Sequence[WorkerRecord] | None = None  # the view whose pairs all were
        health.on_change(self._hurry.set)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._test_often())
        self._stop_looking = look_every(LOOK_INTERVAL_S, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_looking()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _look(self) -> None:
        if self._all_tested is not self._directory.workers() or not self._pairs.is_settled:
            self._hurry.set()

    async def _test_often(self) -> None:
        while True:
            try:
                for pair in self._due():
                    await self._test(pair)
            except Exception:
                _log.exception("self_test_failed")
            self._hurry.clear()  # what changed meanwhile is seen at the next look
            await self._hurry.wait()

    def _due(self) -> list[Route]:
        """The pairs to test now: ready, answering, and not tested or failed a while ago."""
        records = self._directory.workers()
        self._pairs.keep_only(records)
        open_pairs = self._open_pairs(records)
        is_tested = all(self._pairs.result_of(p, d) is not None for p, d in open_pairs)
        self._all_tested = records if is_tested else None
        ready = {id(r) for r in records if r.state == "ready" and self._health.is_usable(r)}
        due = [(p, d) for p, d in open_pairs if {id(p), id(d)} <= ready and self._is_due(p, d)]
        return [Route(prefill, decode) for prefill, decode in due]

    def _open_pairs(
        self, records: Sequence[WorkerRecord]
    ) -> list[tuple[WorkerRecord, WorkerRecord]]:
        """Those that fit and were not tested, or are to be tested again.

        With 100 workers of each role there are 10,000 pairs to look at, once a second and beside
        all streams: so little is done for one that is as it should be.
        """
        decodes = [(record, process_of(record)) for record in records if record.role == "decode"]
        fitting: dict[Kind, list[tuple[WorkerRecord, Process]]] = {}
        is_settled = self._pairs.is_pair_settled
        found = []
        for prefill in records:
            if prefill.role != "prefill":
                continue
            process, kind = process_of(prefill), kind_of(prefill)
            if kind not in fitting:
                fitting[kind] = [each for each in decodes if fits(prefill, each[0])]
            found += [
                (prefill, decode)
                for decode, other in fitting[kind]
                if not is_settled(process, other)
            ]
        return found

    def _is_due(self, prefill: WorkerRecord, decode: WorkerRecord) -> bool:
        """Of an open pair."""
        result = self._pairs.result_of(prefill, decode)
        slow_s = self._overdue_s.get((process_of(prefill), process_of(decode)))
        if slow_s is not None and now_s() < slow_s + RETRY_S:
            return False
        if result is None or result.outcome != "failed":
            return True
        return now_s() >= result.tested_s + RETRY_S

    async def _test(self, pair: Route) -> None:
        if not (self._health.is_usable(pair.prefill) and self._health.is_usable(pair.decode)):
            return
        attempt = Attempt(
            request_id=RequestId(f"{ID_PREFIX}{self._rng.getrandbits(64):016x}"),
            number=0,
            request=_request(pair.prefill.model),
            route=pair,
            emitted=(),
            accepted_s=now_s(),
            deadline=Deadline.after(TEST_TIMEOUT_S),
        )
        outcome: Literal["ok", "failed", "skipped"] = "ok"
        reason = ""
        try:
            tokens: list[Token] = []
            await self._launcher.run(attempt, tokens.append)
        except NeuronDiError as error:
            if attempt.refused_by is not None:
                return  # busy, which says nothing
            if attempt.code in _TIMEOUTS and not attempt.is_parked:
                # Neither does a queue before prefill: nothing of a hand-over was seen.
                self._note_slow(pair)
                return
            outcome = "skipped" if failure_of(error).fault == "client" else "failed"
            reason = error.message
        else:
            came = any(r.form is not None for r in (attempt.prefill, attempt.decode) if r)
            if len(tokens) != NUM_TOKENS:
                outcome, reason = "failed", f"{len(tokens)} tokens came instead of {NUM_TOKENS}"
            elif not came:
                outcome, reason = "failed", "no KV was handed over"
        self._conclude(PairResult(pair.prefill, pair.decode, outcome, reason, now_s()))

    def _note_slow(self, pair: Route) -> None:
        now = now_s()
        slow = {key: at_s for key, at_s in self._overdue_s.items() if now < at_s + RETRY_S}
        self._overdue_s = {**slow, (process_of(pair.prefill), process_of(pair.decode)): now}

    def _conclude(self, result: PairResult) -> None:
        self._pairs.note(result)
        log = _log.warning if result.outcome == "failed" else _log.info
        log(
            "pair_tested",
            prefill=result.prefill.worker_id,
            decode=result.decode.worker_id,
            outcome=result.outcome,
            reason=result.reason,
        )


def _request(model: str) -> ChoiceRequest:
    return ChoiceRequest(
        endpoint="completions",
        model=model,
        prompt=msgspec.Raw(msgspec.json.encode([0, 1] * 9)),  # more than one KV block of 16
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
