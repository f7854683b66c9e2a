"""One of several workers that does not start again ends nobody else."""

import asyncio
import sys

import pytest

from neuron_di.child import STARTS_REFUSED_MAX, Backoff
from neuron_di.clock import Deadline
from neuron_di.config import ServeOptions
from neuron_di.serve import Fleet

READY = """print('{"event": "ready"}', flush=True)"""
FAILED = """print('{"event": "failed", "message": "no memory"}', flush=True)"""
WAIT = "import signal; signal.pause()"
DEADLINE_S = 60.0


class Workers(Fleet):
    """Without a proxy. Each starts once; whoever is among `refusing` does not again."""

    def __init__(self, **counts: int) -> None:
        self.told: list[str] = []
        super().__init__(ServeOptions(model="m", **counts), tell=self.told.append)
        self.refusing: set[str] = set()
        self.by_name = {worker.name: worker for worker in self._workers}
        for worker in self._workers:
            worker._backoff = Backoff(0.001, 0.001)

    def _worker_command(self, index: int, name: str) -> list[str]:
        lines = (FAILED,) if name in self.refusing else (READY, WAIT)
        return [sys.executable, "-c", "\n".join(lines)]

    async def start(self) -> None:
        for worker in self._workers:
            await worker.start(Deadline.after(DEADLINE_S), lambda _name, _report: None)
        self._watches = [asyncio.create_task(self._keep_up(each)) for each in self._workers]

    async def refused(self, name: str, num: int) -> None:
        """It ends, and has refused so many starts."""
        self.refusing.add(name)
        self.by_name[name].kill()
        words = f"{name}: no memory; starting it again in 0.001 s"
        async with asyncio.timeout(DEADLINE_S):
            while self.told.count(words) < num:  # noqa: ASYNC110 - processes start meanwhile
                await asyncio.sleep(0.01)


@pytest.fixture
async def workers():
    fleet = Workers(prefill=1, decode=2)
    try:
        await fleet.start()
        yield fleet
    finally:
        fleet.kill()
        await asyncio.gather(*fleet._watches, return_exceptions=True)
        for worker in fleet._workers:
            await worker.gone()


async def test_while_another_has_its_role_it_is_tried_on(workers):
    await workers.refused("decode-1", STARTS_REFUSED_MAX + 1)
    workers.refusing.clear()
    async with asyncio.timeout(DEADLINE_S):
        while not workers.by_name["decode-1"].is_ready:  # noqa: ASYNC110 - a process starts
            await asyncio.sleep(0.01)


async def test_without_another_of_its_role_nothing_goes_on(workers):
    await workers.refused("decode-1", STARTS_REFUSED_MAX + 1)
    workers.by_name["decode-0"].kill()
    workers.refusing.add("decode-0")
    async with asyncio.timeout(DEADLINE_S):
        assert (await workers.wait_lost()).endswith(": no memory")


async def test_the_only_one_of_a_role_is_given_up(workers):
    await workers.refused("prefill-0", STARTS_REFUSED_MAX - 1)
    async with asyncio.timeout(DEADLINE_S):
        assert await workers.wait_lost() == "prefill-0: no memory"
