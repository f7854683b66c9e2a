"""What a worker says of itself by its leg links, unasked: to whom, how often, and at what cost."""

import asyncio

import pytest
from link_kit import WAIT_S, CountingTransport, LinkServer, RawLink, make_status, next_status

from neuron_di.wire.leg_link import MAGIC
from neuron_di.worker import leg_link_server
from neuron_di.worker.server import listening


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 0.01)


class Saying:
    """How a worker is, and how often it was asked."""

    def __init__(self):
        self.num_asked = 0
        self.now = make_status()

    def __call__(self):
        self.num_asked += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


async def test_a_link_hears_how_the_worker_is_once_it_is_greeted_and_when_that_changes():
    saying = Saying()
    async with LinkServer(status=saying) as server:
        async with RawLink(server.port) as link, RawLink(server.port) as other:
            for each in (link, other):
                assert await next_status(each) == saying.now
            saying.now = make_status(num_running=7, has_failed=True)
            num_asked = saying.num_asked
            server.server.say_status()
            assert saying.num_asked == num_asked + 1  # for both
            for each in (link, other):
                assert await next_status(each) == saying.now
        async with RawLink(server.port, greeting=MAGIC[:4]) as silent:
            async with asyncio.timeout(WAIT_S):
                while not any(not each._is_greeted for each in server.server.links):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            server.server.say_status()
            silent.writer.write(MAGIC[4:])  # the first word is the one that follows the greeting
            saying.now = make_status(num_running=8)
            assert await next_status(silent) == saying.now


async def test_all_links_are_told_by_one_timer_and_none_runs_without_links(hurried):
    saying = Saying()
    async with LinkServer(status=saying) as server:
        assert server.server._looking is None
        async with RawLink(server.port) as link, RawLink(server.port) as other:
            for each in (link, other):
                await next_status(each)
            num_asked, num_heard = saying.num_asked, 0
            for number in range(1, 9):
                saying.now = make_status(num_steps=number)
                while (await next_status(link)).num_steps < number:
                    num_heard += 1
                num_heard += 1
                while (await next_status(other)).num_steps < number:
                    pass
            assert num_heard >= 8
            assert saying.num_asked - num_asked <= num_heard + 1  # and not twice that
        async with asyncio.timeout(WAIT_S):
            while server.server.links:  # noqa: ASYNC110 - until it has noticed
                await asyncio.sleep(0)
        assert server.server._looking is None


async def test_the_timer_ends_with_the_last_link():
    async with (
        LinkServer(status=Saying()) as server,
        RawLink(server.port) as link,
        RawLink(server.port) as other,
    ):
        for each in (link, other):
            await next_status(each)
        looking = server.server._looking
        first, last = server.server.links
        first.close()
        assert not looking.cancelled()
        last.close()
        assert looking.cancelled()


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), make_status(num_running=object())])
async def test_a_worker_that_cannot_say_how_it_is_still_lives(hurried, bug):
    saying = Saying()
    saying.now = bug
    async with LinkServer(status=saying) as server, RawLink(server.port) as link:
        for _ in range(3):
            told = await link.next_frame()
            assert (told.tokens, told.events, told.status) == ([], [], None)
        saying.now = make_status()
        assert await next_status(link) == saying.now


async def test_a_proxy_that_does_not_read_is_told_nothing_more():
    saying = Saying()
    async with LinkServer(status=saying) as server, RawLink(server.port) as link:
        await next_status(link)
        (at_worker,) = server.server.links
        counting = at_worker._transport = CountingTransport(at_worker._transport)
        server.server.say_status()
        assert counting.num_writes == 1
        at_worker.pause_writing()
        server.server.say_status()
        assert counting.num_writes == 1
        at_worker.resume_writing()
        server.server.say_status()
        assert counting.num_writes == 2


async def test_a_worker_whose_port_is_closed_tells_nobody(workers, monkeypatch):
    told = []
    monkeypatch.setattr(
        leg_link_server.LegLinkServer, "say_status", lambda links: told.append(links)
    )
    worker = workers.start("both")
    before = asyncio.all_tasks()
    async with listening(worker, "127.0.0.1", 0) as port, RawLink(port) as link:
        await next_status(link)
        worker.set_state("draining")
        assert len(told) == 1
    assert asyncio.all_tasks() <= before  # nobody waits for its failure either
    worker.set_state("ready")
    assert len(told) == 1
