"""Health over real sockets: a worker whose link tells how it is, is not asked over HTTP."""

import asyncio

import pytest
from leg_ear import MESSAGE
from running_proxy import ListDirectory
from scripted_worker import ScriptedWorker, finished

from neuron_di.config import LimitOptions
from neuron_di.errors import PeerGone
from neuron_di.worker import leg_link_server
from neuron_di_proxy import health as health_module
from neuron_di_proxy.health import Health
from neuron_di_proxy.worker_client import WorkerClient

WAIT_S = 30.0


class Heard:
    """Counts the words of a client's workers on their way to Health."""

    def __init__(self, client, health):
        self.num_words = self.num_ends = 0
        self._health = health
        client.on_word(self)

    def __call__(self, record, status):
        if status is None:
            self.num_ends += 1
        else:
            self.num_words += 1
        self._health.note_word(record, status)

    async def until_words(self, num_more):
        end = self.num_words + num_more
        async with asyncio.timeout(WAIT_S):
            while self.num_words < end:  # noqa: ASYNC110 - until they have come
                await asyncio.sleep(0.005)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - until it is so
            await asyncio.sleep(0.005)


@pytest.fixture
def hurried(monkeypatch):
    """Words come often, and are trusted for as long as a test may take."""
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 0.02)
    monkeypatch.setattr(health_module, "ALIVE_INTERVAL_S", 1000.0)


async def watched(stack, worker, **limits):
    limits = LimitOptions(probe_interval_s=0.05, **limits)
    client = await stack.enter_async_context(WorkerClient(limits))
    directory = ListDirectory([worker.record])
    health = Health(client, directory, limits)
    heard = Heard(client, health)
    await stack.enter_async_context(health)
    return health, heard


def state(health):
    return health.reports()[0].state


async def test_while_its_link_tells_how_it_is_a_worker_is_asked_once(stack, hurried):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await heard.until_words(10)  # without any leg
    assert len(worker.links) == 1
    num_asked = worker.num_asked
    worker.says = {"num_running": 9}
    await heard.until_words(10)
    assert worker.num_asked == num_asked
    assert health.reports()[0].status.num_running == 9
    assert state(health) == "up"
    worker.says = {"has_failed": True}
    worker._link_server.say_status()
    await until(lambda: state(health) == "down")


async def test_a_link_that_is_lost_is_made_again_by_the_next_answer(stack, hurried):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await heard.until_words(3)
    num_asked = worker.num_asked
    for number in range(1, 4):
        worker.hang_up()
        await until(lambda number=number: heard.num_ends == number)
        await heard.until_words(2)
        assert len(worker.links) == 1
        assert state(health) == "up"
        assert worker.num_asked in range(num_asked + number, num_asked + number + 2)


async def test_a_link_that_falls_silent_is_replaced_by_questions(stack, monkeypatch):
    monkeypatch.setattr(leg_link_server, "ALIVE_INTERVAL_S", 0.02)
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    health, heard = await watched(stack, worker, freeze_timeout_s=1.5)
    await heard.until_words(5)
    worker.talks = False
    (link,) = worker.links
    num_asked, num_words = worker.num_asked, heard.num_words
    await until(lambda: worker.num_asked >= num_asked + 5)
    assert heard.num_words <= num_words + 1  # what was on its way
    assert worker.links == [link]
    worker.freeze()
    await until(lambda: state(health) == "frozen")
    worker.talks = True
    worker.thaw()
    await until(lambda: state(health) == "up")
    await heard.until_words(2)


async def test_a_worker_that_never_says_how_it_is_is_asked(stack, hurried):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode"))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await until(lambda: worker.num_asked >= 5)
    assert heard.num_words == 0
    assert len(worker.links) == 1
    assert state(health) == "up"


async def test_a_link_ends_when_another_process_speaks_there(stack, hurried):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await heard.until_words(3)
    heard_errors = []
    leg = health._workers.open_leg(worker.record, "decode", MESSAGE)
    leg.open(heard_errors.append)
    await worker.next_leg()
    worker.restart()
    await until(lambda: not worker.links)
    await until(lambda: heard.num_ends == 1)
    assert [type(error) for error in heard_errors] == [PeerGone]
    assert "another process" in heard_errors[0].message
    assert state(health) == "down"
    num_asked = worker.num_asked
    await until(lambda: worker.num_asked >= num_asked + 3)
    assert (worker.links, health._workers._links) == ([], {})


@pytest.mark.parametrize("talks", [True, False])
async def test_the_link_of_a_worker_that_nobody_watches_any_more_is_ended(stack, hurried, talks):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=talks))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await until(lambda: worker.links)
    health._directory.records = []
    await until(lambda: not worker.links)
    assert (heard.num_ends, health._watches, health._workers._links) == (1, {}, {})
    health._directory.records = [worker.record]
    await until(lambda: len(worker.links) == 1 and state(health) == "up")


async def test_it_is_ended_once_its_last_leg_is_over(stack, hurried):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    health, heard = await watched(stack, worker, freeze_timeout_s=2000.0)
    await heard.until_words(3)
    heard_events = []
    health._workers.open_leg(worker.record, "decode", MESSAGE).open(heard_events.append)
    at_worker = await worker.next_leg()
    health._directory.records = []
    await until(lambda: not health._watches)
    await heard.until_words(5)
    assert len(worker.links) == 1
    assert not at_worker.closed.is_set()
    await at_worker.send(finished(1))
    await until(lambda: not worker.links)
    assert heard_events == [finished(1)]  # and nothing of the link's end
    assert health._workers._links == {}


async def test_an_answer_of_another_process_makes_no_link(stack):
    worker = await stack.enter_async_context(ScriptedWorker("d1", "decode", talks=True))
    client = await stack.enter_async_context(WorkerClient(LimitOptions()))
    client.on_word(lambda *_: None)
    former = worker.record
    worker.restart()
    status = await client.status(former)
    assert status.record == worker.record
    assert client._links == {}
    await client.status(worker.record)
    await until(lambda: len(worker.links) == 1)
