"""What the legs of one attempt say, in the order it arrives."""

import asyncio
from typing import Literal, NamedTuple

from neuron_di.errors import NeuronDiError
from neuron_di.wire import Finished, Released
from neuron_di_proxy.workers import Leg, Progress

UNREAD_MAX = 16  # events; then legs are not read, and workers feel it

Side = Literal["prefill", "decode", "whole"]


class Heard(NamedTuple):
    """One event of a leg, or what ended the leg instead of one."""

    side: Side
    said: Progress | Exception


class Inbox:
    """Reads each leg in a task of its own, until the leg ends or `close`."""

    def __init__(self) -> None:
        self._unread: asyncio.Queue[Heard] = asyncio.Queue(UNREAD_MAX)
        self._readers: dict[Side, asyncio.Task[None]] = {}
        self._others: list[asyncio.Task[None]] = []
        self._resumed = asyncio.Event()

    def read(self, side: Side, leg: Leg, *, pause: bool = False) -> None:
        """Open a leg and read it. With `pause`, only its first event until `resume`."""
        self._readers[side] = asyncio.create_task(self._read(side, leg, pause=pause))

    def resume(self) -> None:
        """Read on where a leg was to pause."""
        self._resumed.set()

    def lose(self, side: Side, error: NeuronDiError) -> None:
        """End a leg that may never say anything again, as if it had ended with `error`."""
        if self._readers[side].done():
            return
        self._readers[side].cancel()
        self._others.append(asyncio.create_task(self._unread.put(Heard(side, error))))

    async def next(self, wait_s: float) -> Heard:
        """The next event of any leg. Raises TimeoutError when none comes within `wait_s`."""
        try:
            return self._unread.get_nowait()
        except asyncio.QueueEmpty:
            async with asyncio.timeout(wait_s):
                return await self._unread.get()

    async def close(self) -> None:
        """Stop reading. Every task is cancelled before this waits for any."""
        tasks = [*self._readers.values(), *self._others]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, side: Side, leg: Leg, *, pause: bool) -> None:
        said: Progress | Exception
        while True:
            try:
                said = await leg.next()
            except Exception as error:
                said = error
            await self._unread.put(Heard(side, said))
            if isinstance(said, Exception | Finished | Released):
                return
            if pause:
                await self._resumed.wait()
