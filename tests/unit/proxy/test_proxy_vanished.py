"""A vanished key is no death, and a present key no life: the proxy over a registry's directory.

Virtual time, real directory, health, routing and recovery; workers of memory.
"""

import asyncio
import itertools
from contextlib import asynccontextmanager

import msgspec
import pytest
from virtual_cluster import VirtualCluster, VirtualWorker
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.errors import PeerGone
from neuron_di.registry import Directory
from neuron_di.testing.sim_registry import AnyAddress, SimRegistry
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import encode_json
from neuron_di_proxy.admission import Admission
from neuron_di_proxy.status import report_health, report_status
from neuron_di_proxy.workers import place_of

TTL_S = 10.0


class Announced(VirtualCluster):
    """Workers that announce themselves as real ones do. Asked by their address, not their name."""

    def __init__(self, *workers, **limits):
        self.registry = SimRegistry()
        self.leases = {}
        self.beats = {}
        directory = Directory(self.registry, addresses=AnyAddress())
        super().__init__(*workers, directory=directory, **limits)

    async def __aenter__(self):
        await self.directory.__aenter__()
        for worker in self.workers.values():
            await self.announce(worker)
        self._sweeping = asyncio.create_task(self._sweep())
        return await super().__aenter__()

    async def __aexit__(self, *_):
        for task in (self._sweeping, *self.beats.values()):
            task.cancel()
        await super().__aexit__()
        await self.directory.__aexit__(None, None, None)

    async def announce(self, worker):
        """Now, and as often as the registry forgets it, for as long as the worker runs."""
        key = worker.record.worker_id, worker.record.incarnation
        self.leases[key] = await self.put(worker.record)
        self.beats[key] = asyncio.create_task(self._beat(worker, key))

    async def put(self, record):
        lease = await self.registry.grant(TTL_S)
        await self.registry.put(record.key(), encode_json(record), lease)
        return lease

    async def _beat(self, worker, key):
        while True:
            await asyncio.sleep(TTL_S / 3)
            await worker.thawed.wait()
            is_same = (worker.record.worker_id, worker.record.incarnation) == key
            if worker.is_gone or not is_same:
                return
            if self.registry.is_away:
                continue
            if await self.registry.keep_alive(self.leases[key]) <= 0:
                self.leases[key] = await self.put(worker.record)

    async def _sweep(self):
        while True:
            await asyncio.sleep(0.5)
            self.registry.expire()

    async def status(self, record, timeout_s=1.0):
        for worker in self.workers.values():
            if place_of(worker.record) == place_of(record) and not worker.is_gone:
                return await worker.status(timeout_s)
        await asyncio.sleep(0.001)
        raise PeerGone(f"worker {record.worker_id} is gone")

    def states(self):
        return {r.record.worker_id: r.state for r in self.health.reports()}

    def health_answer(self):
        return report_health(self.router, self.health, self.pairs)

    async def report(self):
        admission = Admission(self.limits, lambda: 1)
        return await report_status(admission, self, self.health, self.pairs)


def two_by_two(**limits):
    return Announced(
        *(VirtualWorker(name, "prefill") for name in ("p1", "p2")),
        *(VirtualWorker(name, "decode") for name in ("d1", "d2")),
        **limits,
    )


@asynccontextmanager
async def loaded(cluster, interval_s=0.05):
    """A request each so many seconds. All of them complete, in the end."""
    asked, tasks = [], []

    async def ask_often():
        while True:
            asked.append(cluster.request())
            tasks.append(asyncio.create_task(cluster.ask(asked[-1])))
            await asyncio.sleep(interval_s)

    asking = asyncio.create_task(ask_often())
    await asyncio.sleep(1.0)
    yield asked
    asking.cancel()
    await asyncio.gather(*tasks)
    assert [each.error for each in asked if not each.is_complete] == []


def begun_at(cluster, worker_id):
    """How many legs a worker was given so far."""
    return sum(leg.worker_id == worker_id for leg in cluster.legs)


@virtual
async def test_a_wiped_registry_costs_no_request_and_the_view_converges():
    async with two_by_two() as cluster, loaded(cluster) as asked:
        known = cluster.directory.workers()
        for lease in cluster.leases.values():
            await cluster.registry.revoke(lease)
        await asyncio.sleep(0.5)
        assert cluster.directory.workers() == known
        assert set(cluster.states().values()) == {"vanished"}
        assert cluster.health_answer().status == "ok"
        assert all(not each.reason for each in cluster.health.reports())
        await asyncio.sleep(TTL_S)
        assert set(cluster.states().values()) == {"up"}
        assert cluster.directory.workers() == known
        assert cluster.directory.vanished() == {}
        assert {len(each.record.attempts) for each in asked} == {1}


@virtual
async def test_a_registry_frozen_past_the_lifetime_of_its_keys_costs_no_request():
    async with two_by_two() as cluster, loaded(cluster) as asked:
        cluster.registry.go_away()
        await asyncio.sleep(3 * TTL_S)
        cluster.registry._away_since_s = None  # it stood still: its leases ended meanwhile
        cluster.registry.expire()
        await asyncio.sleep(0.2)
        assert set(cluster.states().values()) == {"vanished"}
        await asyncio.sleep(TTL_S)
        assert set(cluster.states().values()) == {"up"}
        assert {len(each.record.attempts) for each in asked} == {1}


@pytest.mark.parametrize("end", ["kill", "freeze"])
@virtual
async def test_a_ghost_gets_no_request_although_its_key_lives(end):
    async with two_by_two() as cluster:
        ghost = cluster.workers["d1"]
        async with loaded(cluster):
            getattr(ghost, end)()
            cluster.registry.extend_all(3600)  # as a restarted registry may
            await asyncio.sleep(1.0 if end == "kill" else 3.0)
            num_begun = begun_at(cluster, "d1")
            await asyncio.sleep(60)
            assert begun_at(cluster, "d1") == num_begun
            assert ghost.record in cluster.directory.workers()
            assert cluster.states()["d1"] == ("down" if end == "kill" else "frozen")
            answer = cluster.health_answer()
            assert answer.status == "degraded"
            assert [each.decode for each in answer.degraded] == ["d1"]
            report = await cluster.report()
            [told] = [each for each in report.workers if each.record.worker_id == "d1"]
            assert told.shown_state() == ("down" if end == "kill" else "frozen")
            assert "d1" in told.health_reason


@virtual
async def test_a_ghost_that_a_fresh_proxy_finds_in_the_registry_is_asked_before_it_is_used_long():
    cluster = two_by_two()
    cluster.workers["d1"].is_gone = True
    async with cluster, loaded(cluster):
        assert begun_at(cluster, "d1") <= 1
        assert cluster.states()["d1"] == "down"


@virtual
async def test_a_worker_whose_key_vanished_and_who_dies_then_is_gone_at_once():
    async with two_by_two() as cluster, loaded(cluster):
        for lease in cluster.leases.values():
            await cluster.registry.revoke(lease)
        cluster.workers["d1"].kill()
        await asyncio.sleep(1.0)
        assert "d1" not in cluster.states()
        [refused] = cluster.directory.refused()
        assert (refused.worker_id, refused.reason) == ("d1", "worker d1 is gone")
        assert cluster.health_answer().status == "ok"


@virtual
async def test_a_dead_worker_is_dropped_when_its_key_goes():
    async with two_by_two() as cluster, loaded(cluster):
        cluster.workers["d1"].kill()
        await asyncio.sleep(5.0)
        assert cluster.states()["d1"] == "down"
        await asyncio.sleep(TTL_S)
        assert "d1" not in cluster.states()
        assert cluster.directory.vanished() == {}


@pytest.mark.parametrize("goes_on_at", ["its address", "another address"])
@virtual
async def test_a_predecessor_is_no_trouble_once_its_successor_serves(goes_on_at):
    async with two_by_two() as cluster, loaded(cluster):
        former = cluster.workers["d1"].record
        cluster.workers["d1"].kill()
        cluster.registry.extend_all(3600)
        await asyncio.sleep(1.0)
        assert cluster.health_answer().status == "degraded"
        life = {"incarnation": Incarnation("another life")}
        if goes_on_at == "its address":
            life |= {"worker_id": WorkerId("d7"), "role": "prefill"}  # the key is another one
        else:
            life["api_port"] = 30_000
        successor = VirtualWorker("d7", "decode")
        successor.record = msgspec.structs.replace(former, **life)
        cluster.workers[successor.record.worker_id] = successor
        await cluster.announce(successor)
        await asyncio.sleep(0.3)
        assert former in cluster.directory.workers()
        assert cluster.health_answer().status == "ok"
        report = await cluster.report()
        [told] = [each for each in report.workers if each.record == former]
        assert told.shown_state() == "down"
        assert report.remarks == []  # one of the two is down: nobody is mistaken for another


@virtual
async def test_of_two_workers_at_one_address_the_one_that_answers_there_is_right():
    async with two_by_two() as cluster, loaded(cluster):
        right = cluster.workers["d1"].record
        wrong = msgspec.structs.replace(
            right, worker_id=WorkerId("d9"), role="prefill", incarnation=Incarnation("nobody")
        )
        await cluster.put(wrong)
        await asyncio.sleep(5.0)
        assert begun_at(cluster, "d9") == 0
        assert begun_at(cluster, "d1") > 40
        reasons = {each.record.worker_id: each.reason for each in cluster.health.reports()}
        assert reasons["d1"] == ""
        host, port = place_of(right)
        assert reasons["d9"] == f"d9 is not at {host}:{port}: another process is, d1"
        assert cluster.health_answer().status == "ok"


@virtual
async def test_one_name_for_two_workers_is_said_and_both_are_used():
    async with two_by_two() as cluster:
        other = VirtualWorker("d1", "decode", incarnation="another")
        cluster.workers["the other d1"] = other
        await cluster.announce(other)
        await asyncio.sleep(1.0)
        report = await cluster.report()
        places = [f"127.0.0.1:{r.api_port}" for r in (cluster.workers["d1"].record, other.record)]
        assert report.remarks == [f"2 workers have the name d1: at {', '.join(places)}"]
        assert cluster.health_answer().status == "ok"
        chosen = {cluster.router.pick("tiny").decode.incarnation for _ in range(6)}
        assert chosen == {"d1-life", "d2-life", "another"}


@virtual
async def test_while_the_registry_is_away_the_last_view_stays_and_operators_are_told():
    async with two_by_two() as cluster, loaded(cluster, 1.0) as asked:
        cluster.registry.go_away()
        await asyncio.sleep(600)
        assert len(cluster.directory.workers()) == 4
        answer = cluster.health_answer()
        assert answer.status == "degraded"
        words = "who is known may be old: the registry does not answer"
        assert [each.reason for each in answer.degraded] == [words]
        assert (await cluster.report()).remarks == [words]
        cluster.registry.come_back()
        await asyncio.sleep(TTL_S)
        assert cluster.health_answer().status == "ok"
        assert {len(each.record.attempts) for each in asked} == {1}


@virtual
async def test_a_worker_that_drains_leaves_with_its_key_and_no_request_fails():
    async with two_by_two() as cluster, loaded(cluster):
        worker = cluster.workers["d1"]
        worker.record = msgspec.structs.replace(worker.record, state="draining")
        key = worker.record.worker_id, worker.record.incarnation
        await cluster.registry.put(
            worker.record.key(), encode_json(worker.record), cluster.leases[key]
        )
        await asyncio.sleep(1.0)
        num_begun = begun_at(cluster, "d1")
        await cluster.registry.revoke(cluster.leases[key])
        await asyncio.sleep(0.01)
        assert "d1" not in cluster.states()
        assert begun_at(cluster, "d1") == num_begun


@virtual
async def test_n34_a_worker_added_while_serving_gets_the_next_request_of_its_turn():
    async with two_by_two() as cluster, loaded(cluster):
        await asyncio.sleep(2.0)
        added = VirtualWorker("d3", "decode")
        cluster.workers["d3"] = added
        joined_s = now_s()
        await cluster.announce(added)
        before = len(cluster.legs)
        await asyncio.sleep(2.0)
        legs = [leg for leg in cluster.legs[before:] if leg.worker.record.role == "decode"]
        turns = [leg.worker_id for leg in legs]
        assert "d3" in turns[:3]  # at once
        assert len(turns) / 3 - 2 <= turns.count("d3") <= len(turns) / 3 + 2  # its share
        assert not any(one == other for one, other in itertools.pairwise(turns))
        assert now_s() - joined_s <= 2.01


@virtual
async def test_who_restarts_while_the_registry_is_away_is_used_by_its_own_word():
    async with two_by_two() as cluster, loaded(cluster):
        cluster.registry.go_away()
        for name in ("p1", "d1"):
            cluster.workers[name].restart()
        await asyncio.sleep(3.0)
        assert cluster.states() == dict.fromkeys(("p1", "p2", "d1", "d2"), "up")
        known = cluster.directory.workers()
        assert all(cluster.workers[name].record in known for name in ("p1", "d1"))
        num_begun = begun_at(cluster, "d1")
        await asyncio.sleep(3.0)
        assert begun_at(cluster, "d1") > num_begun
        cluster.registry.come_back()
        for name in ("p1", "d1"):
            await cluster.announce(cluster.workers[name])
        await asyncio.sleep(3.0)
        assert cluster.directory.workers() == known
        assert set(cluster.states().values()) == {"up"}


@virtual
async def test_who_restarts_while_the_registry_is_there_waits_for_it_to_say_so():
    async with two_by_two() as cluster:
        before = cluster.workers["d1"].record
        cluster.workers["d1"].restart()
        await asyncio.sleep(3.0)
        assert cluster.states()["d1"] == "down"
        assert before in cluster.directory.workers()
