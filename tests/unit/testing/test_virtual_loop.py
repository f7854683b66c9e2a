import asyncio

import pytest

from neuron_di.clock import now_s
from neuron_di.testing.virtual_loop import LoopOverrun, Process, VirtualLoop, silenced, this_process


@pytest.fixture
def loop():
    with silenced():
        loop = VirtualLoop()
        yield loop
        loop.close()


def test_time_jumps_to_the_next_timer(loop):
    seen = []

    async def sleeper(duration_s):
        await asyncio.sleep(duration_s)
        seen.append((duration_s, now_s()))

    async def main():
        await asyncio.gather(sleeper(3600.0), sleeper(1.0), sleeper(0.0))

    loop.run_until_complete(main())
    assert seen == [(0.0, 0.0), (1.0, 1.0), (3600.0, 3600.0)]


def test_a_timeout_is_virtual(loop):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await loop.create_future()
        return now_s()

    assert loop.run_until_complete(main()) == 30.0


def test_a_cancelled_timer_does_not_let_time_pass(loop):
    async def main():
        loop.call_later(1000.0, lambda: None).cancel()
        await asyncio.sleep(1.0)
        return now_s()

    assert loop.run_until_complete(main()) == 1.0


def test_a_function_for_the_executor_takes_the_time_that_is_drawn():
    with silenced():
        loop = VirtualLoop(executor_delay_s=lambda: 0.25)

        async def main():
            return await loop.run_in_executor(None, max, 1, 2), now_s()

        assert loop.run_until_complete(main()) == (2, 0.25)
        loop.close()


class Worker:
    """A process that counts seconds, and says when its code was unwound."""

    def __init__(self, loop):
        self.process = Process(loop, "worker")
        self.ticks = []
        self.unwound = []
        self.process.start(self._run())

    async def _run(self):
        try:
            while True:
                await asyncio.sleep(1.0)
                assert this_process() is self.process
                self.ticks.append(now_s())
        finally:
            self.unwound.append(now_s())


def test_a_killed_process_runs_nothing_more(loop):
    worker = Worker(loop)

    async def main():
        await asyncio.sleep(2.5)
        worker.process.kill()
        await asyncio.sleep(5.0)

    loop.run_until_complete(main())
    assert worker.ticks == [1.0, 2.0]
    assert worker.unwound == []


def test_a_frozen_process_runs_what_was_due_when_it_is_thawed(loop):
    worker = Worker(loop)

    async def main():
        await asyncio.sleep(1.5)
        worker.process.freeze()
        await asyncio.sleep(10.0)
        assert worker.ticks == [1.0]
        worker.process.thaw()
        await asyncio.sleep(1.1)

    loop.run_until_complete(main())
    assert worker.ticks == [1.0, 11.5, 12.5]
    assert worker.unwound == []


def test_tasks_that_a_process_starts_belong_to_it(loop):
    process = Process(loop, "worker")
    seen = []

    async def child():
        await asyncio.sleep(1.0)
        seen.append("child")

    async def parent():
        task = asyncio.create_task(child())
        await loop.run_in_executor(None, seen.append, "parent")
        await task

    async def main():
        process.start(parent())
        await asyncio.sleep(0.5)
        assert len(loop.pending_tasks(process)) == 2
        process.kill()
        await asyncio.sleep(5.0)

    loop.run_until_complete(main())
    assert seen == ["parent"]


async def numbers(closed):
    try:
        for number in range(10):
            yield number
    finally:
        await asyncio.sleep(0)  # as a generator of a living process may
        closed.append(True)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_dropped_generator_is_closed_if_its_process_lives(loop, is_killed):
    process = Process(loop, "worker")
    closed = []
    kept = []

    async def begin():
        kept.append(numbers(closed))
        await anext(kept[0])

    async def main():
        process.start(begin())
        await asyncio.sleep(1.0)
        if is_killed:
            process.kill()
        kept.clear()
        await asyncio.sleep(1.0)

    loop.run_until_complete(main())
    assert closed == ([] if is_killed else [True])


def test_what_nobody_heard_of_is_kept_as_an_error(loop):
    async def main():
        loop.call_soon(lambda: 1 / 0)
        await asyncio.sleep(1.0)

    loop.run_until_complete(main())
    assert len(loop.errors) == 1
    assert "ZeroDivisionError" in loop.errors[0]


def test_going_round_in_circles_ends():
    async def again():
        await asyncio.sleep(0)
        asyncio.create_task(again())  # noqa: RUF006 - the loop keeps it

    async def main():
        await again()
        await asyncio.sleep(1.0)

    with silenced():
        loop = VirtualLoop(callbacks_max=1000)
        with pytest.raises(LoopOverrun):
            loop.run_until_complete(main())
        loop.close()
