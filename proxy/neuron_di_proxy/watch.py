"""One worker process under observation, and the legs there that hear of its loss.

`Health` owns a `Watch` per process and decides; who has a leg there holds a `Watching`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from neuron_di.clock import now_s
from neuron_di.errors import PeerError
from neuron_di.obs import LimitedLogger
from neuron_di.wire import WorkerRecord, WorkerStatus
from neuron_di_proxy.breaker import Breaker

LATE_S = 0.5  # an own delay beyond this is not the worker's silence: this process was stopped
LONG_AGO_S = float("-inf")

WorkerHealth = Literal["new", "up", "suspect", "frozen", "down"]
OnLoss = Callable[[PeerError], None]
Praise = Callable[[], None]


@dataclass(slots=True, eq=False)
class Watch:
    """What is known of one process, and who has legs there."""

    record: WorkerRecord
    state: WorkerHealth = "new"
    reason: str = ""
    is_draining: bool = False
    good_s: float = field(default_factory=now_s)  # its last good answer, or when it was first seen
    status: WorkerStatus | None = None
    num_elsewhere: int = 0  # legs of others that it had by its last word
    breaker: Breaker = field(default_factory=Breaker)
    legs: dict["Watching", OnLoss] = field(default_factory=dict)
    heard_s: float = LONG_AGO_S  # its last word, while its link is open and it is not suspected
    told_s: float = LONG_AGO_S  # its last word, whatever came after it
    asked_s: float = LONG_AGO_S  # when it was last asked
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # ask now
    alarm: asyncio.TimerHandle | None = None  # sets `hurry`, while nobody asks
    task: asyncio.Task[None] | None = None
    loss: PeerError | None = None  # while frozen or down
    log: LimitedLogger = field(default_factory=lambda: LimitedLogger(__name__))  # of what it says

    def why_not(self) -> str:
        """Why it should get no request now; empty when it may."""
        if self.state in ("suspect", "frozen", "down"):
            return self.reason
        if self.is_draining:
            return f"worker {self.record.worker_id} is shutting down"
        if self.breaker.opened_s is not None and not self.breaker.admits():
            return f"worker {self.record.worker_id} failed too often"
        return ""


class Watching:
    """A leg at a process under observation. Made by `Health.watching`."""

    __slots__ = ("_is_good", "_on_loss", "_watch", "is_trial")

    def __init__(self, watch: Watch, on_loss: OnLoss) -> None:
        self._watch = watch
        self._on_loss = on_loss
        self._is_good = False
        self.is_trial = False  # the process gets no further request before it is praised

    def __enter__(self) -> Praise:
        self.begin()
        return self.praise

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Watch from now on until `end`."""
        watch = self._watch
        if watch.breaker.opened_s is not None:  # as a rule it is closed
            self.is_trial = watch.breaker.begin_trial()
        is_lost = watch.loss is not None
        watch.legs[self] = ignore if is_lost else self._on_loss
        if watch.loss is not None:
            self._on_loss(watch.loss)

    def praise(self) -> None:
        """The process did what it was asked for. Calls after the first do nothing."""
        if not self._is_good:
            self._is_good = True
            breaker = self._watch.breaker
            if self.is_trial:
                breaker.end_trial()
            if breaker.opened_s is not None:
                breaker.succeed()

    def end(self) -> None:
        """Watch no more."""
        self._watch.legs.pop(self, None)
        if self.is_trial and not self._is_good:
            self._watch.breaker.end_trial()


def forgive(watch: Watch, late_s: float) -> None:
    """Do not count as silence what was our own delay: while stopped we hear nobody."""
    if late_s > LATE_S:
        watch.good_s = now_s()


def ring(watch: Watch, due_s: float) -> None:
    """Have the worker asked now, at the end of its rest."""
    watch.alarm = None
    forgive(watch, now_s() - due_s)
    watch.hurry.set()


def end_rest(watch: Watch) -> None:
    """Let nothing ring."""
    if watch.alarm is not None:
        watch.alarm.cancel()
        watch.alarm = None


def ignore(_: PeerError) -> None:
    """What a leg that was told of its loss does with further news."""
