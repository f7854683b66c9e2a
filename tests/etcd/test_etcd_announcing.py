"""Real announcers and a real directory at a real etcd whose keys somebody deletes or overwrites."""

import asyncio

import pytest
from etcd_kit import running_etcd
from watching import until
from worker_record import make_record

from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.registry import EtcdRegistry
from neuron_di.registry import Announcer, Directory

TTL_S = 2.0
PREFIX = b"/neuron-di"


@pytest.fixture
async def etcd():
    async with running_etcd() as running:
        yield running


@pytest.fixture
async def client(etcd):
    async with EtcdClient(etcd.addresses) as client:
        yield client


@pytest.fixture
def registry(client):
    return EtcdRegistry(client, PREFIX.decode())


async def test_keys_that_were_deleted_while_their_leases_live_come_back(etcd, registry):
    records = [make_record(port) for port in (4001, 4003, 4005)]
    async with Directory(registry) as directory:
        async with (
            Announcer(registry, lambda: records[0], ttl_s=TTL_S),
            Announcer(registry, lambda: records[1], ttl_s=TTL_S),
            Announcer(registry, lambda: records[2], ttl_s=TTL_S),
        ):
            await until(lambda: len(directory.workers()) == 3)
            for _ in range(2):
                etcd.ctl("del", "--prefix", "/neuron-di/")
                await until(lambda: len(directory.vanished()) > 0)
                assert directory.workers() == tuple(records)
                await until(lambda: not directory.vanished())
                assert directory.workers() == tuple(records)
        await until(lambda: len(directory.vanished()) == 3)


@pytest.mark.parametrize("by", ["no lease", "a lease that ends"])
async def test_a_key_that_was_overwritten_comes_back(client, registry, by):
    record = make_record()
    key = PREFIX + record.key().encode()
    async with (
        Directory(registry) as directory,
        Announcer(registry, lambda: record, ttl_s=TTL_S),
    ):
        await until(lambda: directory.workers() == (record,))
        lease = await client.grant(2) if by == "a lease that ends" else 0
        await client.put(key, b"junk", lease=lease)
        await until(lambda: bool(directory.vanished()))
        assert directory.workers() == (record,)
        await until(lambda: not directory.vanished())
        assert directory.workers() == (record,)
        assert (await client.get(key)).lease not in (0, lease)  # its own again


async def test_two_workers_with_one_key_are_both_seen(client, registry):
    one, other = make_record(), make_record(worker_id="other", incarnation="j")
    async with (
        Directory(registry) as directory,
        Announcer(registry, lambda: one, ttl_s=TTL_S),
    ):
        await until(lambda: directory.workers() == (one,))
        async with Announcer(registry, lambda: other, ttl_s=TTL_S):
            await until(lambda: len(directory.workers()) == 2)
            epoch = directory.epoch
            for _ in range(4):  # they put their records by turns
                epoch = await directory.wait_changed(epoch)
                assert {each.worker_id for each in directory.workers()} == {"prefill-4000", "other"}
            directory.drop(other, "somebody else is there")  # at once, or when it loses the key
        await until(lambda: (one.worker_id, one.incarnation) not in directory.vanished())
        assert one in directory.workers()


async def test_a_restart_at_the_same_address_counts_at_once(registry):
    before, after = make_record(), make_record(incarnation="j", pid=2)
    async with Directory(registry) as directory, Announcer(registry, lambda: before):
        await until(lambda: directory.workers() == (before,))
        async with Announcer(registry, lambda: after):
            async with asyncio.timeout(30):
                await directory.wait_changed(directory.epoch)
            assert directory.workers() == (after,)
