"""Which workers live: each says so, or is asked again and again, whatever the directory says.

    new ---------.                 .--> frozen   no good answer for freeze_timeout_s, or stuck
    up <---------+-- any of them --+
    suspect -----'                 '--> down     refused twice, failed, or another process answers

`new`, which nobody asked yet, and `up` get requests, if the worker's breaker admits them.
`suspect` failed a request and gets none before its next answer. From `frozen` and `down` a
good answer leads back; when a worker becomes one of them, every open leg there fails at once,
although its connection may stay open.

Two sources tell how a worker is. Asking over HTTP is the one that always works: a new worker at
once, one that is new, suspect, frozen or down at each `probe_interval_s`. While a worker is up its
link brings a word of it each second by itself, and every word is as good as an answer. It puts
off the next question until the word is old (`_trust_s`), so that a worker that goes on talking is
never asked. Once it falls silent, or its link ends, it is asked as if there were no link, and its
silence counts from its last word on. A process that is stopped keeps its link open: it is silent
there, gives no answer either, and is frozen at the same moment as without a link.

A word cannot lift a suspicion: it may have been on its way before the failure. Nor does an answer
count that was asked for before the last word: it may be the older of the two. A word counts from
the moment at which it is read. After this process was stopped that may be long after it was sent,
but then silence is counted anew in any case (`watch.forgive`).

A directory only discovers: a worker that it drops gets no new requests, and is watched for as
long as legs are open there. One that keeps workers whose key vanished hears which of them are
gone. Where two workers say that they are at one address, neither gets a request before it has
answered: who is not the process that answers there is down.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Self

from neuron_di.clock import Deadline, now_s
from neuron_di.config import LimitOptions
from neuron_di.errors import NeuronDiError, PeerError, PeerGone, PeerTimeout
from neuron_di.obs import get_logger
from neuron_di.types import WorkerId
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di.wire.leg_link import ALIVE_INTERVAL_S
from neuron_di_proxy.directory import (
    AdoptingDirectory,
    AskingDirectory,
    CandidDirectory,
    DoubtingDirectory,
    TellingDirectory,
)
from neuron_di_proxy.failure import failure_of
from neuron_di_proxy.health_report import HealthReport, report_of
from neuron_di_proxy.route import Directory
from neuron_di_proxy.ticks import look_every
from neuron_di_proxy.watch import (
    LONG_AGO_S,
    OnLoss,
    Watch,
    Watching,
    WorkerHealth,
    end_rest,
    forgive,
    ignore,
    ring,
)
from neuron_di_proxy.workers import Process, TalkingWorkers, Workers, place_of, process_of

ANSWER_MIN_S = 0.25  # a worker gets at least this to answer, however late the question is asked
FOLLOW_INTERVAL_S = 1.0  # at most, between two looks at the directory
FOLLOW_PAUSE_S = 0.1  # at least, where it tells of its changes
SUSPICIOUS = frozenset({"peer_gone", "peer_timeout", "stale_incarnation"})

_log = get_logger(__name__)


class Health:
    """Watches workers while entered. Owned by one event loop."""

    def __init__(self, workers: Workers, directory: Directory, limits: LimitOptions) -> None:
        self._workers = workers
        self._directory = directory
        self._limits = limits
        # A word that is late leaves the worker at least half of its time to answer a question.
        self._trust_s = min(1.5 * ALIVE_INTERVAL_S, limits.freeze_timeout_s / 2)
        self._watches: dict[Process, Watch] = {}
        self._seen: Sequence[WorkerRecord] = ()  # what the directory had at the last look
        self._num_listed = 0  # processes among it
        self._task: asyncio.Task[None] | None = None  # while entered
        self._talking: TalkingWorkers | None = None
        self._doubting = directory if isinstance(directory, DoubtingDirectory) else None
        self._adopting = directory if isinstance(directory, AdoptingDirectory) else None
        self._changed = asyncio.Event()  # set at the next change, and replaced by a fresh one
        self._listeners: list[Callable[[], object]] = []
        if isinstance(workers, TalkingWorkers):
            self._talking = workers
            workers.on_word(self.note_word)
        if isinstance(directory, AskingDirectory):
            directory.ask_first(self.last_word)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        interval_s = min(2 * self._limits.probe_interval_s, FOLLOW_INTERVAL_S)
        self._stop_looking = look_every(interval_s, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop_looking()
        tasks = [self._task, *(watch.task for watch in self._watches.values())]
        self._task = None
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for watch in self._watches.values():
            end_rest(watch)

    def is_usable(self, record: WorkerRecord) -> bool:
        """True when a request may be given to this process now."""
        return not self.why_not(record)

    def why_not(self, record: WorkerRecord) -> str:
        """Why this process should get no request now; empty when it may."""
        watch = self._watches.get((record.worker_id, record.incarnation))  # for each request
        return watch.why_not() if watch is not None else ""

    def load_of(self, record: WorkerRecord) -> float:
        """How much of what it can compute at once it has: 1.0 is as much as its slots.

        What this proxy has there, and what others had by the worker's last word.
        """
        watch = self._watches.get(process_of(record))
        if watch is None:
            return record.num_legs / max(1, record.slots)
        return (len(watch.legs) + watch.num_elsewhere) / max(1, record.slots)

    def reports(self) -> list[HealthReport]:
        """Every worker of the directory, in its order."""
        vanished = {} if self._doubting is None else self._doubting.vanished()
        return [
            report_of(
                record,
                self._watches.get(process_of(record)) or Watch(record),
                vanished.get(process_of(record)),
            )
            for record in self._directory.workers()
        ]

    def candid_directory(self) -> CandidDirectory | None:
        """The directory, if it says what is wrong with it."""
        return self._directory if isinstance(self._directory, CandidDirectory) else None

    def watching(self, record: WorkerRecord, on_loss: OnLoss) -> Watching:
        """Watch a process for a leg, from its `begin` to its `end`, or in a `with` block.

        `on_loss` is called once, when the process is found to be gone or frozen, perhaps at once.
        `praise` is to be called when the process did what it was asked for: calls after the first
        do nothing. A breaker's trial ends there, however long the leg goes on.
        """
        return Watching(self._watch_of(record), on_loss)

    def blame(self, record: WorkerRecord, error: NeuronDiError, *, is_certain: bool = True) -> None:
        """A request failed, and this process is at fault. It may be asked at once if it lives.

        Its breaker counts what `is_certain`.
        """
        watch = self._watch_of(record)
        if is_certain:
            watch.breaker.fail()
        if failure_of(error).code in SUSPICIOUS:
            if watch.state in ("new", "up"):
                self._become(watch, "suspect", error.message)
            watch.heard_s = LONG_AGO_S
            watch.hurry.set()

    def note_word(self, record: WorkerRecord, status: WorkerStatus | None) -> None:
        """A process said by its link how it is, or its link ended (None)."""
        watch = self._watches.get(process_of(record))
        if watch is None:
            if status is not None:  # legs that nobody watches had kept this link
                self._forget(record)
            return
        if status is None:  # in any state: what is heard of a link must not outlive it
            watch.heard_s = LONG_AGO_S
        if watch.state != "up":
            return
        if status is not None:
            watch.heard_s = watch.told_s = now_s()
            self._hear(watch, status)
        if watch.alarm is not None:
            self._rest(watch)

    def last_word(self, record: WorkerRecord) -> WorkerStatus | None:
        """What a process said of itself, while that is fresh enough not to be asked for."""
        watch = self._watches.get(process_of(record))
        if watch is None or watch.state != "up" or now_s() >= watch.heard_s + self._trust_s:
            return None
        return watch.status

    async def is_lost(self, record: WorkerRecord, timeout_s: float) -> bool:
        """Whether a process is gone or frozen. A suspect gets at most `timeout_s` to answer."""
        watch, verdict = self._watch_of(record), Deadline.after(timeout_s)
        while watch.state == "suspect" and not verdict.has_passed():
            await self.wait_change(verdict.remaining_s())
        return watch.loss is not None

    def fail_all(self, error: PeerError) -> None:
        """End every open leg with `error`."""
        for watch in self._watches.values():
            for on_loss in list(watch.legs.values()):
                on_loss(error)

    def on_change(self, listener: Callable[[], object]) -> None:
        """Call `listener` whenever a worker changes its state. It is short."""
        self._listeners.append(listener)

    async def wait_change(self, timeout_s: float) -> None:
        """Return when any worker changed its state, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _follow(self) -> None:
        """Watch what the directory has: also as soon as it tells of a change, if it does."""
        directory = self._directory if isinstance(self._directory, TellingDirectory) else None
        epoch = 0 if directory is None else directory.epoch
        self._look()
        while directory is not None:
            epoch = await directory.wait_changed(epoch)
            self._look()
            await asyncio.sleep(FOLLOW_PAUSE_S)  # more changes may come with this one

    def _look(self) -> None:
        try:
            self._update()
        except Exception:
            _log.exception("directory_failed")

    def _update(self) -> None:
        records = self._directory.workers()
        if records is self._seen and len(self._watches) == self._num_listed:
            return  # as a rule
        listed = {process_of(record): record for record in records}
        vanished = {} if self._doubting is None else self._doubting.vanished()
        for process, record in listed.items():
            watch = self._watch_of(record)
            watch.record = record
            if process in vanished and (watch.loss is not None or watch.is_draining):
                self._drop(watch)
        self._doubt_rivals([self._watches[process] for process in listed])
        for process, watch in list(self._watches.items()):
            if process not in listed and not watch.legs and watch.state != "suspect":
                del self._watches[process]
                if watch.task is not None:
                    watch.task.cancel()
                end_rest(watch)
                self._forget(watch.record)
        # Last: after a failure the next look must do it all again.
        self._seen, self._num_listed = records, len(listed)

    def _doubt_rivals(self, watches: list[Watch]) -> None:
        """Ask at once who has an address, or a name, that a worker nobody asked yet claims."""
        if not any(watch.state == "new" for watch in watches):
            return  # as a rule
        claims: dict[object, list[Watch]] = {}
        for watch in watches:
            claims.setdefault(place_of(watch.record), []).append(watch)
            claims.setdefault(watch.record.worker_id, []).append(watch)
        for claim, rivals in claims.items():
            if len(rivals) > 1 and any(watch.state == "new" for watch in rivals):
                for watch in rivals:
                    watch.hurry.set()
                    if watch.state == "new" and isinstance(claim, tuple):
                        words = f"several workers say that they are at {claim[0]}:{claim[1]}"
                        self._become(watch, "suspect", words)

    def _drop(self, watch: Watch) -> None:
        """The process is gone, or is about to go. If its key is gone as well, it is no more."""
        if self._doubting is not None:
            self._doubting.drop(watch.record, watch.why_not())

    def _forget(self, record: WorkerRecord) -> None:
        if self._talking is not None:
            self._talking.forget(record)

    def _watch_of(self, record: WorkerRecord) -> Watch:
        process = record.worker_id, record.incarnation  # for each leg
        watch = self._watches.get(process)
        if watch is None:
            watch = self._watches[process] = Watch(record)
            if self._task is not None:
                watch.task = asyncio.create_task(self._probe_often(watch))
        return watch

    async def _probe_often(self, watch: Watch) -> None:
        while True:
            watch.hurry.clear()
            try:
                await self._probe(watch)
            except Exception:
                _log.exception("probe_failed", worker=watch.record.worker_id)
            watch.asked_s = now_s()
            self._rest(watch)
            await watch.hurry.wait()
            end_rest(watch)

    def _rest(self, watch: Watch) -> None:
        """Do not ask before this time is over, unless there is a hurry."""
        due_s = watch.asked_s + self._limits.probe_interval_s
        if watch.state == "up":
            due_s = max(due_s, watch.heard_s + self._trust_s)
        now = now_s()
        due_s = max(due_s, now)
        end_rest(watch)
        loop = asyncio.get_running_loop()
        watch.alarm = loop.call_later(due_s - now, ring, watch, due_s)

    async def _probe(self, watch: Watch) -> None:
        """Ask once, or twice where nobody is there, and conclude."""
        asked_s = now_s()
        answer = await self._ask(watch)
        if isinstance(answer, PeerGone):
            answer = await self._ask(watch)
        if isinstance(answer, WorkerStatus):
            if watch.told_s <= asked_s:  # otherwise it may be older than what the link said
                self._hear(watch, answer)
        elif isinstance(answer, PeerGone):
            self._lose(watch, "down", answer)
        elif now_s() >= watch.good_s + self._limits.freeze_timeout_s - 1e-3:
            words = f"worker {watch.record.worker_id} gives no answer ({answer.message})"
            self._lose(watch, "frozen", PeerTimeout(words))

    async def _ask(self, watch: Watch) -> WorkerStatus | PeerError:
        """Ask once. A worker that is not lost yet gets until its silence is too long."""
        asked_s = now_s()
        wait_s = self._limits.freeze_timeout_s
        if watch.loss is None:
            wait_s = max(watch.good_s + wait_s - asked_s, ANSWER_MIN_S)
        try:
            async with asyncio.timeout(wait_s):
                return await self._workers.status(watch.record, wait_s)
        except PeerError as error:
            forgive(watch, now_s() - asked_s - wait_s)
            return error
        except TimeoutError:
            forgive(watch, now_s() - asked_s - wait_s)
            return PeerTimeout(f"worker {watch.record.worker_id} is silent")

    def _hear(self, watch: Watch, status: WorkerStatus) -> None:
        worker_id = watch.record.worker_id
        if status.record.incarnation != watch.record.incarnation:
            # The record may be a ghost's, or name an address that is somebody else's.
            host, port = place_of(watch.record)
            words = f"{worker_id} is not at {host}:{port}: another process is, "
            if self._adopting is not None:
                self._adopting.adopt(watch.record, status.record)
            self._lose(watch, "down", PeerGone(words + status.record.worker_id))
        elif status.has_failed:
            self._lose(watch, "down", PeerGone(f"worker {worker_id} has failed"))
        elif status.is_stuck:
            words = f"worker {worker_id} has been busy with one step for too long"
            self._lose(watch, "frozen", PeerTimeout(words))
        else:
            watch.good_s = now_s()
            watch.status = status
            watch.num_elsewhere = max(0, status.num_legs - len(watch.legs))
            watch.loss = None
            is_draining = status.record.state == "draining"
            if watch.state != "up" or watch.is_draining != is_draining:
                watch.is_draining = is_draining
                self._become(watch, "up", "")
            if is_draining:
                self._drop(watch)

    def _lose(self, watch: Watch, state: WorkerHealth, error: PeerError) -> None:
        watch.loss = error
        watch.heard_s = LONG_AGO_S
        if watch.state != state:
            self._become(watch, state, error.message)
        for on_loss in list(watch.legs.values()):
            on_loss(error)
        watch.legs = dict.fromkeys(watch.legs, ignore)
        self._drop(watch)

    def _become(self, watch: Watch, state: WorkerHealth, reason: str) -> None:
        worker_id: WorkerId = watch.record.worker_id
        if state == "up":
            event = "worker_draining" if watch.is_draining else "worker_up"
            watch.log.info(event, worker=worker_id, before=watch.state)
        else:
            event = "worker_" + state  # as such: docs name what it makes
            watch.log.warning(event, worker=worker_id, reason=reason)
        watch.state, watch.reason = state, reason
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()
