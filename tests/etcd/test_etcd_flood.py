"""More keys than anybody reads, in a real etcd: workers are found, and stay, all the same."""

import asyncio

import pytest
from etcd_kit import running_etcd
from watching import Watching, until
from worker_record import make_record

from neuron_di.errors import PeerTimeout
from neuron_di.etcd.client import PAGE_KEYS, EtcdClient
from neuron_di.etcd.messages import PutRequest, RequestOp
from neuron_di.etcd.registry import EtcdRegistry
from neuron_di.etcd.selection import JUNK_BYTES_MAX, JUNK_MAX
from neuron_di.registry import Announcer, Directory
from neuron_di.registry.record_reader import REFUSED_MAX
from neuron_di.wire import encode_json

PREFIX = b"/neuron-di"
NUM_FLOOD = 100_000
PUTS_PER_TXN = 128  # that etcd takes
NEVER_S = 1e6


@pytest.fixture
async def client():
    async with running_etcd() as etcd, EtcdClient(etcd.addresses, call_timeout_s=20) as client:
        yield client


async def put_all(client, pairs):
    puts = [RequestOp(request_put=PutRequest(key=key, value=value)) for key, value in pairs]
    batches = [puts[at : at + PUTS_PER_TXN] for at in range(0, len(puts), PUTS_PER_TXN)]
    for at in range(0, len(batches), 8):
        await asyncio.gather(*(client.txn([], batch) for batch in batches[at : at + 8]))


def flood(number):
    """Junk at keys that could be workers' and that no worker could have, before all workers'."""
    for i in range(number * 6 // 10):
        yield PREFIX + b"/workers/decode/10.%d.0.1/%d" % divmod(i, 60_000), b"junk"
    for i in range(number * 4 // 10):
        yield PREFIX + b"/workers/%d/../x" % i, b"junk"


async def test_100_000_keys_hide_no_worker(client):
    record = make_record()
    await put_all(client, flood(NUM_FLOOD))
    registry = EtcdRegistry(client, PREFIX.decode(), relist_s=0.0)  # at every word of the stream
    num_turns = 0

    async def count_turns():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    async with Announcer(registry, lambda: record), Directory(registry) as directory:
        await until(lambda: directory.workers() == (record,))
        await until(lambda: registry.num_lists >= 3)
        assert directory.workers() == (record,)
        assert len(directory.refused()) == REFUSED_MAX
        assert directory.num_ignored == JUNK_MAX  # each counted once, though read three times
        ignored = directory.num_ignored_by_fault()
        assert ignored["unread"] == NUM_FLOOD - JUNK_MAX
        assert sum(ignored.values()) == NUM_FLOOD
    counting.cancel()
    assert num_turns >= 3 * NUM_FLOOD / PAGE_KEYS  # others ran between any two pages


async def test_over_a_slow_line_pages_become_smaller(client, monkeypatch):
    """As if a page of more than 200 keys took longer than a call may."""
    record = make_record()
    await put_all(client, flood(2000))
    call, asked = client._call, []

    async def slow(method, request, deadline):
        limit = getattr(request, "limit", 0)
        asked.append(limit)
        if limit > 200:
            raise PeerTimeout("etcd did not answer in time")
        if limit > 100:
            await asyncio.sleep(0.3)  # of the second that a try has: no larger one is asked for
        return await call(method, request, deadline)

    monkeypatch.setattr(client, "_call", slow)
    registry = EtcdRegistry(client, PREFIX.decode(), relist_s=NEVER_S)
    async with Announcer(registry, lambda: record), Directory(registry) as directory:
        await until(lambda: directory.workers() == (record,))
    assert (registry.num_breaks, max(asked[1:]), asked.count(PAGE_KEYS)) == (1, PAGE_KEYS // 8, 1)


async def test_who_is_known_stays_though_records_are_too_many(client, monkeypatch):
    for module in ("registry", "selection"):
        monkeypatch.setattr(f"neuron_di.etcd.{module}.KEYS_MAX", 10)
    known = [make_record(5000 + number) for number in range(4)]
    others = [make_record(4000 + number) for number in range(50)]  # which sort first
    registry = EtcdRegistry(client, PREFIX.decode(), relist_s=0.0)
    await put_all(client, [(PREFIX + r.key().encode(), encode_json(r)) for r in known])
    async with Watching(registry) as seen:
        assert len(seen.view) == 4
        await put_all(client, [(PREFIX + r.key().encode(), encode_json(r)) for r in others])
        num_lists = registry.num_lists
        await until(lambda: registry.num_lists >= num_lists + 2)
        await seen.until(lambda: len(seen.view) == 10)
        assert {record.key() for record in known} <= set(seen.view)
        assert registry.num_dropped == 44  # once, however often they are listed


async def test_who_is_known_stays_though_there_is_more_than_can_be_read(client, monkeypatch):
    """Large values before it: they are not all read, and the worker is asked for by its key."""
    monkeypatch.setattr("neuron_di.etcd.registry.SCAN_BYTES_MAX", 1 << 20)
    record = make_record()
    key = PREFIX + record.key().encode()
    registry = EtcdRegistry(client, PREFIX.decode(), relist_s=0.0)
    await client.put(key, encode_json(record))
    async with Watching(registry) as seen:
        junk = [(PREFIX + b"/workers/a/%03d" % i, bytes(60_000)) for i in range(400)]
        for at in range(0, len(junk), 20):
            await put_all(client, junk[at : at + 20])
        num_lists = registry.num_lists
        await until(lambda: registry.num_lists >= num_lists + 3)
        assert seen.view[record.key()] == encode_json(record)
        assert sum(map(len, seen.view.values())) <= JUNK_BYTES_MAX + 10_000
        num_dropped = registry.num_dropped
        await until(lambda: registry.num_lists >= num_lists + 6)
        assert registry.num_dropped == num_dropped
