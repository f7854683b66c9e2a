"""No lease is left behind, whenever the registry fails or the worker ends."""

import asyncio
import logging

import pytest

from neuron_di.clock import now_s
from neuron_di.errors import PeerTimeout
from neuron_di.registry import Announcer, Directory, EmbeddedRegistry, announcer
from neuron_di.registry.announcer import ANNOUNCE_TTL_S
from neuron_di.registry.directory import KEEP_LEASES
from neuron_di.testing.virtual_loop import VirtualLoop
from neuron_di.wire import encode_json


class Faulty(EmbeddedRegistry):
    """Fails the first calls of a kind, as a registry that is slow does."""

    def __init__(self, clock, **failing):
        super().__init__(clock)
        self.failing = failing
        self.num_granted = 0
        self.is_put = asyncio.Event()

    def _fail(self, call):
        if self.failing.get(call, 0) > 0:
            self.failing[call] -= 1
            raise PeerTimeout("an injected fault")

    async def grant(self, ttl_s):
        self._fail("grant")
        self.num_granted += 1
        return await super().grant(ttl_s)

    async def put(self, key, value, lease):
        self._fail("put")
        await super().put(key, value, lease)
        self.is_put.set()

    async def revoke(self, lease):
        self._fail("revoke")
        await super().revoke(lease)


@pytest.mark.parametrize(
    ("failing", "num_granted"), [({"put": 2}, 1), ({"grant": 2}, 1), ({"put": 1, "grant": 1}, 1)]
)
async def test_a_lease_that_was_granted_is_used(clock, make_record, failing, num_granted):
    registry = Faulty(clock, **failing)
    async with Announcer(registry, make_record), asyncio.timeout(30):
        await registry.is_put.wait()
        assert registry.num_granted == num_granted
        assert len(registry._leases) == 1
    assert registry._leases == {}
    registry.check_integrity()


async def test_a_lease_that_ended_meanwhile_is_replaced(clock, make_record):
    registry = Faulty(clock, put=1)
    async with Announcer(registry, make_record), asyncio.timeout(30):
        while registry.failing["put"]:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.001)
        clock.s += 1000.0
        registry.expire()
        await registry.is_put.wait()
        assert registry.num_granted == 2
    assert registry._leases == {}


async def test_a_grant_that_is_under_way_at_the_end_is_revoked(clock, make_record):
    class Slow(Faulty):
        asked = asyncio.Event()
        goes_on = asyncio.Event()

        async def grant(self, ttl_s):
            self.asked.set()
            await self.goes_on.wait()
            return await super().grant(ttl_s)

    registry = Slow(clock)
    async with Announcer(registry, make_record) as announcer:
        await registry.asked.wait()
        withdrawing = asyncio.create_task(announcer.withdraw(30.0))
        await asyncio.sleep(0)
        registry.goes_on.set()
        assert await withdrawing
    assert registry.num_granted == 1
    assert registry._leases == {}


async def test_whether_it_was_withdrawn_is_known(clock, make_record):
    registry = Faulty(clock, revoke=1)
    async with Announcer(registry, make_record) as announcer, asyncio.timeout(30):
        await registry.is_put.wait()
        assert not await announcer.withdraw(1.0)
        assert len(registry._leases) == 1, "it ends by itself"


def test_an_outage_of_ten_minutes_is_said_now_and_then(clock, make_record, caplog):
    """Tried again every two seconds, and not logged each time."""

    async def outage():
        async with Announcer(registry, make_record):
            await asyncio.sleep(600)

    announcer._trouble_log._events.clear()  # what other tests wrote, at other times
    registry = Faulty(clock, grant=10_000)
    loop = VirtualLoop(callbacks_max=10**6)
    loop.run_until_complete(outage())
    loop.close()
    logging.disable(logging.NOTSET)  # which closing turned off
    lines = [each.event_fields for each in caplog.records if each.msg == "announce_failed"]
    assert 10_000 - registry.failing["grant"] > 290
    assert 10 <= len(lines) <= 22
    assert sum(each.get("unwritten", 0) for each in lines) > 200


def on_virtual_time(scenario):
    loop = VirtualLoop(callbacks_max=10**6)
    try:
        loop.run_until_complete(scenario())
        assert loop.errors == []
    finally:
        loop.close()
        logging.disable(logging.NOTSET)  # which closing turned off


def test_a_record_that_somebody_deleted_or_overwrote_is_put_again(make_record):
    """Although its lease lives, and long before a directory gives its worker up."""
    record = make_record()
    key = record.key()

    async def scenario():
        registry = EmbeddedRegistry()
        other = await registry.grant(3600)
        async with Announcer(registry, lambda: record), Directory(registry) as directory:
            await asyncio.sleep(1)
            for value in (b"junk", encode_json(make_record(worker_id="somebody-else"))):
                await registry.put(key, value, other)  # under another's lease, too
                await asyncio.sleep(ANNOUNCE_TTL_S)
                assert registry._entries[key].value == encode_json(record)
                assert registry._entries[key].lease != other
            await registry.put(key, b"junk", other)
            await registry.revoke(other)
            assert registry._entries == {}
            await asyncio.sleep(ANNOUNCE_TTL_S)
            assert key in registry._entries
            assert record in directory.workers()
        assert registry._entries == {}

    assert announcer.BEATS_PER_PUT / announcer.BEATS_PER_TTL * 2 < KEEP_LEASES
    on_virtual_time(scenario)


def test_putting_a_record_again_is_no_news(make_record):
    async def scenario():
        registry = EmbeddedRegistry()
        async with Announcer(registry, make_record):
            await asyncio.sleep(1)
            version = registry.version
            await asyncio.sleep(600)
            assert registry.version == version

    on_virtual_time(scenario)


def test_an_error_of_any_kind_is_survived_and_told(make_record):
    class Odd(EmbeddedRegistry):
        num_failed = 0

        async def keep_alive(self, lease):
            if self.num_failed < 3:
                self.num_failed += 1
                raise OSError("no PeerError")
            return await super().keep_alive(lease)

    async def scenario():
        registry = Odd()
        async with Announcer(registry, make_record) as announcer:
            await asyncio.sleep(1)
            assert announcer.trouble() == ""
            await asyncio.sleep(ANNOUNCE_TTL_S / 2)
            assert "the announcer failed (OSError)" in announcer.trouble()
            await asyncio.sleep(60)
            assert registry.num_failed == 3
            registry.expire()
            assert make_record().key() in registry._entries
            await asyncio.sleep(60)
            assert announcer.trouble() == ""

    on_virtual_time(scenario)


def test_a_registry_that_cannot_be_reached_is_told(make_record):
    async def scenario():
        registry = Faulty(now_s, grant=3)
        async with Announcer(registry, make_record) as announcer:
            await asyncio.sleep(0.2)
            assert announcer.trouble() == "an injected fault"
            await asyncio.sleep(10)
            assert announcer.trouble() == ""

    on_virtual_time(scenario)
