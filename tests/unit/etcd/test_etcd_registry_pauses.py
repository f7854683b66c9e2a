"""How often a watch tries while etcd is away, on the virtual clock."""

import asyncio
from contextlib import aclosing

import pytest

from neuron_di.errors import PeerGone
from neuron_di.etcd.failures import HistoryGone, PermissionDenied
from neuron_di.etcd.key_value import KeyValue, Page
from neuron_di.etcd.registry import EtcdRegistry
from neuron_di.etcd.watch_stream import WatchBatch
from neuron_di.registry import Snapshot
from neuron_di.testing.virtual_loop import VirtualLoop, silenced

OUTAGE_S = 600.0


class ScriptedEtcd:
    """In place of a client: reachable, away, or ending every watch at once."""

    def __init__(self):
        self.failure = None
        self.ends_watches_by = None
        self.num_lists = 0
        self.num_watches = 0

    async def pages(self, keys):
        self.num_lists += 1
        if self.failure is not None:
            raise self.failure
        item = KeyValue(b"/neuron-di/workers/a", b"x", 1, 1, 1, 0)
        yield Page([item], revision=5, cluster_id=1, num_left=1)

    async def watch(self, keys, start_revision):
        self.num_watches += 1
        if self.failure is not None:
            raise self.failure
        while True:
            if self.ends_watches_by is not None:
                raise self.ends_watches_by
            yield WatchBatch((), revision=5, cluster_id=1, is_first=False, is_whole=True)
            await asyncio.sleep(2.0)
            if self.failure is not None:
                raise self.failure


@pytest.fixture
def followed():
    """(the scripted etcd, the registry, what a watch of it has said, the loop it runs on)."""
    loop = VirtualLoop()
    etcd, events = ScriptedEtcd(), []
    registry = EtcdRegistry(etcd, "/neuron-di")

    async def follow():
        async with aclosing(registry.watch("/workers/")) as said:
            async for event in said:
                events.append(event)  # noqa: PERF401 - seen as it comes

    def run(duration_s):
        async def wait():
            await asyncio.sleep(duration_s)

        loop.run_until_complete(wait())

    following = loop.create_task(follow())
    run(1.0)
    assert events == [Snapshot({"/workers/a": b"x"})]
    yield etcd, registry, events, run
    following.cancel()
    loop.run_until_complete(asyncio.wait([following]))
    assert loop.errors == []
    with silenced():
        loop.close()


def test_ten_minutes_away_nothing_is_said_and_little_tried(followed):
    etcd, registry, events, run = followed
    etcd.failure = PeerGone("etcd cannot be reached")
    run(OUTAGE_S)
    assert OUTAGE_S / 2 < etcd.num_lists + etcd.num_watches < OUTAGE_S + 10
    assert (len(events), registry.trouble()) == (1, "etcd cannot be reached")
    etcd.failure = None
    run(3.0)
    assert (events[-1], registry.trouble()) == (Snapshot({"/workers/a": b"x"}), "")
    before = etcd.num_lists
    run(OUTAGE_S)
    assert etcd.num_lists - before <= OUTAGE_S / 30 + 1  # as often as one lists anyway


def test_what_only_an_operator_can_mend_is_tried_less_often(followed):
    etcd, _, _, run = followed
    etcd.failure = PermissionDenied("permission denied")
    run(OUTAGE_S)
    assert etcd.num_lists + etcd.num_watches <= OUTAGE_S / 5 + 3


@pytest.mark.parametrize(
    "end", [PeerGone("it ended"), HistoryGone("compacted")], ids=["gone", "old"]
)
def test_watches_that_end_at_once_are_no_busy_loop(followed, end):
    etcd, _, _, run = followed
    etcd.ends_watches_by = end
    run(OUTAGE_S)
    assert etcd.num_watches <= OUTAGE_S + 10
    assert etcd.num_lists <= OUTAGE_S + 10
