import asyncio

import pytest

from neuron_di.registry import (
    Announcer,
    Directory,
    EmbeddedRegistry,
    RegistryClient,
    RegistryServer,
)

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
async def server(registry):
    async with RegistryServer(registry, LOOPBACK) as server:
        yield server


@pytest.fixture
async def directory(registry):
    async with Directory(registry, keep_s=0) as directory:
        yield directory


async def test_announced_is_seen_and_withdrawn_is_gone(
    server, directory, make_record, wait_workers
):
    record = make_record()
    async with RegistryClient(server.address) as client:
        async with Announcer(client, lambda: record):
            assert await wait_workers(directory, lambda workers: workers) == (record,)
        await wait_workers(directory, lambda workers: not workers)


async def test_a_change_is_announced_without_waiting_for_a_beat(
    server, directory, make_record, wait_workers, caplog
):
    caplog.set_level("INFO", "neuron_di.registry.announcer")
    records = [make_record(state="starting")]
    async with (
        RegistryClient(server.address) as client,
        Announcer(client, lambda: records[-1], ttl_s=3600) as announcer,
    ):
        for fields in ({"state": "ready"}, {"connections": ["decode-0"]}, {"state": "draining"}):
            await wait_workers(directory, lambda workers: records[-1] in workers)
            records.append(make_record(**fields))
            announcer.record_changed()
        assert await wait_workers(directory, lambda workers: records[-1] in workers) == (
            records[-1],
        )
    lines = [line.event_fields["state"] for line in caplog.records if line.msg == "announced"]
    assert lines == ["starting", "ready", "draining"], "what else changed does so at each beat"


async def test_a_worker_that_dies_is_gone_when_its_lease_ends(
    server, registry, directory, clock, make_record, wait_workers
):
    record = make_record()
    client = await RegistryClient(server.address).__aenter__()
    announcer = await Announcer(client, lambda: record).__aenter__()
    await wait_workers(directory, lambda workers: workers)
    # Its connection ends and its tasks stop, without a word to the registry.
    announcer._announcing._task.cancel()
    await asyncio.wait([announcer._announcing._task])
    await client.__aexit__(None, None, None)
    clock.s += 9.9
    registry.expire()
    assert record.key() in (await anext(registry.watch("/"))).values
    clock.s += 1000
    await wait_workers(directory, lambda workers: not workers)


async def test_beats_keep_the_lease(server, registry, directory, clock, make_record, wait_workers):
    class CountingClient(RegistryClient):
        beats = asyncio.Semaphore(0)

        async def keep_alive(self, lease):
            remaining_s = await super().keep_alive(lease)
            self.beats.release()
            return remaining_s

    record = make_record()
    async with (
        CountingClient(server.address) as client,
        Announcer(client, lambda: record, ttl_s=1),
    ):
        await wait_workers(directory, lambda workers: workers)
        for _ in range(2):
            while not client.beats.locked():
                await client.beats.acquire()
            clock.s += 0.9
            await client.beats.acquire()  # this one may have begun before
            await client.beats.acquire()
            registry.expire()
        assert directory.workers() == (record,)
        assert directory.epoch == 1


async def test_a_lease_the_registry_lost_is_replaced(
    server, registry, directory, clock, make_record, wait_workers
):
    record = make_record()
    async with (
        RegistryClient(server.address) as client,
        Announcer(client, lambda: record, ttl_s=1),
    ):
        await wait_workers(directory, lambda workers: workers)
        clock.s += 1000
        registry.expire()
        await wait_workers(directory, lambda workers: not workers)
        assert await wait_workers(directory, lambda workers: workers) == (record,)


async def test_a_registry_that_restarts_learns_of_the_worker_again(make_record, wait_workers):
    record = make_record()
    async with RegistryServer(EmbeddedRegistry(), LOOPBACK) as server:
        address = server.address
        client = await RegistryClient(address, call_timeout_s=0.2).__aenter__()
        announcer = await Announcer(client, lambda: record, ttl_s=1).__aenter__()
        async with Directory(server._registry) as directory:
            await wait_workers(directory, lambda workers: workers)
    successor = EmbeddedRegistry()
    async with RegistryServer(successor, address), Directory(successor, keep_s=0) as directory:
        assert await wait_workers(directory, lambda workers: workers) == (record,)
        await announcer.__aexit__(None, None, None)
        await wait_workers(directory, lambda workers: not workers)
        await client.__aexit__(None, None, None)
    successor.check_integrity()


async def test_it_starts_before_the_registry_and_ends_without_it(make_record, wait_workers):
    record = make_record()
    async with RegistryServer(EmbeddedRegistry(), LOOPBACK) as server:
        address = server.address
    async with (
        RegistryClient(address, call_timeout_s=0.05) as client,
        Announcer(client, lambda: record),
    ):
        await asyncio.sleep(0.5)  # several attempts fail meanwhile
        registry = EmbeddedRegistry()
        async with RegistryServer(registry, address), Directory(registry) as directory:
            assert await wait_workers(directory, lambda workers: workers) == (record,)
        # The registry is gone again: withdrawing gives up at its deadline.


async def test_who_sees_snapshots_only_hears_that_a_worker_drained(
    server, make_record, wait_workers
):
    """Its end comes at once where it has nothing to do, and is no crash all the same."""
    records = [make_record()]
    async with RegistryClient(server.address) as seeing, Directory(seeing) as directory:
        async with (
            RegistryClient(server.address) as client,
            Announcer(client, lambda: records[-1], ttl_s=3600) as announcer,
        ):
            await wait_workers(directory, lambda workers: workers)
            records.append(make_record(state="draining"))
            announcer.record_changed()
            assert await announcer.withdraw(30.0)
        await wait_workers(directory, lambda workers: not workers or directory.vanished())
        assert not directory.vanished()
