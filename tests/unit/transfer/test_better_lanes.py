"""A pair whose lane is a fallback finds its way back to the better one, and nobody notices."""

import threading

import pytest
from lane_kit import FAST, SAFE, engines, lane_of
from transfer_kit import LAYOUT, LeapClock, end_of, new_incarnation, until

from neuron_di.clock import use_clock
from neuron_di.errors import PeerGone, PeerTimeout
from neuron_di.transfer import lanes
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.types import BlockId


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill(make_transfer=FAST, more_engines=[SAFE])


@pytest.fixture
async def decode(cluster):
    return cluster.decode(make_transfer=FAST, more_engines=[SAFE])


@pytest.fixture
async def pair(cluster):
    """Two engines of a decode worker, and what a prefill worker offers."""
    prefill = cluster.prefill(make_transfer=FAST, more_engines=[SAFE])
    decode = cluster.decode(make_transfer=FAST, more_engines=[SAFE])
    peer = prefill.local.incarnation
    prefill.lanes.accept(decode.local.incarnation, decode.lanes.offers(peer), LAYOUT)
    return decode.lanes, peer, prefill.lanes.offers(decode.local.incarnation)


async def fallen_back(prefill, decode, monkeypatch, second="safe"):
    """A link by the second engine, whose first would work by now."""
    monkeypatch.setattr(lanes, "RETRY_S", 0.0)
    engines(decode)["fast"].fails_with = PeerTimeout("no wire")
    link = decode.buffer(prefill)
    await link.connect()
    assert link.lane.name == second
    engines(decode)["fast"].fails_with = None
    return link


async def test_requests_go_by_the_better_lane_again_once_it_works(prefill, decode, monkeypatch):
    first = await fallen_back(prefill, decode, monkeypatch)
    prefill.park()
    assert (await decode.hand_over(prefill, [7, 2])).engine == "safe"  # and wait for nothing
    await until(lambda: decode.buffer(prefill) is not first)
    assert lane_of(decode, prefill) == ("fast", "fast: chosen", False)
    await until(lambda: first.is_broken)  # it had nothing left to do
    assert decode.connector.buffers() == [decode.buffer(prefill)]
    prefill.park("second", (5, 6))
    token = await decode.hand_over(prefill, [7, 2], "second")
    assert (token.error(), token.engine) == (None, "fast")
    # What was in use was not touched: connecting anew would end its transfers.
    assert len(engines(decode)["safe"].connected) == 1
    assert len(engines(prefill)["safe"].accepted) == 1


async def test_what_waits_for_its_kv_gets_it_by_the_lane_it_began_with(
    prefill, decode, monkeypatch
):
    first = await fallen_back(prefill, decode, monkeypatch)
    ready = prefill.park()
    await decode.lookup(prefill)
    await until(lambda: decode.buffer(prefill) is not first)
    prefill.park("second", (5, 6))
    assert (await decode.hand_over(prefill, [3, 4], "second")).engine == "fast"
    token = await end_of(first.pull(ready, [BlockId(7), BlockId(2)]))
    assert (token.error(), token.engine) == (None, "safe")
    await until(lambda: first.is_broken)


async def test_a_lane_that_still_does_not_work_disturbs_nobody(prefill, decode, monkeypatch):
    link = await fallen_back(prefill, decode, monkeypatch)
    fast = engines(decode)["fast"]
    fast.fails_with = PeerTimeout("no wire")
    changes = []
    decode.connector.on_change = changes.append
    for number in range(3):
        prefill.park(f"r{number}", (5, 6))
        assert (await decode.hand_over(prefill, [7, 2], f"r{number}")).engine == "safe"
        await until(lambda: decode.connector.buffers() == [link])
    assert len(fast.connected) > 1
    assert len(engines(decode)["safe"].connected) == 1
    assert changes == []
    assert decode.counters.num_fallbacks == 1


async def test_a_request_goes_on_where_there_is_no_descriptor_for_a_trial(
    prefill, decode, monkeypatch
):
    link = await fallen_back(prefill, decode, monkeypatch)

    def connect(*_, **__):
        raise PeerGone("no descriptors are left")

    monkeypatch.setattr(decode.connector._transport, "connect", connect)
    prefill.park()
    assert decode.buffer(prefill) is link
    assert (await decode.hand_over(prefill, [7, 2])).engine == "safe"
    assert decode.connector.buffers() == [link]


async def test_a_transfer_on_its_way_is_not_cut_off_by_the_better_lane(cluster, monkeypatch):
    prefill = cluster.prefill(make_transfer=FAST, more_engines=[TcpEngine])
    decode = cluster.decode(make_transfer=FAST, more_engines=[TcpEngine])
    monkeypatch.setattr(lanes, "RETRY_S", 0.0)
    engines(decode)["fast"].fails_with = PeerTimeout("no wire")
    first = decode.buffer(prefill)
    await first.connect()
    ready = prefill.park()
    await decode.lookup(prefill)
    engines(decode)["fast"].fails_with = None
    decode.buffer(prefill)
    await until(lambda: decode.buffer(prefill) is not first)
    token = await end_of(first.pull(ready, [BlockId(7), BlockId(2)]))
    assert (token.error(), token.engine) == (None, "tcp")
    await until(lambda: first.is_broken)
    await until(lambda: not engines(decode)["tcp"]._connected)
    prefill.park("second", (5, 6))
    assert (await decode.hand_over(prefill, [3, 4], "second")).engine == "fast"


@pytest.mark.parametrize("is_asked", [False, True])
async def test_a_link_that_breaks_while_a_better_one_is_tried(
    prefill, decode, monkeypatch, is_asked
):
    """Then that is the link, unless a request has made another one meanwhile."""
    first = await fallen_back(prefill, decode, monkeypatch)
    fast, may_connect = engines(decode)["fast"], threading.Event()
    monkeypatch.setattr(lanes, "RETRY_S", 1000.0)
    connect, held = fast.connect, [True]

    def connect_late(*args):
        if held and held.pop():
            may_connect.wait(30.0)
        connect(*args)

    fast.connect = connect_late
    assert decode.buffer(prefill) is first
    await until(lambda: not held)
    trial = decode.connector.buffers()[-1]
    first.close()
    link = trial
    if is_asked:
        link = decode.buffer(prefill)
        await link.connect()
        assert link is not trial
    may_connect.set()
    await until(lambda: trial.is_broken if is_asked else trial.is_connected)
    assert decode.connector.buffers() == [link]
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert (token.error(), token.engine) == (None, "fast")
    assert decode.buffer(prefill) is link


async def test_a_lane_is_tried_again_later_each_time(pair):
    own, peer, offers = pair
    by_name = {engine.name: engine for engine in own.engines}
    by_name["fast"].fails_with = PeerTimeout("no wire")
    lane = own.connect(peer, offers, LAYOUT)
    leaping = LeapClock()
    with use_clock(leaping):
        for wait_s in (60, 120, 240, 480, 960, 1920, 3600, 3600):
            leaping.leap(wait_s - 5)
            assert own.better_than(lane) is None
            leaping.leap(6)
            better = own.better_than(lane)
            assert [engine.name for engine in better.engines] == ["fast"]
            with pytest.raises(PeerTimeout):
                better.connect(peer, offers, LAYOUT)
            assert own.better_than(lane) is None
        own.disconnect(peer)  # the better lane may be what broke the link
        own.connect(peer, offers, LAYOUT)
        leaping.leap(3595)
        assert own.better_than(lane) is None
        leaping.leap(6)
        by_name["fast"].fails_with = None
        assert own.better_than(lane).connect(peer, offers, LAYOUT).is_fallback is False


async def test_only_a_fallback_has_something_better(pair, monkeypatch):
    monkeypatch.setattr(lanes, "RETRY_S", 0.0)
    own, peer, offers = pair
    best = own.connect(peer, offers, LAYOUT)
    assert own.better_than(best) is None
    own.suspect(best, PeerGone("cut"))
    fallback = own.connect(peer, offers, LAYOUT)
    assert fallback.is_fallback
    assert own.better_than(fallback) is None  # it failed a moment ago
    own._suspects.clear()
    assert own.better_than(fallback) is not None


async def test_what_is_put_off_is_bounded(pair, monkeypatch):
    monkeypatch.setattr(lanes, "SUSPECTS_MAX", 8)
    own, _, _ = pair
    for _ in range(20):
        own._put_off(new_incarnation())
    assert len(own._retries) == 8


async def test_the_first_engine_is_no_fallback_whatever_fails_behind_it(pair):
    own, peer, offers = pair
    fast, safe = own.engines
    own.suspect(own.connect(peer, offers, LAYOUT), PeerGone("cut"))
    safe.fails_with = PeerTimeout("no wire")
    lane = own.connect(peer, offers, LAYOUT)  # tried last, and taken all the same
    assert (lane.engine, lane.is_fallback) == (fast, False)
    assert lane.reason == "fast: chosen; safe: no wire"
    assert lane.verdicts == "fast: chosen; safe: peer_timeout"
    assert own.better_than(lane) is None


@pytest.mark.parametrize("breaks_trial", [False, True])
async def test_no_engine_stays_connected_that_no_link_uses(cluster, monkeypatch, breaks_trial):
    """Neither the fallback that broke during a trial nor the better lane of a trial that broke."""
    prefill = cluster.prefill(make_transfer=FAST, more_engines=[TcpEngine])
    decode = cluster.decode(make_transfer=FAST, more_engines=[TcpEngine])
    first = await fallen_back(prefill, decode, monkeypatch, second="tcp")
    fast, tcp = engines(decode)["fast"], engines(decode)["tcp"]
    connect, is_connecting, may_connect = fast.connect, threading.Event(), threading.Event()

    def connect_late(*args):
        is_connecting.set()
        may_connect.wait(30.0)
        connect(*args)

    fast.connect = connect_late
    decode.buffer(prefill)
    trial = decode.connector.buffers()[-1]
    assert trial is not first
    await until(is_connecting.is_set)
    (trial if breaks_trial else first).close()
    may_connect.set()
    kept, gone = (tcp._connected, fast._peers) if breaks_trial else (fast._peers, tcp._connected)
    await until(lambda: len(fast.connected) == 2 and list(kept) and not gone)
