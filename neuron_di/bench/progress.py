"""What is to be seen while a run goes on: a bar on a terminal, a line now and then elsewhere."""

import asyncio
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from neuron_di.bench.run import Run, View
from neuron_di.clock import now_s

LINE_INTERVAL_S = 5.0
DRAW_INTERVAL_S = 0.2


class RunProgress:
    """Draws a View on standard error while its block runs."""

    def __init__(self, console: Console, view: View) -> None:
        self._console = console
        self._view = view
        self._begun_s = now_s()
        self._task: asyncio.Task[None] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            auto_refresh=False,  # its thread would take time from the one that measures
        )

    async def __aenter__(self) -> Self:
        draw = self._draw if self._console.is_terminal else self._tell
        self._task = asyncio.create_task(draw())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self._bar.stop()

    async def _draw(self) -> None:
        self._bar.start()
        bar = self._bar.add_task(self._view.words, total=None, words="")
        while True:
            run = self._view.run
            words, total, done = "", None, 0
            if run is not None:
                words, total, done = counts(run, self._view), _total(run), run.num_over
            self._bar.update(
                bar, description=self._view.words, total=total, completed=done, words=words
            )
            self._bar.refresh()
            await asyncio.sleep(DRAW_INTERVAL_S)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(LINE_INTERVAL_S)
            run = self._view.run
            words = counts(run, self._view) if run is not None else ""
            elapsed_s = now_s() - self._begun_s
            self._console.print(f"{elapsed_s:4.0f} s  {self._view.words}  {words}", soft_wrap=True)


def counts(run: Run, view: View) -> str:
    """As in `120/400 over, 8 open, 2 failed`."""
    total = _total(run)
    over = f"{run.num_over:,}" if total is None else f"{run.num_over:,}/{total:,}"
    num_open = view.load.num_open if view.load is not None else 0
    num_failed = sum(
        num
        for measured in run.measured
        for ending, num in measured.counts.items()
        if ending not in ("ok", "interrupted")
    )
    failed = f", {num_failed:,} failed" if num_failed else ""
    return f"{over} over, {num_open:,} open{failed}"


def _total(run: Run) -> int | None:
    """None where time decides how many requests there will be."""
    is_open = run.plan.at_s is not None
    return run.num_planned if is_open or run.settings.duration_s is None else None
