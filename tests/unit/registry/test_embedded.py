import math

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from hypothesis.strategies import sampled_from

from neuron_di.errors import PeerRefused
from neuron_di.registry import EmbeddedRegistry, KeyChanged, KeyDeleted, LeaseId, Snapshot, embedded


async def test_a_watch_begins_with_a_snapshot_of_its_prefix_and_continues(registry):
    lease = await registry.grant(10)
    await registry.put("/a/1", b"1", lease)
    await registry.put("/b/1", b"x", lease)
    watch = registry.watch("/a/")
    assert await anext(watch) == Snapshot({"/a/1": b"1"})
    await registry.put("/b/2", b"x", lease)
    await registry.put("/a/2", b"2", lease)
    await registry.put("/a/1", b"3", lease)
    await registry.revoke(lease)
    events = [await anext(watch) for _ in range(4)]
    assert events[:2] == [KeyChanged("/a/2", b"2"), KeyChanged("/a/1", b"3")]
    assert events[2:] == [KeyDeleted("/a/1"), KeyDeleted("/a/2")]
    await watch.aclose()


async def test_a_watcher_that_falls_behind_gets_a_snapshot_again(registry):
    lease = await registry.grant(10)
    watch = registry.watch("/")
    assert await anext(watch) == Snapshot({})
    for index in range(embedded.HISTORY_MAX + 1):
        await registry.put("/a", str(index).encode(), lease)
    assert await anext(watch) == Snapshot({"/a": str(embedded.HISTORY_MAX).encode()})
    await registry.put("/b", b"", lease)
    assert await anext(watch) == KeyChanged("/b", b"")
    await watch.aclose()


async def test_a_lease_ends_unless_it_is_kept_alive(registry, clock):
    lease, other = await registry.grant(10), await registry.grant(10)
    await registry.put("/a", b"1", lease)
    await registry.put("/b", b"1", other)
    clock.s += 9
    assert await registry.keep_alive(lease) == 10
    clock.s += 9
    registry.expire()
    assert await anext(registry.watch("/")) == Snapshot({"/a": b"1"})
    assert await registry.keep_alive(other) == 0
    with pytest.raises(PeerRefused, match="unknown"):
        await registry.put("/b", b"1", other)
    registry.extend_all(10)
    clock.s += 10
    registry.expire()
    assert await registry.keep_alive(lease) == 10


async def test_a_key_that_moved_to_another_lease_survives_its_first(registry):
    former, latter = await registry.grant(10), await registry.grant(10)
    await registry.put("/a", b"1", former)
    await registry.put("/a", b"2", latter)
    await registry.revoke(former)
    assert await anext(registry.watch("/")) == Snapshot({"/a": b"2"})
    await registry.revoke(latter)
    await registry.revoke(latter)
    assert await anext(registry.watch("/")) == Snapshot({})


async def test_a_lease_of_another_registry_is_unknown(registry):
    for _ in range(3):
        await registry.grant(10)
    assert await registry.keep_alive(await EmbeddedRegistry().grant(10)) == 0
    assert await registry.keep_alive(LeaseId(1)) == 0


@pytest.mark.parametrize("ttl_s", [0, 0.5, -1, 3601, math.nan, math.inf])
async def test_lease_durations_have_bounds(registry, ttl_s):
    with pytest.raises(PeerRefused, match="a lease lasts"):
        await registry.grant(ttl_s)


async def test_keys_and_values_have_bounds(registry, monkeypatch):
    lease = await registry.grant(10)
    await registry.put("k" * 1024, b"v" * (64 << 10), lease)
    for key, value in (("", b""), ("k" * 1025, b""), ("é" * 513, b""), ("a", b"v" * 65537)):
        with pytest.raises(PeerRefused):
            await registry.put(key, value, lease)
    monkeypatch.setattr(embedded, "KEYS_MAX", 2)
    await registry.put("/2", b"", lease)
    await registry.put("/2", b"again", lease)
    with pytest.raises(PeerRefused, match="2 keys"):
        await registry.put("/3", b"", lease)
    monkeypatch.setattr(embedded, "LEASES_MAX", 1)
    with pytest.raises(PeerRefused, match="1 leases"):
        await registry.grant(10)


def run(coroutine):
    """Finish a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class RegistryMachine(RuleBasedStateMachine):
    """Against a model that knows only who put a key last and when each lease ends."""

    keys = sampled_from(["/a", "/b", "/c"])
    which = sampled_from(range(4))

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.registry = EmbeddedRegistry(lambda: self.now)
        self.leases = [LeaseId(-1)] * 4
        self.ends = {}
        self.owners = {}

    def end(self, lease):
        self.ends.pop(lease, None)
        self.owners = {key: owner for key, owner in self.owners.items() if owner != lease}

    @rule(which=which, ttl_s=sampled_from([1, 2, 5]))
    def grant(self, which, ttl_s):
        self.leases[which] = run(self.registry.grant(ttl_s))
        self.ends[self.leases[which]] = (self.now + ttl_s, ttl_s)

    @rule(which=which, key=keys)
    def put(self, which, key):
        lease = self.leases[which]
        if lease in self.ends:
            run(self.registry.put(key, str(lease).encode(), lease))
            self.owners[key] = lease
        else:
            with pytest.raises(PeerRefused):
                run(self.registry.put(key, b"", lease))

    @rule(which=which)
    def keep_alive(self, which):
        lease = self.leases[which]
        ttl_s = self.ends[lease][1] if lease in self.ends else 0
        assert run(self.registry.keep_alive(lease)) == ttl_s
        if ttl_s:
            self.ends[lease] = (self.now + ttl_s, ttl_s)

    @rule(which=which)
    def revoke(self, which):
        run(self.registry.revoke(self.leases[which]))
        self.end(self.leases[which])

    @rule(seconds=sampled_from([0.5, 1, 3]))
    def sweep(self, seconds):
        self.now += seconds
        self.registry.expire()
        for lease in [each for each, (ends, _) in self.ends.items() if ends <= self.now]:
            self.end(lease)

    @invariant()
    def agrees(self):
        self.registry.check_integrity()
        watch = self.registry.watch("/")
        try:
            watch.asend(None).send(None)
        except StopIteration as stop:
            snapshot = stop.value
        assert snapshot.values == {key: str(owner).encode() for key, owner in self.owners.items()}


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=100, deadline=None)
