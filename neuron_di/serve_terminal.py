"""`neuron-di serve` as its user sees it: progress, where to send requests, the drain."""

import asyncio
import signal
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from neuron_di.config import ServeOptions
from neuron_di.obs import LaunchReport
from neuron_di.serve import Fleet


class LoadProgress:
    """A line per process, on standard error: loading, then ready."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/green]"),
            TextColumn("{task.fields[name]:<12}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TextColumn("{task.fields[words]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # a log file gets no empty lines for it
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_report(self, name: str, report: LaunchReport) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(
                name, total=None, name=name, words="loading"
            )
        task = self._tasks[name]
        if report.event == "loading":
            self._progress.update(task, completed=report.done_bytes, total=report.total_bytes)
        else:
            self._progress.update(task, completed=1, total=1, words=report.event)


async def serve_until_stopped(options: ServeOptions) -> int:
    """Serve until SIGINT or SIGTERM, then drain. 1 when a process ended by itself."""
    console = Console(stderr=True, soft_wrap=True)  # an address stays in one piece
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    with LoadProgress(console) as progress:
        fleet = Fleet(options, progress.on_report)
        starting = asyncio.create_task(fleet.__aenter__())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return 0
        starting.result()
    lost = asyncio.create_task(fleet.wait_lost())
    try:
        _say_ready(console, fleet)
        await asyncio.wait({lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            console.print(f"[red]{lost.result()} ended by itself; stopping[/red]")
            return 1
        console.print("draining: running requests finish, new ones are refused")
        return 0
    finally:
        for task in (lost, stopping):
            task.cancel()
        await fleet.__aexit__(None, None, None)


def _say_ready(console: Console, fleet: Fleet) -> None:
    workers = ", ".join(f"{name} (pid {pid})" for name, pid in fleet.pids().items())
    console.print(f"[green]serving[/green] {fleet.model_name} at [bold]{fleet.url}/v1[/bold]")
    console.print(f"  {workers}", highlight=False)
    console.print(
        f"  neuron-di status --url {fleet.url}      Ctrl-C drains and stops", highlight=False
    )
