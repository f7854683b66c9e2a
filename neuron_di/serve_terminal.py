"""`neuron-di serve` as its user sees it: progress, where to send requests, the drain."""

import asyncio
import io
import signal
import sys
from collections.abc import Coroutine
from functools import partial
from typing import IO, Any, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from neuron_di.config import ServeOptions
from neuron_di.obs import LaunchReport, get_logger
from neuron_di.obs.log_stream import LogStream
from neuron_di.obs.logging import LogFormat
from neuron_di.serve import Fleet
from neuron_di.stop_signals import stop_on_hangup
from neuron_di.terminal_text import printable

_log = get_logger(__name__)


class Terminal(Console):
    """Standard error. It may be a full disk, or a pipe or a terminal that nobody reads, for now or
    for ever: what serves goes on, and what is not taken is left out."""

    def __init__(self, file: TextIO | None = None) -> None:
        # An address stays in one piece, and a model's name is no markup.
        unwaiting = cast("IO[str]", _Unwaiting(file or sys.stderr))
        super().__init__(file=unwaiting, soft_wrap=True, markup=False, highlight=False)


class _Unwaiting(io.TextIOBase):
    """A file's text. To wait with it would be to stop the event loop."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._stream = LogStream(file)

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, text: str) -> int:
        self._stream.write_text(text)
        return len(text)


class _LogLines(io.TextIOBase):
    """Where standard error is a log of JSON: what reads that takes no other lines."""

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            _log.info("said", words=line)
        return len(text)


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
    """Serve until SIGINT, SIGTERM or SIGHUP, then drain; a second of the first two ends everything
    at once.

    Returns the exit code: 1 when the fleet could not go on, 130 when the drain was cut short.
    """
    console = _terminal(options.log.log_format)
    stop, stop_at_once = _signals()
    with LoadProgress(console) as progress:
        fleet = Fleet(options, progress.on_report, partial(_say, console))
        starting = asyncio.create_task(fleet.__aenter__())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return await _end(asyncio.wait({starting}), fleet, stop_at_once)
        starting.result()
    lost = asyncio.create_task(fleet.wait_lost())
    code = 0
    try:
        _say_ready(console, fleet)
        await asyncio.wait({lost, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            _log.error("fleet_lost", reason=lost.result())
            _say(console, f"{lost.result()}; stopping", "red")
            code = 1
        else:
            _say(console, "draining: running requests finish, new ones are refused")
    finally:
        for task in (lost, stopping):
            task.cancel()
        code = await _end(fleet.__aexit__(None, None, None), fleet, stop_at_once) or code
    return code


def _terminal(log_format: LogFormat) -> Terminal:
    return Terminal(cast("TextIO", _LogLines()) if log_format == "json" else None)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first signal to end, and by the second."""
    stop, stop_at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    stop_on_hangup(stop)
    return stop, stop_at_once


async def _end(ending: Coroutine[Any, Any, Any], fleet: Fleet, at_once: asyncio.Event) -> int:
    """Await the fleet's end, which a second signal hurries. Returns 130 then, otherwise 0."""
    end = asyncio.create_task(ending)
    hurry = asyncio.create_task(at_once.wait())
    await asyncio.wait({end, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if is_hurried := not end.done():
        fleet.kill()
    await end
    hurry.cancel()
    return 130 if is_hurried else 0


def _say(console: Console, words: str, style: str = "") -> None:
    console.print(words, style=style)


def _say_ready(console: Console, fleet: Fleet) -> None:
    workers = ", ".join(f"{name} (pid {pid})" for name, pid in fleet.pids().items())
    name = printable(fleet.model_name)
    url = (f"{fleet.url}/v1", "bold")
    console.print(Text.assemble(("serving", "green"), f" {name} at ", url))
    console.print(f"  {workers}")
    console.print(f"  neuron-di status --url {fleet.url}      Ctrl-C drains and stops")
