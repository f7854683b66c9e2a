"""Two workers of one role at one address share a key: neither drives the other out of the view."""

import asyncio

import msgspec
from test_directory_vanished import Told, ids, snapshot, virtual

from neuron_di.registry import Directory, KeyChanged, KeyDeleted
from neuron_di.registry.directory import KEEP_S
from neuron_di.types import Incarnation, WorkerId
from neuron_di.wire import encode_json


def changed(record):
    return KeyChanged(record.key(), encode_json(record))


def rival_of(record, name="rival"):
    return msgspec.structs.replace(
        record, worker_id=WorkerId(name), incarnation=Incarnation(f"{name}-life")
    )


@virtual
async def test_both_are_in_the_view_until_somebody_knows_who_is_there(make_record):
    registry = Told()
    record, other = make_record(4001), make_record(4002)
    rival = rival_of(record)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record, other), changed(rival))
        assert ids(directory) == ["prefill-4001", "rival", "prefill-4002"]
        for _ in range(50):  # each of them puts its record again and again
            await registry.say(changed(record), changed(rival))
            assert ids(directory) == ["prefill-4001", "rival", "prefill-4002"]
            assert len(directory.vanished()) == 1
        directory.drop(rival, "it is another process' address")
        assert rival in directory.workers()  # it has the key
        await registry.say(changed(record))
        directory.drop(rival, "rival is not there: another process is, prefill-4001")
        assert directory.workers() == (record, other)
        [refused] = directory.refused()
        assert (refused.worker_id, refused.key) == ("rival", record.key())
        assert "another process is, prefill-4001" in refused.reason


@virtual
async def test_the_one_that_lost_its_key_can_be_dropped_or_grows_old(make_record):
    registry = Told()
    record = make_record(4001)
    rival = rival_of(record)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record), changed(rival))
        directory.drop(record, "down")
        assert directory.workers() == (rival,)
        await registry.say(changed(record), changed(rival), KeyDeleted(record.key()))
        assert [each.worker_id for each in directory.workers()] == ["prefill-4001", "rival"]
        await asyncio.sleep(2 * KEEP_S)
        assert directory.workers() == ()


@virtual
async def test_a_restart_is_no_rival(make_record):
    registry = Told()
    record = make_record(4001)
    again = msgspec.structs.replace(record, incarnation=Incarnation("j"))
    async with Directory(registry) as directory:
        await registry.say(snapshot(record), changed(again))
        assert directory.workers() == (again,)
        assert directory.vanished() == {}


@virtual
async def test_one_that_drained_is_not_kept_against_its_successor(make_record):
    registry = Told()
    record = make_record(4001, state="draining")
    rival = rival_of(record)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record), changed(rival))
        assert directory.workers() == (rival,)


@virtual
async def test_many_names_at_one_key_leave_one_behind(make_record):
    registry = Told()
    record = make_record(4001)
    async with Directory(registry) as directory:
        await registry.say(snapshot(record))
        for number in range(500):
            await registry.say(changed(rival_of(record, f"rival-{number}")))
        assert ids(directory) == ["rival-497", "rival-498", "rival-499"]
        assert directory._num_keys.total() == 1


@virtual
async def test_a_restored_registry_drives_nobody_out(make_record):
    registry = Told()
    record = make_record(4001, started_unix_s=200.0)
    former = msgspec.structs.replace(
        record, incarnation=Incarnation("former"), started_unix_s=100.0
    )
    async with Directory(registry) as directory:
        await registry.say(snapshot(former), changed(record))
        assert directory.workers() == (record,)
        await registry.say(snapshot(former))
        assert sorted(r.incarnation for r in directory.workers()) == sorted(
            each.incarnation for each in (former, record)
        )
        await registry.say(changed(record))  # it says so again and again
        assert directory.workers() == (record,)
