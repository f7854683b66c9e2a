"""While the registry is away, a worker that was restarted is known by its own answer."""

import asyncio

import msgspec
import pytest
from test_directory_vanished import Told, snapshot, virtual

from neuron_di.registry import Directory, KeyChanged, KeyDeleted
from neuron_di.registry.directory import KEEP_S
from neuron_di.types import Incarnation
from neuron_di.wire import encode_json


def restarted(record, **changes):
    fields = {"incarnation": Incarnation("j"), "pid": 2, "signal_port": 5001}
    return msgspec.structs.replace(record, **(fields | changes))


@virtual
async def test_it_takes_the_place_of_its_predecessor_until_the_registry_speaks(make_record):
    registry = Told()
    before, other = make_record(4001), make_record(4002)
    after = restarted(before)
    async with Directory(registry) as directory:
        await registry.say(snapshot(before, other))
        assert not directory.adopt(before, after)  # the registry will tell
        registry.words = "the registry does not answer"
        epoch = directory.epoch
        assert directory.adopt(before, after)
        assert directory.epoch == epoch + 1
        assert directory.workers() == (after, other)
        assert not directory.adopt(before, after)  # once is enough
        later = restarted(after, incarnation=Incarnation("k"))
        assert directory.adopt(after, later)
        assert directory.workers() == (later, other)
        registry.words = ""
        await registry.say(snapshot(before, other))  # a ghost's lease was renewed
        assert directory.workers() == (later, other)
        await registry.say(snapshot(after, other))  # it had announced itself before it ended
        assert directory.workers() == (later, other)
        await registry.say(snapshot(later, other))
        assert directory.workers() == (later, other)
        assert len(directory._replaced) == 0
        await registry.say(snapshot(before, other))  # from now on the registry's word counts
        assert directory.workers() == (before, other)


def changed(record):
    return KeyChanged(record.key(), encode_json(record))


@virtual
async def test_what_the_registry_had_before_says_nothing_for_a_while(make_record):
    registry = Told()
    before, after = make_record(4001), restarted(make_record(4001))
    async with Directory(registry) as directory:
        await registry.say(snapshot(before))
        registry.words = "away"
        assert directory.adopt(before, after)
        await asyncio.sleep(3600)  # not while nobody can be heard
        registry.words = ""
        for _ in range(3):
            await registry.say(changed(before), snapshot(before))
            assert directory.workers() == (after,)
        await asyncio.sleep(KEEP_S)
        await registry.say(snapshot(before))  # it has had the time to announce itself
        assert directory.workers() == (before,)


@pytest.mark.parametrize("word", ["deleted", "junk", "listed without it"])
@virtual
async def test_another_word_of_the_registry_ends_that(make_record, word):
    registry = Told()
    before, after = make_record(4001), restarted(make_record(4001))
    words = {
        "deleted": KeyDeleted(before.key()),
        "junk": KeyChanged(before.key(), b"junk"),
        "listed without it": snapshot(),
    }
    async with Directory(registry) as directory:
        await registry.say(snapshot(before))
        registry.words = "away"
        assert directory.adopt(before, after)
        registry.words = ""
        await registry.say(words[word])
        assert directory.workers() == (after,)  # whose key has vanished now
        assert len(directory._replaced) == 0
        await registry.say(changed(before))
        assert directory.workers() == (before,)


@virtual
async def test_also_where_the_key_had_vanished_before(make_record):
    registry = Told()
    before = make_record(4001)
    async with Directory(registry) as directory:
        await registry.say(snapshot(before), KeyDeleted(before.key()))
        registry.words = "away"
        assert directory.adopt(before, restarted(before))
        assert directory.workers() == (restarted(before),)
        assert directory.vanished() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "other"},
        {"role": "decode"},
        {"host": "127.0.0.2"},
        {"api_port": 4009},
        {"signal_host": "127.0.0.2"},
        {"model": "other"},
        {"model_digest": "other"},
        {"layout_digest": "other"},
        {"numerics": "other"},
        {"transfer": "other"},
        {"state": "draining"},
        {"protocol_version": 99},
        {"signal_port": 22},  # no port of a worker
        {"incarnation": Incarnation("i")},
    ],
)
@virtual
async def test_whatever_else_answers_there_is_not_taken(make_record, changes):
    registry = Told()
    before = make_record(4001)
    async with Directory(registry) as directory:
        await registry.say(snapshot(before))
        registry.words = "away"
        assert not directory.adopt(before, restarted(before, **changes))
        assert directory.workers() == (before,)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual
async def test_a_key_that_others_would_have_to_believe_waits_for_the_registry(make_record, role):
    registry = Told()
    before = make_record(4001, role=role, signal_port=0, signal_key="k" * 40)
    after = restarted(before, signal_port=0, signal_key="n" * 40)
    async with Directory(registry) as directory:
        await registry.say(snapshot(before))
        registry.words = "away"
        assert not directory.adopt(before, after)
        plain = msgspec.structs.replace(before, signal_key=None)
        await registry.say(snapshot(plain))
        assert directory.adopt(plain, restarted(plain, signal_port=0))


@virtual
async def test_nobody_is_adopted_who_has_no_place(make_record):
    registry = Told()
    before = make_record(4001)
    async with Directory(registry) as directory:
        await registry.say(snapshot())
        registry.words = "away"
        assert not directory.adopt(before, restarted(before))
        assert directory.workers() == ()
