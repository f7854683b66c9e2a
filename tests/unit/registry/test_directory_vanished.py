"""A vanished key is suspicion. On virtual time."""

import asyncio

import msgspec
import pytest
from virtual_time import virtual

from neuron_di.clock import now_s
from neuron_di.registry import Directory, EmbeddedRegistry, KeyDeleted, Snapshot
from neuron_di.registry import directory as directory_module
from neuron_di.registry.directory import KEEP_S
from neuron_di.testing.virtual_loop import VirtualClock
from neuron_di.wire import encode_json


class Told:
    """A registry whose events, and troubles, are a test's."""

    num_dropped = 0

    def __init__(self):
        self.events = asyncio.Queue()
        self.words = ""

    async def watch(self, prefix):
        while True:
            yield await self.events.get()

    def trouble(self):
        return self.words

    async def say(self, *events):
        for event in events:
            self.events.put_nowait(event)
        await asyncio.sleep(0.01)


def snapshot(*records):
    return Snapshot({record.key(): encode_json(record) for record in records})


def ids(directory):
    return [record.worker_id for record in directory.workers()]


@virtual
async def test_a_registry_that_was_wiped_takes_nobody_along(make_record):
    registry = Told()
    records = [make_record(port) for port in (4001, 4002, 4003)]
    async with Directory(registry) as directory:
        await registry.say(snapshot(*records))
        await registry.say(Snapshot({}))
        assert directory.workers() == tuple(records)
        assert len(directory.vanished()) == 3
        await registry.say(snapshot(*records))  # they announce themselves again
        assert directory.workers() == tuple(records)
        assert directory.vanished() == {}
        await asyncio.sleep(10 * KEEP_S)
        assert directory.workers() == tuple(records)


@virtual
async def test_who_said_that_it_drains_is_gone_with_its_key(make_record):
    registry = Told()
    draining, ready = make_record(4001, state="draining"), make_record(4002)
    async with Directory(registry) as directory:
        await registry.say(snapshot(draining, ready))
        await registry.say(KeyDeleted(draining.key()), KeyDeleted(ready.key()))
        assert directory.workers() == (ready,)
        assert directory.refused() == []


@virtual
async def test_who_is_found_to_be_gone_is_dropped_at_once_and_still_named(make_record):
    registry = Told()
    record, other = make_record(4001), make_record(4002)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record, other))
        directory.drop(record, "it is down")
        assert len(directory.workers()) == 2  # its key is there: a ghost, whom probes keep idle
        await registry.say(KeyDeleted(record.key()))
        epoch = directory.epoch
        directory.drop(record, "it is down")
        assert directory.epoch == epoch + 1
        assert directory.workers() == (other,)
        [refused] = directory.refused()
        assert refused == (record.key(), record.worker_id, "it is down")
        await registry.say(snapshot(record, other))
        assert directory.refused() == []


@virtual
async def test_nobody_is_kept_for_ever(make_record):
    registry = Told()
    record = make_record()
    async with Directory(registry) as directory:
        await registry.say(snapshot(record))
        await registry.say(KeyDeleted(record.key()))
        await asyncio.sleep(KEEP_S - 2)
        assert directory.workers() == (record,)
        await asyncio.sleep(4)
        assert directory.workers() == ()
        assert "gone for 30 s" in directory.refused()[0].reason
        assert directory._timer is None


@virtual
async def test_time_in_which_nobody_could_come_back_does_not_count(make_record):
    registry = Told()
    record = make_record()
    async with Directory(registry) as directory:
        await registry.say(snapshot(record))
        await registry.say(KeyDeleted(record.key()))  # and then it went down for good
        registry.words = "it does not answer"
        await asyncio.sleep(3600)
        assert directory.workers() == (record,)
        assert directory.trouble() == "it does not answer"
        [vanished_s] = directory.vanished().values()
        assert vanished_s >= 3600
        registry.words = ""
        asyncio.get_running_loop().now_s += 3600  # as if this process had been stopped
        await asyncio.sleep(KEEP_S / 2)
        assert directory.workers() == (record,)
        await asyncio.sleep(KEEP_S)
        assert directory.workers() == ()


@virtual
async def test_a_process_that_changes_its_role_is_there_once(make_record):
    registry = Told()
    former = make_record(4001)
    latter = msgspec.structs.replace(former, role="decode")
    async with Directory(registry) as directory:
        await registry.say(snapshot(former))
        await registry.say(snapshot(former, latter))
        assert directory.workers() == (latter,)
        await registry.say(KeyDeleted(former.key()))
        assert directory.workers() == (latter,)
        assert directory.vanished() == {}
        await registry.say(KeyDeleted(latter.key()))  # the other way round: first it goes
        assert directory.workers() == (latter,)
        await registry.say(snapshot(former))
        assert directory.workers() == (former,)
        assert directory.vanished() == {}


@virtual
async def test_a_successor_at_the_same_key_ends_the_doubt(make_record):
    registry = Told()
    former, latter = make_record(4001), make_record(4001, incarnation="another")
    async with Directory(registry) as directory:
        await registry.say(snapshot(former))
        await registry.say(KeyDeleted(former.key()))
        await registry.say(snapshot(latter))
        assert directory.workers() == (latter,)
        assert directory.vanished() == {}


@virtual
async def test_a_worker_whose_record_was_overwritten_is_kept_while_it_may_live(make_record):
    registry = Told()
    record = make_record(4001)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record))
        await registry.say(Snapshot({record.key(): b"junk"}))
        assert directory.workers() == (record,)
        assert [each.key for each in directory.refused()] == [record.key()]
        directory.drop(record, "down")
        assert directory.workers() == ()


@virtual
async def test_a_key_that_comes_and_goes_leaves_nothing_behind(make_record):
    registry = Told()
    async with Directory(registry) as directory:
        for life in range(2000):
            record = make_record(4001, incarnation=f"life-{life}")
            await registry.say(snapshot(record), Snapshot({record.key(): b"junk"}), Snapshot({}))
        assert len(directory.workers()) == len(directory.vanished()) == 1
        assert len(directory._vanished._at_key) == 1
        assert directory._num_keys == {}
        assert directory.refused() == []
        assert directory.ignored == {"value": 2000}


@virtual
async def test_vanished_workers_have_a_bound(make_record, monkeypatch):
    monkeypatch.setattr(directory_module, "KEYS_MAX", 3)
    registry = Told()
    async with Directory(registry) as directory:
        for port in range(4000, 4020):
            await registry.say(snapshot(make_record(port)), Snapshot({}))
        assert len(directory.workers()) <= 3


@virtual
async def test_more_workers_than_the_limit_drive_nobody_out(make_record, monkeypatch):
    monkeypatch.setattr(directory_module, "KEYS_MAX", 3)
    registry = Told()
    known = [make_record(port) for port in (4007, 4008)]
    flood = [make_record(port) for port in range(4000, 4020) if port not in (4007, 4008)]
    async with Directory(registry) as directory:
        await registry.say(snapshot(*known))
        await registry.say(snapshot(*known, *flood))
        assert len(directory.workers()) == 3
        assert all(record in directory.workers() for record in known)
        assert directory.ignored["too many"] == 17
        assert "3 workers are known" in directory.refused()[0].reason


@virtual
async def test_a_failure_of_our_own_is_told_and_begun_again(make_record, caplog):
    class Broken(Told):
        num_watches = 0

        async def watch(self, prefix):
            self.num_watches += 1
            if self.num_watches < 3:
                raise KeyError("a bug")
            yield snapshot(make_record())
            await asyncio.Event().wait()

    registry = Broken()
    async with Directory(registry) as directory:
        await asyncio.sleep(0.1)
        assert directory.trouble() == "the directory failed (KeyError) and was begun again"
        async with asyncio.timeout(60):
            await directory.wait_changed(0)
        assert ids(directory) == ["prefill-4000"]
        assert registry.num_watches == 3
        assert [each.message for each in caplog.records].count("task_failed") == 2
        await asyncio.sleep(120)
        assert directory.trouble() == ""


@virtual
async def test_the_wall_clock_decides_nothing(make_record, monkeypatch):
    registry = EmbeddedRegistry()
    record = make_record()
    loop = asyncio.get_running_loop()
    jumps_s = iter(range(-(10**9), 10**9, 10**7))
    monkeypatch.setattr(VirtualClock, "unix_s", lambda _: next(jumps_s))
    lease = await registry.grant(10)
    await registry.put(record.key(), encode_json(record), lease)
    async with Directory(registry) as directory:
        began_s = now_s()
        for _ in range(20):
            await asyncio.sleep(3)
            assert await registry.keep_alive(lease) == 10
            registry.expire()
        assert directory.workers() == (record,)
        await registry.revoke(lease)
        await directory.wait_changed(directory.epoch)  # it has vanished
        await directory.wait_changed(directory.epoch)  # and is dropped
        assert directory.workers() == ()
        assert loop.time() - began_s == pytest.approx(60 + KEEP_S, abs=2)


@virtual
async def test_it_can_begin_with_whom_another_knew(make_record, caplog):
    registry = Told()
    registry.words = "away"
    records = [make_record(port) for port in (4001, 4002)]
    async with Directory(registry) as directory:
        directory.remember(records)
        assert "worker_vanished" not in caplog.text  # nobody's key is known to be gone
        assert directory.workers() == tuple(records)
        await asyncio.sleep(2 * KEEP_S)  # in which nobody could have said anything
        assert ids(directory) == [record.worker_id for record in records]
        registry.words = ""
        await registry.say(snapshot(records[0]))
        assert set(directory.vanished()) == {(records[1].worker_id, records[1].incarnation)}
        directory.remember([make_record(4003)])  # too late: the registry has said who is there
        await asyncio.sleep(2 * KEEP_S)
        assert directory.workers() == (records[0],)
