"""Work that a bug ends is begun again, and says so."""

import asyncio
import itertools
import logging

from neuron_di.registry import EmbeddedRegistry, RegistryServer, Supervised
from neuron_di.registry.supervised import RESTART_S_MAX, SHOWN_S
from neuron_di.testing.virtual_loop import VirtualLoop


def test_it_is_begun_again_ever_more_slowly_and_at_once_after_a_good_while():
    async def run():
        loop = asyncio.get_running_loop()
        begun_s = []

        async def work():
            begun_s.append(loop.time())
            if len(begun_s) == 12:
                await asyncio.sleep(10 * RESTART_S_MAX)
            raise ValueError("a secret prompt")

        async with Supervised("work", work) as supervised:
            await asyncio.sleep(1000)
            assert supervised.trouble() == "the work failed (ValueError) and was begun again"
            assert supervised.num_failures == len(begun_s) > 13
        gaps_s = [after - before for before, after in itertools.pairwise(begun_s)]
        assert gaps_s[:4] == [0.5, 1.0, 2.0, 4.0]
        assert gaps_s[10] == RESTART_S_MAX
        assert gaps_s[11] == 10 * RESTART_S_MAX + 0.5

    _run_virtually(run())


def test_an_end_is_a_failure_and_trouble_that_is_over_is_forgotten():
    async def run():
        ends = [None]

        async def work():
            if ends:
                ends.pop()
                return
            await asyncio.Event().wait()

        async with Supervised("work", work) as supervised:
            assert supervised.trouble() == ""
            await asyncio.sleep(1)
            assert "it ended" in supervised.trouble()
            await asyncio.sleep(SHOWN_S)
            assert supervised.trouble() == ""
            assert len(asyncio.all_tasks()) == 2
        assert len(asyncio.all_tasks()) == 1

    _run_virtually(run())


async def test_a_registrys_server_that_fails_serves_again_and_its_registry_says_so(registry):
    class Broken(EmbeddedRegistry):
        def expire(self):
            raise KeyError("a bug")

    broken = Broken()
    async with RegistryServer(broken, "tcp://127.0.0.1:0"):
        async with asyncio.timeout(30):
            while not broken.trouble():  # noqa: ASYNC110 - after the first sweep
                await asyncio.sleep(0.05)
        assert broken.trouble() == ("the registry's sweeper failed (KeyError) and was begun again")
    assert registry.trouble() == ""


def _run_virtually(scenario):
    loop = VirtualLoop(callbacks_max=10**5)
    try:
        loop.run_until_complete(scenario)
    finally:
        loop.close()
        logging.disable(logging.NOTSET)
