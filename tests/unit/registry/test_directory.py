import pytest

from neuron_di.registry import Directory
from neuron_di.wire import encode_json


async def test_workers_come_change_and_go_sorted_by_key(registry, make_record, wait_workers):
    lease = await registry.grant(10)
    async with Directory(registry, keep_s=0) as directory:
        for port in (4003, 4001, 4002):
            await registry.put(make_record(port).key(), encode_json(make_record(port)), lease)
        workers = await wait_workers(directory, lambda workers: len(workers) == 3)
        assert [worker.api_port for worker in workers] == [4001, 4002, 4003]

        draining = make_record(4002, state="draining")
        await registry.put(draining.key(), encode_json(draining), lease)
        workers = await wait_workers(directory, lambda workers: draining in workers)
        assert len(workers) == 3

        await registry.revoke(lease)
        assert await wait_workers(directory, lambda workers: not workers) == ()


async def test_what_was_there_before_is_seen_and_other_prefixes_are_not(
    registry, make_record, wait_workers
):
    lease = await registry.grant(10)
    await registry.put("/other", b"junk", lease)
    await registry.put(make_record().key(), encode_json(make_record()), lease)
    async with Directory(registry) as directory:
        assert await wait_workers(directory, lambda workers: workers) == (make_record(),)
        assert directory.num_ignored == 0


async def test_epoch_counts_changes_only(registry, make_record, wait_workers):
    lease = await registry.grant(10)
    record = make_record()
    async with Directory(registry) as directory:
        await registry.put(record.key(), encode_json(record), lease)
        await wait_workers(directory, lambda workers: workers)
        for _ in range(5):
            await registry.put(record.key(), encode_json(record), lease)
        other = make_record(4001)
        await registry.put(other.key(), encode_json(other), lease)
        await wait_workers(directory, lambda workers: len(workers) == 2)
        assert directory.epoch == 2
        assert await directory.wait_changed(1) == 2


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\x00",
        b"null",
        b'{"connections": []}',
        b"[" * 60_000,
        b'{"worker_id": "' + b"x" * 60_000,
    ],
)
async def test_junk_is_no_worker_and_harms_none(registry, make_record, wait_workers, value):
    lease = await registry.grant(10)
    record, damaged = make_record(4000), make_record(4001)
    async with Directory(registry, keep_s=0) as directory:
        await registry.put(damaged.key(), encode_json(damaged), lease)
        await registry.put(damaged.key(), value, lease)
        await registry.put("/workers/junk", value, lease)
        await registry.put(record.key(), encode_json(record), lease)
        assert await wait_workers(directory, lambda workers: record in workers) == (record,)
        assert directory.num_ignored == 2


async def test_a_record_counts_only_at_its_own_key_and_version(registry, make_record, wait_workers):
    lease = await registry.grant(10)
    record = make_record()
    foreign = make_record(4001, protocol_version=99)
    async with Directory(registry) as directory:
        await registry.put("/workers/decode/127.0.0.1/1", encode_json(record), lease)
        await registry.put(foreign.key(), encode_json(foreign), lease)
        await registry.put(record.key(), encode_json(record), lease)
        assert await wait_workers(directory, lambda workers: workers) == (record,)
        assert directory.num_ignored == 2


@pytest.mark.parametrize("worker_id", ["", "a b", "a\n", "工", "a" * 65])
async def test_a_worker_whose_name_no_header_can_hold_is_none(
    registry, make_record, wait_workers, worker_id
):
    lease = await registry.grant(10)
    named, record = make_record(4001, worker_id=worker_id), make_record(4000)
    async with Directory(registry) as directory:
        await registry.put(named.key(), encode_json(named), lease)
        await registry.put(record.key(), encode_json(record), lease)
        assert await wait_workers(directory, lambda workers: workers) == (record,)
        assert directory.num_ignored == 1
