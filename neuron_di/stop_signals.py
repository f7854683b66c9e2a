"""When a process is told to end: once to drain, by Ctrl-C once more to end at once."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

HURRIED_CODE = 130


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`. SIGINT after that ends the process as a kill does.

    What a killed process leaves behind is given back by others, or the system, here too. SIGTERM
    may come several times: whoever sends it to a group of processes sends it to each once more.
    """
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if stop.is_set():
            os._exit(HURRIED_CODE)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    stop_on_hangup(stop)


def stop_on_hangup(stop: asyncio.Event) -> None:
    """SIGHUP sets `stop`, however often it comes: the terminal was closed, or its connection lost.

    Not in a process that was started to outlive its terminal, as by nohup, where it is ignored.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.set)


def end_by_sigterm_while_starting() -> None:
    """Let SIGTERM end this process until it drains by it, also where it is a container's first.

    The system ends such a process by no signal that it has no handler for: one that still loads
    would go on, serve, and be killed with its requests when whoever stops it has waited enough.
    """
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


@contextmanager
def raising_on(*signals: signal.Signals) -> Iterator[None]:
    """Meanwhile each of these raises SystemExit, with what a shell makes of it, as Ctrl-C raises:
    so what was begun is ended in order. One that is ignored stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # others may set no handlers
        for number in signals:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
