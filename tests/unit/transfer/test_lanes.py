"""Which of several engines moves KV between two workers, and what happens when it fails."""

import dataclasses

import msgspec
import pytest
from lane_kit import FAST, SAFE, engines, lane_of, named
from transfer_kit import (
    LAYOUT,
    BareDecode,
    LeapClock,
    R,
    end_of,
    kv_map_init,
    new_incarnation,
    pull_of,
    until,
)

from neuron_di.clock import use_clock
from neuron_di.errors import (
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
    StaleIncarnation,
)
from neuron_di.transfer import LaneSet, Send, lanes
from neuron_di.types import BlockId
from neuron_di.wire import KvMap, KvMapInit, Malformed, Offer, Refused
from neuron_di.wire.regions import OFFERS_MAX, NixlRegion


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill(make_transfer=FAST, more_engines=[SAFE])


@pytest.fixture
async def decode(cluster):
    return cluster.decode(make_transfer=FAST, more_engines=[SAFE])


async def test_the_preferred_one_is_taken_and_the_pull_names_it(prefill, decode):
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert token.error() is None
    assert (token.engine, token.form) == ("fast", "direct")
    assert lane_of(decode, prefill) == ("fast", "fast: chosen", False)
    await until(lambda: prefill.ended)
    assert len(engines(prefill)["fast"].sent) == 1
    assert engines(prefill)["safe"].sent == []
    done = prefill.ended[0][1]
    assert (done.engine, done.form, done.kv_bytes) == ("fast", "direct", 2 * LAYOUT.block_bytes)


async def test_the_order_is_that_of_the_decode_worker(cluster, prefill):
    decode = cluster.decode(make_transfer=SAFE, more_engines=[FAST])
    await decode.buffer(prefill).connect()
    assert lane_of(decode, prefill)[0] == "safe"


async def test_only_what_both_have_is_prepared(cluster, prefill):
    decode = cluster.decode(make_transfer=named("other"), more_engines=[SAFE])
    await decode.buffer(prefill).connect()
    assert lane_of(decode, prefill) == (
        "safe",
        "other: not offered by the peer; safe: chosen",
        False,
    )
    assert engines(prefill)["fast"].accepted == []
    assert engines(prefill)["safe"].accepted == [decode.local.incarnation]


async def test_workers_with_nothing_in_common_refuse_each_other(cluster, prefill):
    decode = cluster.decode(make_transfer=named("other"))
    with pytest.raises(PeerRefused, match="no transfer engine in common"):
        await decode.buffer(prefill).connect()


@pytest.mark.parametrize(
    "failure", [PeerGone("no wire"), PeerTimeout("no wire"), RuntimeError("a bug")], ids=str
)
async def test_one_that_does_not_connect_leaves_it_to_the_next(prefill, decode, failure):
    engines(decode)["fast"].fails_with = failure
    prefill.park()
    token = await decode.hand_over(prefill, [7, 2])
    assert token.error() is None
    assert token.engine == "safe"
    why = "connecting failed: RuntimeError" if isinstance(failure, RuntimeError) else "no wire"
    assert lane_of(decode, prefill) == ("safe", f"fast: {why}; safe: chosen", True)
    assert decode.counters.num_fallbacks == 1


async def test_one_that_never_was_for_these_two_has_not_failed(prefill, decode):
    engines(decode)["fast"].fails_with = PeerRefused("on another machine")
    await decode.buffer(prefill).connect()
    assert lane_of(decode, prefill) == ("safe", "fast: on another machine; safe: chosen", False)
    assert decode.counters.num_fallbacks == 0


@pytest.mark.parametrize("failure", [PeerGone("no wire"), RuntimeError("a bug")], ids=str)
async def test_one_that_is_not_accepted_is_not_offered(prefill, decode, failure):
    engines(prefill)["fast"].fails_with = failure
    prefill.park()
    assert (await decode.hand_over(prefill, [7, 2])).engine == "safe"
    assert engines(decode)["fast"].connected == []


async def test_when_none_works_the_last_error_says_what_was_wrong_with_each(prefill, decode):
    engines(decode)["fast"].fails_with = PeerTimeout("no answer")
    engines(decode)["safe"].fails_with = StaleIncarnation("another process")
    with pytest.raises(StaleIncarnation, match="fast: no answer; safe: another process"):
        await decode.buffer(prefill).connect()


async def test_a_lane_that_breaks_is_replaced_by_the_next(prefill, decode, cluster):
    """Its request fails, the link breaks, and the next request comes by another way."""
    engines(decode)["fast"].receives_fail_with = PeerGone("the wire is cut")
    prefill.park()
    broken = decode.buffer(prefill)
    assert isinstance((await decode.hand_over(prefill, [7, 2])).error(), PeerGone)
    await until(lambda: broken.is_broken)
    assert "fast failed: the wire is cut" in broken.broken.message
    assert decode.counters.num_lanes_failed == 1
    for name in ("second", "third"):
        prefill.park(name, (5, 6))
        token = await decode.hand_over(prefill, [7, 2], name)
        assert token.error() is None
        assert token.engine == "safe"
    reason = "fast: failed: the wire is cut; safe: chosen"
    assert lane_of(decode, prefill) == ("safe", reason, True)
    assert decode.counters.num_fallbacks == 1


async def test_a_transfer_that_fails_alone_breaks_nothing(prefill, decode):
    engines(decode)["fast"].receives_fail_with = RemoteProtocolError("not these blocks")
    prefill.park()
    buffer = decode.buffer(prefill)
    assert isinstance((await decode.hand_over(prefill, [7, 2])).error(), RemoteProtocolError)
    await until(lambda: prefill.ended)
    assert not buffer.is_broken
    assert decode.counters.num_lanes_failed == 0


@pytest.fixture
async def pair(cluster):
    """Two engines of a decode worker, and what a prefill worker offers."""
    prefill = cluster.prefill(make_transfer=FAST, more_engines=[SAFE])
    decode = cluster.decode(make_transfer=FAST, more_engines=[SAFE])
    peer = prefill.local.incarnation
    prefill.lanes.accept(decode.local.incarnation, decode.lanes.offers(peer), LAYOUT)
    return decode.lanes, peer, prefill.lanes.offers(decode.local.incarnation)


async def test_a_lane_that_failed_is_tried_again_after_a_while(pair):
    own, peer, offers = pair
    lane = own.connect(peer, offers, LAYOUT)
    own.suspect(lane, PeerGone("cut"))
    assert own.connect(peer, offers, LAYOUT).name == "safe"
    leaping = LeapClock()
    with use_clock(leaping):
        leaping.leap(lanes.SUSPECTED_S + 1)
        assert own.connect(peer, offers, LAYOUT).name == "fast"
        assert own._suspects == {}


async def test_where_there_is_nothing_else_a_lane_that_failed_is_taken(pair):
    own, peer, offers = pair
    lane = own.connect(peer, offers, LAYOUT)
    own.suspect(lane, PeerGone("cut"))
    alone = own.connect(peer, [offer for offer in offers if offer.engine == "fast"], LAYOUT)
    assert alone.name == "fast"
    assert alone.is_fallback is False


async def test_suspicions_are_bounded(pair, monkeypatch):
    monkeypatch.setattr(lanes, "SUSPECTS_MAX", 8)
    own, peer, offers = pair
    lane = own.connect(peer, offers, LAYOUT)
    for _ in range(20):
        own.suspect(dataclasses.replace(lane, peer=new_incarnation()), PeerGone("cut"))
    assert len(own._suspects) == 8


async def test_an_engine_that_was_not_agreed_on_sends_nothing(pair):
    own, _, _ = pair
    send = Send(tag=1, runs=None)
    with pytest.raises(RemoteProtocolError, match="not agreed on"):
        own.post_send(new_incarnation(), "fast", send)


async def test_forgetting_a_peer_takes_back_what_was_agreed(cluster):
    prefill = cluster.prefill(make_transfer=FAST)
    peer = new_incarnation()
    prefill.lanes.accept(peer, prefill.lanes.offers(peer), LAYOUT)
    prefill.lanes.check_accepted(peer, "fast")
    prefill.lanes.disconnect(peer)
    with pytest.raises(RemoteProtocolError):
        prefill.lanes.check_accepted(peer, "fast")


# What peers may say


@pytest.fixture
async def peer(prefill):
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        yield peer


async def test_what_a_newer_peer_has_besides_harms_nobody(prefill, peer):
    region = prefill.pool.region()
    strange = Offer(engine="warp", region=msgspec.Raw(msgspec.msgpack.encode({"speed": 9})))
    init = kv_map_init(region, engine="safe")
    init = msgspec.structs.replace(init, offers=[strange, *init.offers])
    answer = await peer.ask(init)
    assert isinstance(answer, KvMap)
    assert [offer.engine for offer in answer.offers] == ["safe"]


@pytest.mark.parametrize(
    "region",
    [
        msgspec.Raw(b"\xc1"),
        msgspec.Raw(msgspec.msgpack.encode({"type": "warp"})),
        msgspec.Raw(msgspec.msgpack.encode({"type": "shm", "pid": "seven"})),
        msgspec.Raw(msgspec.msgpack.encode([1, 2])),
    ],
    ids=["no bytes", "unknown kind", "wrong field", "no region"],
)
async def test_a_region_that_cannot_be_read_is_no_way_to_it(prefill, peer, region):
    offers = [Offer(engine="fast", region=region)]
    init = msgspec.structs.replace(kv_map_init(prefill.pool.region()), offers=offers)
    answer = await peer.ask(init)
    assert isinstance(answer, Refused | Malformed)
    assert engines(prefill)["fast"].accepted == []


async def test_a_region_of_another_engine_than_it_says_reaches_nobody(cluster, prefill):
    """The engine looks at what it is given."""
    region = NixlRegion(agent="a", metadata=b"", digest=bytes(32), address=1, num_bytes=1)
    decode = cluster.decode(make_transfer=FAST)
    with pytest.raises(PeerRefused):
        decode.lanes.connect(new_incarnation(), [Offer.of("fast", region)], LAYOUT)


async def test_more_offers_than_anybody_has_are_refused(prefill, peer):
    offers = [Offer.of(f"e{n}", prefill.pool.region()) for n in range(OFFERS_MAX + 1)]
    init = msgspec.structs.replace(kv_map_init(prefill.pool.region()), offers=offers)
    assert isinstance(await peer.ask(init), Malformed)


async def test_a_pull_by_an_engine_that_was_not_agreed_on_is_refused(prefill, peer):
    assert isinstance(await peer.ask(kv_map_init(prefill.pool.region(), engine="safe")), KvMap)
    prefill.park()
    await peer.lookup()
    for name in ("fast", "warp", "x" * 32):
        (answer,) = await peer.answers(pull_of(engine=name))
        assert isinstance(answer, Malformed)
        assert "not agreed on" in answer.reason
    assert await peer.answers(pull_of(engine="safe")) == []
    assert [len(engine.sent) for engine in prefill.lanes.engines] == [0, 1]


async def test_a_pull_before_the_maps_were_exchanged_is_refused(prefill, peer):
    prefill.park()
    await peer.lookup()
    (answer,) = await peer.answers(pull_of(engine="safe"))
    assert "before the KV maps" in answer.reason


@pytest.mark.parametrize(
    ("field", "number", "words"),
    [
        ("head_dim", 16, "head_dim 16, not 8"),
        ("num_layers", 3, "num_layers 3, not 1"),
        ("num_kv_heads", 2, "num_kv_heads 2, not 1"),
        ("dtype", "bfloat16", "dtype bfloat16, not float32"),
    ],
)
async def test_another_models_layout_is_refused_by_name(prefill, peer, field, number, words):
    init = kv_map_init(prefill.pool.region(), engine="safe")
    layout = msgspec.structs.replace(init.layout, **{field: number})
    answer = await peer.ask(msgspec.structs.replace(init, layout=layout))
    assert isinstance(answer, Refused)
    assert words in answer.reason


async def test_ranks_that_heads_cannot_be_spread_over_are_refused(prefill, peer):
    init = kv_map_init(prefill.pool.region(), engine="safe")
    layout = msgspec.structs.replace(init.layout, num_kv_heads=3, num_ranks=2)
    answer = await peer.ask(msgspec.structs.replace(init, layout=layout))
    assert isinstance(answer, Refused)
    assert "3 KV heads cannot be spread over 2 ranks" in answer.reason


async def test_a_kv_map_init_that_is_none_is_malformed(prefill, peer):
    assert isinstance(
        await peer.ask(KvMapInit(layout=kv_map_init(prefill.pool.region()).layout, offers=[])),
        Refused,
    )


# Blocks that are here already


@pytest.mark.parametrize("num_held", [0, 1, 2])
async def test_only_blocks_that_are_missing_move(prefill, decode, num_held):
    ready = prefill.park(block_ids=(3, 4, 9))
    await decode.lookup(prefill)
    own = [BlockId(n) for n in (7, 2, 5)]
    pulled = decode.buffer(prefill).pull(ready, own, num_held=num_held)
    token = await end_of(pulled)
    assert token.error() is None
    assert token.kv_bytes == (3 - num_held) * LAYOUT.block_bytes
    values = [float(decode.pool.tensor()[n].max()) for n in own]
    assert values == [-1.0] * num_held + [3.0, 4.0, 9.0][num_held:]
    await until(lambda: prefill.ended)
    (send,) = engines(prefill)["fast"].sent
    assert list(send.block_ids) == [3, 4, 9][num_held:]
    assert list(send.exchange) == [7, 2, 5][num_held:]
    assert send.runs.num_bytes == token.kv_bytes


async def test_a_pull_of_nothing_is_refused(prefill, peer):
    await peer.exchange_maps()
    prefill.park()
    await peer.lookup()
    for num_held in (2, 3, 1 << 40):
        assert isinstance(await peer.ask(pull_of(engine="safe", num_held=num_held)), Malformed)


async def test_the_tag_is_the_same_at_both_ends_and_no_others(prefill, decode, cluster):
    tags = []
    fast = engines(decode)["fast"]
    post = fast.post_receive
    fast.post_receive = lambda peer, receive: (tags.append(receive.tag), post(peer, receive))[1]
    for name in (R, "r2", "r3"):
        prefill.park(name, (3, 4))
        assert (await decode.hand_over(prefill, [0, 1], name)).error() is None
    await until(lambda: len(prefill.ended) == len(tags))
    assert [send.tag for send in engines(prefill)["fast"].sent] == tags
    assert len(set(tags)) == 3
    assert all(0 <= tag < 1 << 64 for tag in tags)


async def test_what_is_missing_here_is_named_with_its_reason(prefill, decode):
    own = LaneSet(decode.lanes.engines, {"best": "its gate is closed, " + 1000 * "x"})
    offers = prefill.lanes.offers(decode.local.incarnation)
    lane = own.connect(prefill.local.incarnation, offers, LAYOUT)
    assert lane.reason.startswith("best: its gate is closed, x")
    assert lane.reason.endswith("; fast: chosen")
    assert lane.verdicts == "best: not_available; fast: chosen"
    assert not lane.is_fallback


def test_each_engine_is_closed_though_another_fails():
    closed = []

    class Closing:
        def __init__(self, name):
            self.name = name

        def close(self):
            closed.append(self.name)
            if self.name == "fast":
                raise OSError("a bug")

    lane_set = LaneSet([Closing("fast"), Closing("safe")])
    with pytest.raises(OSError, match="a bug"):
        lane_set.close()
    assert closed == ["fast", "safe"]
