"""A worker that takes no new requests, and waits until nothing of the others is left.

Running requests finish. KV that is parked is pulled, or its lease ends; blocks in quarantine are
let go of. Only then nobody will miss this worker.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from neuron_di.clock import Deadline
from neuron_di.wire.admin import DrainProgress
from neuron_di.worker.worker import Worker

POLL_S = 0.05
SAY_INTERVAL_S = 1.0  # at most, between two lines for whoever follows
TOLD_TIMEOUT_S = 1.0  # for followers to take the last line


class Drain:
    """One drain of one worker, from its first moment to its end."""

    def __init__(self, worker: Worker, timeout_s: float) -> None:
        self._worker = worker
        self._deadline = Deadline.after(timeout_s)
        tally = worker.legs.tally
        self._before = replace(tally, failed=Counter(tally.failed))
        self._followers = 0
        self._last: DrainProgress | None = None
        self.num_cut = 0

    def hurry(self, timeout_s: float) -> None:
        """Let it take no longer than this from now on."""
        self._deadline = self._deadline.earlier_of(Deadline.after(timeout_s))

    async def run(self) -> bool:
        """Wait until nothing is left. False when the time was over before."""
        while not self._is_empty():
            if self._deadline.has_passed():
                self.num_cut = len(self._worker.legs)
                return False
            await asyncio.sleep(min(POLL_S, max(self._deadline.remaining_s(), 0.001)))
        return True

    def conclude(self, *, is_empty: bool, is_withdrawn: bool) -> None:
        """Say the last line: nothing is left, or what is will be cut."""
        self._last = self._now(
            "drained" if is_empty else "cut", is_withdrawn=is_withdrawn, num_cut=self.num_cut
        )

    def progress(self) -> DrainProgress:
        """What it waits for now, or how it ended."""
        return self._last or self._now("draining")

    @contextmanager
    def followed(self) -> Iterator[AsyncGenerator[DrainProgress, None]]:
        """Its lines, for one who takes them within the block: `told` waits for that."""
        self._followers += 1
        try:
            yield self._lines()
        finally:
            self._followers -= 1

    async def _lines(self) -> AsyncGenerator[DrainProgress, None]:
        """Each change, and a line each second; the last one is final."""
        said: DrainProgress | None = None
        next_line = Deadline.after(0.0)
        while True:
            progress = self.progress()
            if progress.state != "draining":
                yield progress
                return
            if said is None or _counts(progress) != _counts(said) or next_line.has_passed():
                said, next_line = progress, Deadline.after(SAY_INTERVAL_S)
                yield progress
            await asyncio.sleep(POLL_S)

    async def told(self) -> None:
        """Wait until all who follow have the last line, but not for one that does not read."""
        deadline = Deadline.after(TOLD_TIMEOUT_S)
        while self._followers and not deadline.has_passed():  # noqa: ASYNC110 - few, and soon
            await asyncio.sleep(POLL_S / 5)

    def _is_empty(self) -> bool:
        status = self._worker.status()
        if status.has_failed:  # its books are what they are
            return status.num_legs == 0
        return not (
            status.num_legs
            or status.num_waiting
            or status.num_running
            or status.num_transferring
            or status.num_blocks_running
            or status.num_blocks_parked
            or status.num_blocks_receiving
            or status.num_blocks_quarantined
        )

    def _now(self, state: str, *, is_withdrawn: bool = False, num_cut: int = 0) -> DrainProgress:
        worker = self._worker
        status, tally = worker.status(), worker.legs.tally
        before = self._before
        is_decode = worker.decode is not None
        num_moving = status.num_transferring
        return DrainProgress(
            state=state,  # type: ignore[arg-type]
            num_running=max(0, status.num_legs - num_moving),
            num_parked=0 if is_decode else num_moving,
            num_receiving=num_moving if is_decode else 0,
            num_quarantined=status.num_blocks_quarantined,
            lease_ends_s=worker.lease_left_s(),
            left_s=self._deadline.remaining_s(),
            num_finished=tally.num_finished - before.num_finished,
            num_left=tally.num_left - before.num_left,
            num_preempted=tally.num_preempted - before.num_preempted,
            failed=dict(tally.failed - before.failed),
            num_cut=num_cut,
            is_withdrawn=is_withdrawn,
        )


def _counts(progress: DrainProgress) -> tuple[object, ...]:
    """What a line says but for the time that goes by."""
    return (
        progress.num_running,
        progress.num_parked,
        progress.num_receiving,
        progress.num_quarantined,
        progress.num_finished,
        progress.num_left,
        progress.num_preempted,
        progress.failed,
    )
