"""Whatever a peer says when it may not: an error for it alone, and nothing changes (B35 to B39).

Each test ends with an honest decode worker's hand-over through the same SendBuffer.
"""

import asyncio
import logging

import msgspec
import pytest
from signal_words import DONE, PULL, WORDS, bring_to, state_of
from transfer_kit import BareDecode, R, kv_map_init

from neuron_di.types import RequestId
from neuron_di.wire import (
    FromDecode,
    Handshake,
    KvMap,
    KvMapInit,
    Malformed,
    Never,
    Ping,
    Pong,
    PullLayer,
    Refused,
)
from neuron_di.wire.handoff import SENDER, SenderEvent, SenderState

REPLAYED = [WORDS[event] for event in (SenderEvent.LOOKUP, SenderEvent.HOLD, SenderEvent.PULL)]
UNASKED = [event for event in WORDS if event is not SenderEvent.LOOKUP]


@pytest.fixture
def prefill(served):
    return served


@pytest.fixture
def peer(peer_of_served):
    return peer_of_served


@pytest.fixture
def other(other_of_served):
    return other_of_served


# B35: each message in each state


@pytest.mark.parametrize("event", WORDS, ids=lambda event: event.value)
@pytest.mark.parametrize("state", SenderState, ids=lambda state: state.value)
async def test_b35_each_message_in_each_state(prefill, peer, other, state, event):
    await bring_to(state, prefill, peer)
    num_ended = len(prefill.ended)
    answers = await peer.answers(WORDS[event])
    is_forbidden = (state, event) not in SENDER
    assert any(isinstance(answer, Malformed) for answer in answers) == is_forbidden
    assert prefill.counters.num_signals_refused == int(is_forbidden)
    if is_forbidden:
        assert len(answers) == 1
        assert state.value in answers[0].reason
        assert state_of(prefill) is state
        assert len(prefill.ended) == num_ended
    else:
        assert state_of(prefill) is SENDER[state, event].state
    assert await other.answers() == []


@pytest.mark.parametrize("is_parked", [True, False])
@pytest.mark.parametrize("event", UNASKED, ids=lambda event: event.value)
async def test_b35_what_it_never_asked_for_is_not_ones_own(prefill, peer, other, event, is_parked):
    prefill.buffer.expect(R, 0)
    if is_parked:
        prefill.buffer.park(prefill.ready())
    assert await other.answers(WORDS[event]) == []
    assert prefill.counters.num_stale == 1
    assert prefill.ended == []
    if not is_parked:
        prefill.buffer.park(prefill.ready())
    assert await peer.lookup() == prefill.ready()


def test_b35_some_messages_are_forbidden_in_some_states():
    forbidden = {(s, e) for s in SenderState for e in WORDS} - set(SENDER)
    states = (SenderState.ASKED, SenderState.PREFILLING)
    events = (SenderEvent.HOLD, SenderEvent.PULL, SenderEvent.DONE)
    assert forbidden == {(state, event) for state in states for event in events}


# B36: another's request


@pytest.mark.parametrize(
    "state",
    [s for s in SenderState if s not in (SenderState.UNKNOWN, SenderState.OVER)],
    ids=lambda s: s.value,
)
@pytest.mark.parametrize("event", WORDS, ids=lambda event: event.value)
async def test_b36_another_peers_request_is_not_ones_own(prefill, peer, other, state, event):
    await bring_to(state, prefill, peer)
    before = list(prefill.ended)
    assert await other.answers(WORDS[event]) == [
        Malformed(reason="this request belongs to another worker")
    ]
    assert state_of(prefill) is state
    assert prefill.ended == before
    assert prefill.buffer.lookup_dict[R, 0].reader == f"{peer.incarnation}.1"
    assert prefill.counters.num_signals_refused == 1


# B37: numbers


HUGE = (1 << 64) - 1


@pytest.mark.parametrize("block_ids", [[HUGE] * 2, [-1, -1], [0] * 500_000, [HUGE] * 100_000])
async def test_b37_a_pull_of_absurd_blocks(prefill, peer, block_ids):
    """Nothing is reckoned with what cannot be blocks, or is another number than promised."""
    prefill.park()
    assert await peer.lookup() == prefill.ready()
    answers = await peer.answers(msgspec.structs.replace(PULL, block_ids=block_ids))
    assert [type(answer) for answer in answers] == [Malformed]
    assert await peer.answers(DONE) == []
    assert prefill.ended == [((R, 0), DONE)]


@pytest.mark.parametrize(
    "fields", [{"num_blocks": HUGE}, {"pid": HUGE}, {"fd": -1}, {"num_blocks": -1}], ids=str
)
async def test_b37_a_kv_map_of_absurd_size_is_allocated_by_nobody(prefill, peer, fields):
    region = msgspec.structs.replace(prefill.pool.region(), **fields)
    answer = await peer.ask(kv_map_init(region))
    assert isinstance(answer, KvMap | Refused | Malformed)


@pytest.mark.parametrize(
    ("kind", "field", "number"),
    [
        ("lookup_all", "attempt", HUGE),
        ("lookup_all", "attempt", -(1 << 63)),
        ("lookup_all", "attempt", 1001),
        ("done", "kv_bytes", -1),
        ("done", "kv_bytes", (1 << 53) + 1),  # no receipt may have it
        ("done", "kv_bytes", HUGE),
        ("done", "transfer_s", 1e308),
        ("done", "transfer_s", float("nan")),
        ("ping", "sequence", 1e300),
    ],
)
async def test_b37_a_number_out_of_bounds_is_malformed(prefill, peer, kind, field, number):
    fields = {"request_id": R, "attempt": 0, "kv_bytes": 1, "transfer_s": 0.5, "sequence": 1}
    fields |= {"engine": "shm", "form": "direct"}
    peer.send_raw(msgspec.msgpack.encode({"type": kind, **fields, field: number}))
    assert isinstance(await peer.receive(), Malformed)
    assert prefill.buffer.lookup_dict == {}
    assert await peer.ask(Ping(sequence=HUGE)) == Pong(sequence=HUGE)


# B38: once more


async def test_b38_a_consumed_hand_over_is_consumed(prefill, peer, other):
    prefill.park()
    await peer.lookup()
    assert await peer.answers(PULL, DONE) == []
    generations = prefill.pool.generations(range(16))
    never = Never(request_id=R, attempt=0, reason="it was handed over")
    for replayer in (peer, other):
        assert await replayer.answers(*REPLAYED) == [never] * 3
        num_stale = prefill.counters.num_stale
        assert await replayer.answers(DONE, WORDS[SenderEvent.ABORT]) == []
        assert prefill.counters.num_stale == num_stale + 2
    assert prefill.ended == [((R, 0), DONE)]
    assert prefill.buffer.lookup_dict == {}
    assert prefill.pool.generations(range(16)) == generations
    # The same blocks, for another request: what is said of the old one does not touch it.
    prefill.park(RequestId("next"))
    assert (await other.lookup(RequestId("next"))).request_id == "next"
    assert await peer.answers(*REPLAYED) == [never] * 3
    assert await peer.answers(DONE) == []
    assert prefill.buffer.lookup_dict["next", 0].state is SenderState.PARKED


# B39: nothing more


async def test_b39_a_peer_that_never_acknowledges(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill = cluster.prefill(kv_lease_s=0.2, quarantine_s=0.2)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        prefill.park()
        await peer.lookup()
        await peer.answers(PULL)
        assert await peer.receive() == Never(request_id=R, attempt=0, reason="the lease ended")
        assert prefill.counters.num_leases_ended == 1
        (held_by,) = prefill.held_by
        while not held_by.is_done():
            await peer.answers()  # it is alive, and says nothing of it
        assert prefill.buffer.lookup_dict == {}
        prefill.park(RequestId("next"))
        assert (await cluster.decode().hand_over(prefill, [0, 1], RequestId("next"))).is_done()


async def test_b39_a_peer_that_never_reads_is_dropped_at_no_cost(prefill, peer, caplog):
    """Its queue fills up; what does not fit is not kept, and nobody waits for it."""
    caplog.set_level(logging.ERROR)
    with BareDecode(prefill) as deaf:
        await deaf.shake_hands()
        prefill.park()
        assert await peer.lookup() == prefill.ready()
        for n in range(2_000):
            deaf.send(Ping(sequence=n))
            if n % 50 == 0:
                await asyncio.sleep(0)
        assert await peer.answers(PULL, DONE) == []


def test_every_message_of_a_decode_worker_is_in_these_tests():
    tested = {type(word) for word in WORDS.values()} | {Handshake, KvMapInit, Ping}
    tested.add(PullLayer)  # test_layer_streaming
    assert tested == set(FromDecode.__args__)
