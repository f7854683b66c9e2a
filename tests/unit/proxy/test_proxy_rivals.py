"""Two workers at one key, and a registry that says again what was before. Virtual time."""

import asyncio

import msgspec
from test_proxy_vanished import begun_at, loaded, two_by_two
from virtual_time import virtual

from neuron_di.registry import Snapshot
from neuron_di.types import Incarnation, WorkerId
from neuron_di_proxy.workers import place_of


@virtual
async def test_of_two_workers_with_one_key_the_one_that_answers_there_is_used():
    async with two_by_two() as cluster, loaded(cluster):
        right = cluster.workers["d1"].record
        wrong = msgspec.structs.replace(
            right, worker_id=WorkerId("d9"), incarnation=Incarnation("nobody")
        )
        for _ in range(20):  # both put their records again and again
            for record in (wrong, right):
                await cluster.put(record)
                num_begun = begun_at(cluster, "d1")
                await asyncio.sleep(2.0)
                assert begun_at(cluster, "d9") == 0
                assert begun_at(cluster, "d1") >= num_begun + 15
        await cluster.put(wrong)
        await asyncio.sleep(5.0)
        reasons = {each.record.worker_id: each.reason for each in cluster.health.reports()}
        host, port = place_of(right)
        assert reasons["d9"] == f"d9 is not at {host}:{port}: another process is, d1"
        assert reasons["d1"] == ""
        assert cluster.health_answer().status == "ok"
        await cluster.put(right)
        await asyncio.sleep(1.0)
        assert "d9" not in cluster.states()
        assert [each.worker_id for each in cluster.directory.refused()] == ["d9"]


@virtual
async def test_a_worker_that_took_anothers_address_is_used_at_once_and_the_other_is_gone():
    async with two_by_two() as cluster, loaded(cluster):
        worker = cluster.workers["d1"]
        worker.restart()
        worker.record = msgspec.structs.replace(worker.record, worker_id=WorkerId("d7"))
        cluster.workers["d7"] = worker
        await cluster.announce(worker)
        await asyncio.sleep(0.5)
        assert cluster.states() == dict.fromkeys(("p1", "p2", "d2", "d7"), "up")
        await asyncio.sleep(2.0)
        assert begun_at(cluster, "d7") > 10


@virtual
async def test_who_was_known_by_its_own_word_stays_when_the_registry_says_the_former_again():
    async with two_by_two() as cluster, loaded(cluster):
        listed = Snapshot({key: each.value for key, each in cluster.registry._entries.items()})
        cluster.registry.go_away()
        cluster.workers["d1"].restart()
        await asyncio.sleep(5.0)
        cluster.registry.come_back()
        await cluster.directory._apply(listed)  # d1 has not announced itself yet
        assert cluster.workers["d1"].record in cluster.directory.workers()
        num_begun = begun_at(cluster, "d1")
        await asyncio.sleep(2.0)
        assert begun_at(cluster, "d1") > num_begun
        assert set(cluster.states().values()) == {"up"}
