"""How many requests run at once, and whether new ones are taken."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from neuron_di.errors import CapacityError


class Admission:
    """Counts running requests. Owned by one event loop."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        self.num_admitted = 0
        self.is_draining = False

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold one place for as long as the block runs. Raises CapacityError when there is none."""
        if self.is_draining:
            raise CapacityError("the server is shutting down")
        if self.num_running >= self._requests_max:
            raise CapacityError(f"{self.num_running} requests are running, which is the limit")
        self.num_running += 1
        self.num_admitted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_running -= 1
            if self.num_running == 0:
                self._idle.set()

    def drain(self) -> None:
        """Take no new request from now on. Running ones go on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Return once no request is running."""
        await self._idle.wait()
