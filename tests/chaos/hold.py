"""Stops a process where it reaches a named sync point: see neuron_di/obs/sync_point.py."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Self


class Hold:
    """Armed while entered. The first process to come is held until `let_go`, or the exit.

    `folder` is the one that the process was started with. So many arrivals may pass before.
    """

    def __init__(self, folder: Path, name: str, *, passing: int = 0) -> None:
        self._fifo = folder / name
        self._go = folder / f"{name}.go"
        self._num_to_pass = passing
        self._come = asyncio.Event()
        self.pids: list[int] = []  # of all who came, and were held or passed

    @property
    def has_come(self) -> bool:
        return self._come.is_set()

    async def come(self, timeout_s: float) -> None:
        """Wait until the process has stopped here. TimeoutError when it does not come."""
        async with asyncio.timeout(timeout_s):
            await self._come.wait()

    def let_others_pass(self) -> None:
        """Hold on to those that have come, until the exit; whoever comes later passes."""
        self._fifo.unlink()
        self._go.unlink()

    def let_go(self) -> None:
        """Let it go on, and whoever comes later pass."""
        if self._arrivals < 0:
            return
        asyncio.get_running_loop().remove_reader(self._arrivals)
        self._fifo.unlink(missing_ok=True)
        self._go.unlink(missing_ok=True)
        for descriptor in (self._arrivals, self._permit):
            os.close(descriptor)  # the end of the fifo is the permit
        self._arrivals = -1

    def __enter__(self) -> Self:
        os.mkfifo(self._go)
        self._permit = os.open(self._go, os.O_RDWR | os.O_NONBLOCK)
        os.write(self._permit, b"." * self._num_to_pass)  # one for each
        os.mkfifo(self._fifo)
        self._arrivals = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        asyncio.get_running_loop().add_reader(self._arrivals, self._on_arrival)
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def _on_arrival(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.pids += [int(line) for line in os.read(self._arrivals, 4096).splitlines()]
            if len(self.pids) > self._num_to_pass:
                self._come.set()
