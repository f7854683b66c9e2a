"""What peers can bring about at a LaneSet is bounded, and told in few words."""

import asyncio
import dataclasses
import logging
import threading

import msgspec
import pytest
from transfer_kit import LAYOUT, BareDecode, new_incarnation, until

from neuron_di.errors import PeerGone, PeerRefused, RemoteProtocolError
from neuron_di.kv import KvLayout, Memory, resharding
from neuron_di.transfer import ShmEngine, lanes
from neuron_di.transfer.geometry import layout_fields, peer_layout
from neuron_di.transfer.lanes import LaneSet
from neuron_di.wire import KvMapInit, Offer, Refused

LONG = msgspec.Raw(msgspec.msgpack.encode({"type": "X" * 1_000_000}))


class Wordy(ShmEngine):
    """Repeats at length what its peer says."""

    def connect(self, peer, region, layout):
        raise PeerGone("y" * 100_000)

    accept = connect


async def test_a_region_that_cannot_be_read_is_not_repeated(cluster):
    with pytest.raises(RemoteProtocolError) as raised:
        Offer(engine="shm", region=LONG).read()
    assert len(raised.value.message) < 300
    decode = cluster.decode()
    with pytest.raises(RemoteProtocolError) as raised:
        decode.lanes.connect(new_incarnation(), [Offer(engine="shm", region=LONG)], LAYOUT)
    assert len(raised.value.message) <= lanes.REASON_CHARS_MAX


async def test_an_engines_words_are_cut(cluster):
    decode = cluster.decode(make_transfer=Wordy)
    offers = decode.lanes.offers(new_incarnation())
    with pytest.raises(PeerGone) as raised:
        decode.lanes.connect(new_incarnation(), offers, LAYOUT)
    assert len(raised.value.message) == lanes.REASON_CHARS_MAX


async def test_who_comes_back_and_back_does_not_fill_the_log(cluster, caplog):
    caplog.set_level(logging.INFO)
    prefill = cluster.prefill(make_transfer=Wordy)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        for _ in range(50):
            init = KvMapInit(
                layout=layout_fields(LAYOUT), offers=prefill.lanes.offers(new_incarnation())
            )
            assert isinstance(await peer.ask(init), Refused)
    said = [each.getMessage() for each in caplog.records if "lane_not_acc" in each.getMessage()]
    assert 0 < len(said) < 10
    assert max(map(len, said)) < lanes.REASON_CHARS_MAX + 100


async def test_who_failed_last_is_suspected_longest(cluster, monkeypatch):
    monkeypatch.setattr(lanes, "SUSPECTS_MAX", 2)
    prefill, decode = cluster.prefill(), cluster.decode()
    await decode.buffer(prefill).connect()
    lane = decode.buffer(prefill).lane
    first, second, third = (dataclasses.replace(lane, peer=new_incarnation()) for _ in range(3))
    for each in (first, second, first, third):
        decode.lanes.suspect(each, PeerGone("cut"))
    assert [peer for peer, _ in decode.lanes._suspects] == [first.peer, third.peer]


async def test_no_engine_is_told_of_one_memory_twice():
    class Engine:
        def __init__(self, name, failures=()):
            self.name, self.told, self.failures = name, [], list(failures)

        def register(self, memory):
            if self.failures:
                raise self.failures.pop()
            self.told.append(memory)

    one, other = Engine("one"), Engine("other", [PeerGone("not now")])
    both, memory = LaneSet([one, other]), Memory(4096, 1)
    with pytest.raises(PeerGone):
        both.register(memory)
    both.register(memory)
    assert one.told == other.told == [memory]


def test_a_layout_that_cannot_be_placed_is_refused_at_connect(monkeypatch):
    own = KvLayout(num_layers=1, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
    fields = layout_fields(dataclasses.replace(own, block_size=32))
    assert peer_layout(fields, own, converts=False).block_size == 32
    monkeypatch.setattr(resharding, "_BLOCK_BYTES_MAX", own.block_bytes)
    fields = layout_fields(dataclasses.replace(own, block_size=64))
    with pytest.raises(PeerRefused, match="KV blocks of"):
        peer_layout(fields, own, converts=False)


async def test_who_was_forgotten_while_it_was_accepted_keeps_nothing(cluster):
    may_accept = threading.Event()

    class Slow(ShmEngine):
        def accept(self, peer, region, layout):
            may_accept.wait(20.0)

    prefill = cluster.prefill(make_transfer=Slow, peer_silence_s=0.05, kv_lease_s=0.1)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        offers = prefill.lanes.offers(peer.incarnation)
        peer.send(KvMapInit(layout=layout_fields(LAYOUT), offers=offers))
        await until(lambda: prefill.buffer._accepting)
        await until(lambda: not prefill.buffer.peers)
    may_accept.set()
    await until(lambda: not prefill.buffer._accepting)
    await asyncio.sleep(0)
    assert prefill.lanes._accepted == {}
