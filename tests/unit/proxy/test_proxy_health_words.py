"""Who lives when workers say so by their links, beside being asked. On virtual time.

The default limits: a word each second, probes each 0.5 s without them, frozen after 2.5 s.
"""

import asyncio
import logging

import msgspec
import pytest
from scripted_worker import make_record
from talking_worker import Link, Losses, states, talking, word_of
from virtual_cluster import one_by_one, two_by_two
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.obs.limited_logger import LINES_MAX
from neuron_di.types import Incarnation
from neuron_di.wire.leg_link import ALIVE_INTERVAL_S
from neuron_di_proxy.worker_client import WorkerClient
from neuron_di_proxy.workers import TalkingWorkers


@virtual
async def test_a_worker_that_talks_is_not_asked():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(1.0)
        num_asked, beside = worker.num_asked, cluster.workers["p1"].num_asked
        worker.says = {"num_running": 5}
        await asyncio.sleep(600.0)
        assert worker.num_asked == num_asked
        assert cluster.workers["p1"].num_asked >= beside + 1000  # which says nothing by itself
        assert link.num_words >= 600
        assert lost == []
        (report,) = (r for r in cluster.health.reports() if r.record == worker.record)
        assert (report.state, report.status.num_running) == ("up", 5)


@pytest.mark.parametrize("phase_s", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999])
@virtual
async def test_a_frozen_worker_that_talked_is_found_as_soon_as_one_that_was_asked(phase_s):
    async with talking() as (cluster, worker, _link, lost):
        await asyncio.sleep(10.0 + phase_s)
        worker.freeze()
        frozen_s = now_s()
        await asyncio.sleep(5.0)
        [(kind, lost_s)] = lost
        assert kind is PeerTimeout
        assert 1.5 <= lost_s - frozen_s <= 2.55
        assert states(cluster)["d1"] == "frozen"
        worker.thaw()
        await asyncio.sleep(2.0)
        assert states(cluster)["d1"] == "up"
        num_asked = worker.num_asked
        await asyncio.sleep(60.0)
        assert worker.num_asked == num_asked  # and talks again


@virtual
async def test_little_patience_is_kept_although_words_come_more_rarely():
    limits = {"freeze_timeout_s": 1.0, "probe_interval_s": 0.2}
    async with talking(**limits) as (cluster, worker, _link, lost):
        assert cluster.health._trust_s == 0.5  # half of its time is left for a question
        await asyncio.sleep(10.3)
        assert lost == []
        worker.freeze()
        frozen_s = now_s()
        await asyncio.sleep(3.0)
        assert [kind for kind, _ in lost] == [PeerTimeout]
        assert lost[0][1] - frozen_s <= 1.05


@virtual
async def test_a_short_freeze_is_no_matter():
    async with talking() as (_cluster, worker, _link, lost):
        for phase in range(5):
            await asyncio.sleep(3.0 + 0.2 * phase)
            worker.freeze()
            await asyncio.sleep(1.0)
            worker.thaw()
        assert lost == []


@virtual
async def test_a_link_that_falls_silent_is_replaced_by_questions():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.0)
        num_asked = worker.num_asked
        link.is_silent = True
        await asyncio.sleep(10.0)
        assert worker.num_asked - num_asked in range(17, 21)  # each 0.5 s, but for the first
        assert lost == []
        assert states(cluster)["d1"] == "up"
        link.is_silent = False
        await asyncio.sleep(2.0)
        num_asked = worker.num_asked
        await asyncio.sleep(60.0)
        assert worker.num_asked == num_asked


@virtual
async def test_the_end_of_a_link_has_the_worker_asked_at_once():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.0)
        num_asked = worker.num_asked
        link.end()
        await asyncio.sleep(0.01)
        assert worker.num_asked == num_asked + 1
        assert lost == []  # one broken connection is no crash
        assert states(cluster)["d1"] == "up"


@virtual
async def test_links_that_end_again_and_again_have_it_asked_no_more_often_than_without():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.0)
        link._task.cancel()
        num_asked = worker.num_asked
        for _ in range(1000):
            link.say()
            cluster.health.note_word(worker.record, None)
            await asyncio.sleep(0.01)
        assert worker.num_asked - num_asked in range(19, 22)  # in 10 s
        assert lost == []


@virtual
async def test_a_crash_is_found_by_the_end_of_the_link():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.3)
        worker.kill()
        killed_s = now_s()
        link.end()
        await asyncio.sleep(1.0)
        [(kind, lost_s)] = lost
        assert kind is PeerGone
        assert lost_s - killed_s <= 0.01
        assert states(cluster)["d1"] == "down"


@pytest.mark.parametrize("says", ["failed", "restart"])
@virtual
async def test_what_a_link_tells_of_another_or_a_failed_process_ends_its_legs_at_once(says):
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.3)
        told_s = now_s()
        if says == "failed":
            worker.says = {"has_failed": True}
            link.say()
        else:
            life = Incarnation("another")
            worker.record = msgspec.structs.replace(worker.record, incarnation=life)
            link.say()
        assert lost == [(PeerGone, told_s)]
        assert states(cluster)["d1"] == "down"
        assert cluster.health.last_word(link.record) is None
        await asyncio.sleep(5.0)
        assert states(cluster)["d1"] == "down"
        assert len(lost) == 1


@virtual
async def test_a_word_that_it_drains_counts_at_once():
    async with talking() as (cluster, worker, link, lost):
        await asyncio.sleep(20.3)
        worker.record = msgspec.structs.replace(worker.record, state="draining")
        link.say()
        assert states(cluster)["d1"] == "draining"
        assert not cluster.health.is_usable(worker.record)
        assert lost == []


@virtual
async def test_a_word_lifts_no_suspicion_an_answer_does():
    async with talking() as (cluster, worker, link, _lost):
        await asyncio.sleep(20.3)
        num_asked = worker.num_asked
        worker.freeze()
        cluster.health.blame(worker.record, PeerGone("the connection ended"))
        for _ in range(3):
            link.say()  # was on its way
            await asyncio.sleep(0.1)
            assert states(cluster)["d1"] == "suspect"
        assert worker.num_asked == num_asked + 1
        worker.thaw()
        await asyncio.sleep(0.01)
        assert states(cluster)["d1"] == "up"
        worker.freeze()
        await asyncio.sleep(5.0)
        link.say()
        assert states(cluster)["d1"] == "frozen"
        worker.kill()
        worker.thaw()
        await asyncio.sleep(3.0)
        link.say()
        assert states(cluster)["d1"] == "down"


@virtual
async def test_time_in_which_the_proxy_itself_was_stopped_is_no_silence_of_one_that_talks():
    async with two_by_two() as cluster:
        decode, lost = cluster.workers["d1"], Losses()
        status = decode.status

        async def slow_status(timeout_s):
            await asyncio.sleep(0.35)
            return await status(timeout_s)

        decode.status = slow_status
        with cluster.health.watching(decode.record, lost):
            await asyncio.sleep(1.0)
            link = Link(cluster, decode)
            for phase in range(40):
                await asyncio.sleep(2.0 + 0.025 * phase)
                asyncio.get_running_loop().now_s += 60.0  # as after SIGSTOP and SIGCONT
            await asyncio.sleep(5.0)
            assert lost == []
            assert set(states(cluster).values()) == {"up"}
            decode.freeze()  # and silence is found all the same
            await asyncio.sleep(3.0)
            assert [kind for kind, _ in lost] == [PeerTimeout]
            link._task.cancel()


@virtual
async def test_words_of_processes_that_nobody_watches_are_nothing():
    async with talking() as (cluster, worker, _link, _lost):
        other = make_record("d9", "decode")
        cluster.health.note_word(other, word_of(worker, record=other))
        cluster.health.note_word(other, None)
        assert set(states(cluster)) == {"p1", "d1"}
        assert len(cluster.health._watches) == 2


@virtual
async def test_what_a_worker_said_is_known_while_it_is_fresh():
    async with talking() as (cluster, worker, link, _lost):
        await asyncio.sleep(1.0)
        worker.says = {"num_running": 3}
        link.say()
        link.is_silent = True
        word = cluster.health.last_word(worker.record)
        assert (word.record, word.num_running) == (worker.record, 3)
        assert cluster.health.last_word(cluster.workers["p1"].record) is None  # was asked
        await asyncio.sleep(1.1 * ALIVE_INTERVAL_S)
        assert cluster.health.last_word(worker.record) is not None
        await asyncio.sleep(1.0 * ALIVE_INTERVAL_S)
        assert cluster.health.last_word(worker.record) is None
        link.say()
        cluster.health.note_word(worker.record, None)
        assert cluster.health.last_word(worker.record) is None


@virtual
async def test_nothing_rings_for_workers_that_are_forgotten_or_after_the_end():
    async with one_by_one() as cluster:
        worker = cluster.workers["d1"]
        await asyncio.sleep(1.0)
        watches = list(cluster.health._watches.values())
        assert all(watch.alarm is not None for watch in watches)
        cluster.directory.records = [cluster.workers["p1"].record]
        await asyncio.sleep(2.0)
        assert [watch.alarm is not None for watch in watches] == [True, False]
        cluster.health.note_word(worker.record, word_of(worker))  # its link is still there
        assert len(cluster.health._watches) == 1
    assert [watch.alarm for watch in watches] == [None, None]


def test_the_real_clients_are_those_that_are_listened_to():
    assert issubclass(WorkerClient, TalkingWorkers)


@virtual
async def test_a_worker_that_cannot_make_up_its_mind_does_not_fill_the_log(caplog):
    caplog.set_level(logging.INFO)
    async with talking() as (cluster, worker, _link, _lost):
        await asyncio.sleep(10.0)
        caplog.clear()
        for number in range(1000):
            state = "ready" if number % 2 else "draining"
            record = msgspec.structs.replace(worker.record, state=state)
            cluster.health.note_word(worker.record, word_of(worker, record=record))
        for event in ("worker_up", "worker_draining"):
            said = [record for record in caplog.records if record.message == event]
            assert 1 <= len(said) <= LINES_MAX
        assert states(cluster)["d1"] == "up"
