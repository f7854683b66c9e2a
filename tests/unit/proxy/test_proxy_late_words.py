"""Words of links, answers and ends that come in an odd order. On virtual time."""

import asyncio

import msgspec
import pytest
from talking_worker import states, talking
from virtual_cluster import one_by_one
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerGone
from neuron_di_proxy.workers import process_of

ON_ITS_WAY_S = 0.3  # virtual seconds that an answer needs


async def question_open(cluster, worker, link):
    """Let the link be silent until the worker was asked, and its answer is on its way."""
    status, answered = worker.status, asyncio.Event()

    async def slow_status(timeout_s):
        answer = await status(timeout_s)
        answered.set()
        await asyncio.sleep(ON_ITS_WAY_S)
        return answer

    worker.status = slow_status
    link.is_silent = True
    await answered.wait()
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("what", ["draining", "down"])
@virtual
async def test_an_answer_that_is_older_than_a_word_does_not_undo_it(what):
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.3)
        await question_open(cluster, worker, link)
        if what == "draining":
            worker.record = msgspec.structs.replace(worker.record, state="draining")
        else:
            worker.says = {"has_failed": True}
        link.say()
        for _ in range(300):
            assert states(cluster)["d1"] == what
            await asyncio.sleep(0.01)
        assert [kind for kind, _ in lost] == ([PeerGone] if what == "down" else [])


@virtual
async def test_an_answer_that_is_younger_than_a_word_counts():
    async with talking() as (cluster, worker, link, _lost):
        await asyncio.sleep(20.3)
        link.is_silent = True
        worker.record = msgspec.structs.replace(worker.record, state="draining")
        await asyncio.sleep(3.0)
        assert states(cluster)["d1"] == "draining"


@virtual
async def test_a_crash_is_found_soon_after_a_link_that_ended_under_suspicion():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.3)
        link.say()
        cluster.health.blame(worker.record, PeerGone("the connection ended"))
        link.end()
        await asyncio.sleep(0.01)
        assert states(cluster)["d1"] == "up"  # it answered
        worker.kill()
        killed_s = now_s()
        await asyncio.sleep(3.0)
        [(kind, lost_s)] = lost
        assert kind is PeerGone
        assert lost_s - killed_s <= 0.52  # by the next question, as without a link


@pytest.mark.parametrize("why", ["blame", "loss", "end"])
@virtual
async def test_a_word_from_before_a_failure_is_not_trusted_after_it(why):
    async with talking() as (cluster, worker, link, _lost):
        await asyncio.sleep(20.3)
        link.say()
        link.is_silent = True
        if why == "blame":
            cluster.health.blame(worker.record, PeerGone("the connection ended"))
        elif why == "loss":
            worker.says = {"has_failed": True}
            link.say()
            worker.says = {}
        else:
            cluster.health.blame(worker.record, PeerGone("the connection ended"))
            link.say()
            link.end()
        async with asyncio.timeout(5.0):
            while states(cluster)["d1"] != "up":  # noqa: ASYNC110 - until it answers
                await asyncio.sleep(0.001)
        assert cluster.health.last_word(worker.record) is None
        num_asked = worker.num_asked
        await asyncio.sleep(0.6)
        assert worker.num_asked == num_asked + 1


@virtual
async def test_the_end_of_a_link_counts_whatever_is_thought_of_its_worker():
    async with talking() as (cluster, worker, link, _lost):
        await asyncio.sleep(20.3)
        watch = cluster.health._watches[process_of(worker.record)]
        for state in ("new", "up", "suspect", "frozen", "down"):
            watch.state, watch.heard_s = state, now_s()
            link.end()
            assert watch.heard_s < 0, state


class OneView:
    """A directory that gives the same object until it is changed, as the real ones do."""

    def __init__(self, *records):
        self.view = records

    def workers(self):
        return self.view


@virtual
async def test_a_look_that_failed_is_done_again():
    async with one_by_one() as cluster:
        first, second = (cluster.workers[name].record for name in ("p1", "d1"))
        health = cluster.health
        await asyncio.sleep(0.1)
        directory = health._directory = OneView(first)
        await asyncio.sleep(3.0)
        assert set(health._watches) == {process_of(first)}
        watch_of, num_failed = health._watch_of, 0

        def broken(record):
            nonlocal num_failed
            num_failed += 1
            raise RuntimeError("a bug")

        health._watch_of = broken
        directory.view = (second,)  # as many as before
        await asyncio.sleep(5.0)
        assert num_failed >= 3
        health._watch_of = watch_of
        await asyncio.sleep(3.0)
        assert set(health._watches) == {process_of(second)}
