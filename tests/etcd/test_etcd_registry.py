"""The registry at a real etcd: what it says, and that it says it again after every failure."""

import asyncio
import contextlib
from contextlib import aclosing

import pytest
from etcd_kit import running_etcd
from watching import Watching, until
from worker_record import make_record

from neuron_di.errors import PeerError, PeerGone, PeerRefused, PeerTimeout
from neuron_di.etcd.client import EtcdClient
from neuron_di.etcd.key_value import KeyRange
from neuron_di.etcd.registry import PAUSE_S_MAX, PAUSE_S_MIN, EtcdRegistry
from neuron_di.etcd.selection import JUNK_MAX
from neuron_di.etcd.watch_stream import ANSWER_S, QUIET_S
from neuron_di.registry import KeyChanged, Snapshot
from neuron_di.wire import RECORD_BYTES_MAX, encode_json

KEY = "/workers/decode/127.0.0.1/4000"
NEVER_S = 1e6  # a watch that lists anew did so for another reason


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
    return EtcdRegistry(client, "/neuron-di", relist_s=NEVER_S)


async def put_until_it_works(registry, key, value, lease):
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(PeerGone, PeerTimeout):
                await registry.put(key, value, lease)
                return


async def test_keys_live_as_long_as_their_lease(registry, client):
    async with Watching(registry) as seen:
        lease = await registry.grant(30)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: seen.view == {KEY: b"one"})
        assert await registry.keep_alive(lease) == 30
        assert (await client.get(b"/neuron-di" + KEY.encode())).value == b"one"
        await registry.put(KEY, b"two", lease)
        await registry.revoke(lease)
        await registry.revoke(lease)  # unknown by now: nothing happens
        await seen.until(lambda: not seen.view)
        assert await registry.keep_alive(lease) == 0
        with pytest.raises(PeerRefused, match="lease"):
            await registry.put(KEY, b"three", lease)
        other = await registry.grant(2)
        await registry.put(KEY, b"four", other)
        await seen.until(lambda: seen.num_deleted == 2)  # nobody keeps it alive
        assert (seen.num_snapshots, seen.view, registry.trouble()) == (1, {}, "")


async def test_a_watch_begins_no_later_than_now_and_repeats_nothing(registry, client, monkeypatch):
    starts = []
    watch = client.watch

    def noted(keys, start_revision):
        starts.append(start_revision)
        return watch(keys, start_revision)

    monkeypatch.setattr(client, "watch", noted)
    lease = await registry.grant(30)
    await registry.put(KEY, b"one", lease)
    listed = (await client.get(b"/neuron-di" + KEY.encode())).mod_revision
    async with Watching(registry) as seen:
        await seen.until(lambda: seen.view == {KEY: b"one"})
        await registry.put(KEY, b"two", lease)
        await seen.until(lambda: seen.view == {KEY: b"two"})
    # Newer members answer no question of a stream that begins later.
    assert starts == [listed]
    assert seen.events == [Snapshot({KEY: b"one"}), KeyChanged(KEY, b"two")]


async def test_what_a_registry_refuses(registry):
    for ttl_s in (0.5, 4000):
        with pytest.raises(PeerRefused, match="lease lasts"):
            await registry.grant(ttl_s)
    lease = await registry.grant(1)
    for key in ("", "workers/a", "/" + "k" * 1024):
        with pytest.raises(PeerRefused, match="a key"):
            await registry.put(key, b"", lease)
    with pytest.raises(PeerRefused, match="at most"):
        await registry.put(KEY, b"v" * (RECORD_BYTES_MAX + 1), lease)
    await registry.put(KEY, b"v" * RECORD_BYTES_MAX, lease)


async def test_a_cluster_sees_no_others_keys(etcd, client, registry):
    near = EtcdRegistry(client, "/neuron-di-2")
    top = EtcdRegistry(client, "/")
    async with Watching(registry) as seen, Watching(near) as seen_near, Watching(top) as seen_top:
        lease = await registry.grant(10)
        for value, each in ((b"1", registry), (b"2", near), (b"3", top)):
            await each.put(KEY, value, lease)
        await seen_top.until(lambda: bool(seen_top.view))
        await seen.until(lambda: bool(seen.view))
        await seen_near.until(lambda: bool(seen_near.view))
    views = (seen.view, seen_near.view, seen_top.view)
    assert views == ({KEY: b"1"}, {KEY: b"2"}, {KEY: b"3"})


async def test_killed_and_back_it_goes_on_where_it_was(etcd, registry, client):
    async with Watching(registry) as seen:
        lease = await registry.grant(10)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: bool(seen.view))
        etcd.members[0].kill()
        with pytest.raises(PeerError):
            await registry.put(KEY, b"lost", lease)
        etcd.members[0].launch()
        await put_until_it_works(registry, KEY, b"two", lease)
        await seen.until(lambda: seen.view == {KEY: b"two"})
        assert await registry.keep_alive(lease) == 10  # etcd has kept it
        assert seen.num_deleted == 0
        # It resumed, and listed once more after that: a new etcd can look like the old one.
        await seen.until(lambda: seen.num_snapshots == 2)
        assert (seen.view, registry.num_lists) == ({KEY: b"two"}, 2)


async def test_an_outage_is_no_busy_loop(etcd, registry, client, monkeypatch):
    """A try, and then a pause that doubles: of the watch, and of a call until its deadline."""
    pauses = []
    sleep = asyncio.sleep

    async def note(duration_s):
        if duration_s not in (0.02, 0):  # the tests' own, and turns of the loop
            pauses.append(duration_s)
        await sleep(duration_s)

    async with Watching(registry):
        before = client.num_attempts
        monkeypatch.setattr(asyncio, "sleep", note)
        etcd.members[0].kill()
        await until(lambda: registry.num_breaks >= 5)
        assert client.num_attempts - before <= registry.num_breaks + 1
        assert pauses[:5] == [PAUSE_S_MIN * 2**n for n in range(4)] + [PAUSE_S_MAX]
        assert registry.trouble()
    before, pauses[:] = client.num_attempts, []
    with pytest.raises((PeerGone, PeerTimeout)):
        await client.get(b"/")
    assert client.num_attempts - before <= len(pauses) + 1
    expected = [0.05, 0.1, 0.2, 0.4, *[0.5] * len(pauses)]
    assert pauses[:-1] == expected[: len(pauses) - 1]  # the last one ends at the deadline


async def test_frozen_past_the_ttl_it_is_noticed_and_all_come_back(etcd, registry, client):
    async with Watching(registry) as seen:
        lease = await registry.grant(2)
        await registry.put(KEY, b"one", lease)
        await seen.until(lambda: bool(seen.view))
        etcd.members[0].freeze()
        assert QUIET_S + ANSWER_S <= 7
        with pytest.raises(PeerTimeout):
            await registry.keep_alive(lease)
        await until(lambda: registry.num_breaks > 0)  # the watch itself has noticed
        assert seen.view == {KEY: b"one"}, "while etcd is silent, nothing is said"
        etcd.members[0].thaw()
        await seen.until(lambda: not seen.view)  # every lease ended at once
        assert await registry.keep_alive(lease) == 0
        await registry.put(KEY, b"two", await registry.grant(10))
        await seen.until(lambda: seen.view == {KEY: b"two"})


@pytest.mark.parametrize("num_puts_after", [0, 20], ids=["revision-back", "revision-ahead"])
async def test_wiped_it_is_listed_anew(etcd, registry, client, num_puts_after):
    """Also where the new one has more revisions than the old one: nothing in them says so."""
    async with Watching(registry) as seen:
        lease = await registry.grant(10)
        for number in range(5):
            await registry.put(f"{KEY}{number}", b"old", lease)
        await seen.until(lambda: len(seen.view) == 5)
        await etcd.restart(wiped=True)
        for number in range(num_puts_after):
            await put_until_it_works(client_registry(client), f"/other/{number}", b"", 0)
        assert await registry.keep_alive(lease) == 0
        await registry.put(KEY, b"new", await registry.grant(10))
        await seen.until(lambda: seen.view == {KEY: b"new"})


def client_registry(client):
    return EtcdRegistry(client, "/foreign")


class HeldClient(EtcdClient):
    """A client whose watches begin when they may."""

    def __init__(self, addresses):
        super().__init__(addresses)
        self.may_watch = asyncio.Event()
        self.may_watch.set()

    async def watch(self, keys, start_revision=0, *, with_previous=False):
        await self.may_watch.wait()
        async with aclosing(super().watch(keys, start_revision)) as batches:
            async for batch in batches:
                yield batch


async def test_compacted_under_a_broken_watch_it_is_listed_anew(etcd, client):
    async with HeldClient(etcd.addresses) as held:
        registry = EtcdRegistry(held, "/neuron-di", relist_s=NEVER_S)
        async with Watching(registry) as seen:
            lease = await registry.grant(20)
            await registry.put(KEY, b"one", lease)
            await client.put(b"/neuron-di/workers/gone", b"soon")
            await seen.until(lambda: len(seen.view) == 2)
            held.may_watch.clear()
            await etcd.restart()
            await client.delete(KeyRange(b"/neuron-di/workers/gone"))
            revision = await client.put(b"/neuron-di" + KEY.encode(), b"two", lease=lease)
            await client.put(b"/neuron-di/workers/last", b"x")
            await client.compact(revision)
            held.may_watch.set()
            await seen.until(lambda: set(seen.view) == {KEY, "/workers/last"})
            assert (seen.num_snapshots, seen.num_deleted) == (2, 0)
            assert seen.view[KEY] == b"two"


async def test_garbage_and_too_much_are_dropped_and_counted(registry, client):
    await client.put(b"/neuron-di/workers/\xff\xfe", b"no text")
    await client.put(b"/neuron-di/workers/../x", b"{]")
    await client.put(b"/neuron-di/workers/large", b"v" * (1 << 20))
    await asyncio.gather(*(client.put(b"/neuron-di/workers/f/%d" % i, b"x") for i in range(2500)))
    async with Watching(registry) as seen:
        assert len(seen.view) == JUNK_MAX
        assert seen.view["/workers/../x"] == b"{]"  # whose value it is, is for the directory
        assert registry.num_dropped == 2 + 2501 - JUNK_MAX
        await client.put(b"/neuron-di/workers/f/0", b"v" * (1 << 20))
        await seen.until(lambda: len(seen.view) == JUNK_MAX - 1)
        await client.put(b"/neuron-di/workers/\xff\xfd", b"no text either")
        await client.put(b"/neuron-di/workers/decode/a", b"fine")
        await seen.until(lambda: "/workers/decode/a" in seen.view)
        assert registry.num_dropped == 4 + 2501 - JUNK_MAX


async def test_more_keys_than_the_limit(registry, client, monkeypatch):
    monkeypatch.setattr("neuron_di.etcd.registry.KEYS_MAX", 300)
    monkeypatch.setattr("neuron_di.etcd.selection.KEYS_MAX", 300)
    records = [make_record(4000 + number) for number in range(321)]
    pairs = [(b"/neuron-di" + each.key().encode(), encode_json(each)) for each in records]
    await asyncio.gather(*(client.put(key, value) for key, value in pairs[:320]))
    async with Watching(registry) as seen:
        assert (len(seen.view), registry.num_dropped) == (300, 20)
        await client.put(*pairs[320])
        await client.delete(KeyRange(pairs[0][0]))
        await seen.until(lambda: len(seen.view) == 299)
        assert registry.num_dropped == 21


async def test_sixteen_at_once(etcd, registry, client):
    async def live(number):
        key = f"/workers/prefill/127.0.0.1/{number}"
        for _ in range(10):
            lease = await registry.grant(60)
            await registry.put(key, b"x", lease)
            assert await registry.keep_alive(lease) == 60
            await registry.revoke(lease)
        await registry.put(key, b"stays", await registry.grant(60))

    async with Watching(registry) as seen:
        await asyncio.gather(*map(live, range(16)))
        await seen.until(lambda: list(seen.view.values()) == [b"stays"] * 16)
    assert registry.num_breaks == 0
