"""Prefill's end, and what a peer that breaks the rules can do to it: nothing."""

import asyncio

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_kit import BareDecode, Prefill, R, done_of, kv_map, kv_map_init, pull_of, until

from neuron_di.errors import ConfigError, KvExpired, KvMissing
from neuron_di.transfer.domain import this_machine
from neuron_di.transfer.signal_link import ZmqTransport, bind_router
from neuron_di.types import RequestId
from neuron_di.wire import (
    SIGNAL_VERSION,
    Abort,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    Ping,
    Pong,
    Refused,
)
from neuron_di.wire.handoff import SenderState

PULL = pull_of()
DONE = done_of()
ABORT = Abort(request_id=R, attempt=0, reason="why")


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill()


@pytest.fixture
async def peer(prefill):
    with BareDecode(prefill) as peer:
        await peer.connect()
        yield peer


@pytest.fixture
async def other(prefill):
    with BareDecode(prefill) as peer:
        await peer.connect()
        yield peer


async def answers_to_come(peer):
    """Nothing more than the answer to this ping."""
    assert await peer.ask(Ping(sequence=99)) == Pong(sequence=99)


async def test_welcome_says_who_and_when(prefill):
    with BareDecode(prefill) as peer:
        welcome = await peer.shake_hands()
    assert welcome.status == "ok"
    assert welcome.timestamp > 1.6e9
    assert welcome.worker_id == "prefill-0"
    assert welcome.incarnation == prefill.local.incarnation


async def test_kv_map_tells_where_the_pool_is(prefill, peer):
    region = msgspec.structs.replace(prefill.pool.region(), host=this_machine())
    answer = await peer.ask(kv_map_init(region))
    assert answer == kv_map(region)


@pytest.mark.parametrize(
    ("fields", "reason", "is_stale"),
    [
        ({"version": SIGNAL_VERSION + 1}, "signal protocol", False),
        ({"expects": "somebody"}, "restarted", True),
        ({"incarnation": "somebody"}, "identity", False),
        ({"model_digest": "other"}, "model", False),
        ({"layout_digest": "other"}, "layout", False),
    ],
)
async def test_a_handshake_that_does_not_fit_is_refused_by_name(prefill, fields, reason, is_stale):
    with BareDecode(prefill) as peer:
        answer = await peer.shake_hands(**fields)
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        assert answer.is_stale == is_stale
        assert prefill.counters.num_signals_refused == 1
        assert isinstance(await peer.lookup(), Malformed)
    assert prefill.buffer.peers == []


async def test_without_a_handshake_nothing_is_answered_but_malformed(prefill):
    prefill.park()
    with BareDecode(prefill) as peer:
        for message in (LookupAll(request_id=R, attempt=0), PULL, DONE, ABORT, Ping(sequence=1)):
            assert await peer.ask(message) == Malformed(reason="handshake first")
    assert prefill.ended == []
    assert prefill.counters.num_signals_refused == 5


async def test_lookup_before_the_request_is_known_then_ready_is_pushed_once(prefill, peer):
    assert await peer.lookup() == NotYet(request_id=R, attempt=0)
    prefill.buffer.expect(R, 0)
    assert await peer.lookup() == NotYet(request_id=R, attempt=0)
    ready = prefill.ready()
    prefill.buffer.park(ready)
    assert await peer.receive() == ready
    await answers_to_come(peer)


async def test_lookup_while_it_is_prefilled_then_ready_is_pushed_to_the_asker_only(
    prefill, peer, other
):
    prefill.buffer.expect(R, 0)
    assert await peer.lookup() == NotYet(request_id=R, attempt=0)
    ready = prefill.ready()
    prefill.buffer.park(ready)
    assert await peer.receive() == ready
    await answers_to_come(other)


async def test_lookup_after_it_was_parked_is_answered_ready(prefill, peer):
    ready = prefill.park()
    assert await peer.lookup() == ready
    await answers_to_come(peer)


async def test_attempts_are_told_apart(prefill, peer):
    prefill.park()
    assert await peer.ask(LookupAll(request_id=R, attempt=1)) == NotYet(request_id=R, attempt=1)


async def test_drop_tells_the_asker_never_and_later_askers_too(prefill, peer, other):
    prefill.buffer.expect(R, 0)
    await peer.lookup()
    prefill.buffer.drop(R, 0, "cancelled")
    never = Never(request_id=R, attempt=0, reason="cancelled")
    assert await peer.receive() == never
    assert await other.lookup() == never
    prefill.buffer.drop(R, 0, "again")
    assert await other.lookup() == never
    assert prefill.ended == []  # it was never parked


async def test_drop_of_what_was_parked_is_never_too(prefill, peer):
    prefill.park()
    await peer.lookup()
    prefill.buffer.drop(R, 0, "cancelled")
    assert await peer.receive() == Never(request_id=R, attempt=0, reason="cancelled")
    ((key, error),) = prefill.ended
    assert key == (R, 0)
    assert isinstance(error, KvMissing)
    # It was told where the blocks are, and may have begun to read them.
    (held_by,) = prefill.held_by
    assert not held_by.is_done()
    assert await peer.ask(PULL) == Never(request_id=R, attempt=0, reason="cancelled")
    assert not held_by.is_done()
    peer.send(ABORT)
    await answers_to_come(peer)
    assert held_by.is_done()
    peer.send(DONE)
    await answers_to_come(peer)
    assert len(prefill.ended) == 1
    assert prefill.counters.num_stale == 1


async def test_drop_of_what_nobody_asked_for_is_free_at_once(prefill, peer):
    prefill.park()
    prefill.buffer.drop(R, 0, "cancelled")
    assert prefill.held_by == [None]
    assert await peer.lookup() == Never(request_id=R, attempt=0, reason="cancelled")


async def test_pull_then_done_ends_it_once(prefill, peer):
    prefill.park()
    await peer.lookup()
    for message in (PULL, PULL, DONE, DONE, ABORT):
        peer.send(message)
    await answers_to_come(peer)
    assert prefill.ended == [((R, 0), DONE)]
    assert prefill.buffer.lookup_dict == {}
    assert prefill.counters.num_stale == 3  # what came twice, and the Abort after the Done
    never = Never(request_id=R, attempt=0, reason="it was handed over")
    assert await peer.lookup() == await peer.ask(PULL) == never


@pytest.mark.parametrize("before", [[], [PULL]], ids=["parked", "pulling"])
async def test_abort_ends_what_was_parked(prefill, peer, before):
    prefill.park()
    await peer.lookup()
    for message in (*before, ABORT):
        peer.send(message)
    await answers_to_come(peer)
    ((key, error),) = prefill.ended
    assert key == (R, 0)
    assert isinstance(error, KvMissing)


async def test_abort_while_it_is_prefilled_leaves_it_to_its_own_leg(prefill, peer, other):
    prefill.buffer.expect(R, 0)
    await peer.lookup()
    peer.send(ABORT)
    await answers_to_come(peer)
    prefill.buffer.park(prefill.ready())
    await answers_to_come(peer)
    assert await other.lookup() == prefill.ready()
    assert prefill.ended == []


async def test_abort_before_the_leg_came_refuses_the_leg(prefill, peer):
    """Nobody would pull it. It is no fault of the client's: another attempt may do."""
    await peer.lookup()
    peer.send(ABORT)
    await answers_to_come(peer)
    with pytest.raises(KvMissing, match="why") as caught:
        prefill.buffer.expect(R, 0)
    assert caught.value.retryable
    prefill.buffer.expect(R, 1)


@pytest.mark.parametrize("is_parked", [True, False])
@pytest.mark.parametrize("message", [PULL, DONE, ABORT], ids=lambda m: type(m).__name__)
async def test_another_peers_request_is_not_ones_own(prefill, peer, other, message, is_parked):
    prefill.buffer.expect(R, 0)
    await peer.lookup()
    if is_parked:
        prefill.buffer.park(prefill.ready())
        assert await peer.receive() == prefill.ready()
    assert isinstance(await other.ask(message), Malformed)
    assert isinstance(await other.lookup(), Malformed)
    assert prefill.ended == []
    if not is_parked:
        prefill.buffer.park(prefill.ready())
        assert await peer.receive() == prefill.ready()
    peer.send(PULL)
    peer.send(DONE)
    await answers_to_come(peer)
    assert prefill.ended == [((R, 0), DONE)]


async def test_done_with_what_was_never_ready_is_refused(prefill, peer):
    """It would have the engine release a request that it still computes."""
    prefill.buffer.expect(R, 0)
    await peer.lookup()
    assert isinstance(await peer.ask(DONE), Malformed)
    assert prefill.ended == []
    prefill.buffer.park(prefill.ready())
    assert await peer.receive() == prefill.ready()


async def test_a_pull_for_another_number_of_blocks_is_refused(prefill, peer):
    prefill.park()
    await peer.lookup()
    for block_ids in ([], [1], [1, 2, 3]):
        assert isinstance(
            await peer.ask(msgspec.structs.replace(PULL, block_ids=block_ids)), Malformed
        )
    peer.send(PULL)
    peer.send(DONE)
    await answers_to_come(peer)
    assert prefill.ended == [((R, 0), DONE)]


async def test_the_lease_ends(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill = cluster.prefill(kv_lease_s=0.1)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        prefill.park()
        await peer.lookup()
        assert (await peer.receive()).reason == "the lease ended"
        ((key, error),) = prefill.ended
        assert key == (R, 0)
        assert isinstance(error, KvExpired)
        assert prefill.counters.num_leases_ended == 1
        peer.send(ABORT)
        early = RequestId("asked for, never came")
        assert isinstance(await peer.lookup(early), NotYet)
        assert isinstance(await peer.receive(), Never)
        assert len(prefill.ended) == 1
    assert prefill.buffer.lookup_dict == {}


async def test_a_held_request_outlives_its_lease(cluster, monkeypatch):
    """Decode has no slot for longer than the lease: it says so, and the KV stays."""
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill, decode = cluster.prefill(kv_lease_s=0.3), cluster.decode(heartbeat_s=0.05)
    prefill.park()
    ready = await decode.lookup(prefill)
    held = prefill.buffer.lookup_dict[R, 0]
    first_deadline = held.lease
    await until(lambda: first_deadline.has_passed())
    await until(lambda: held.lease.at_s > first_deadline.at_s + 0.3)
    assert prefill.ended == []
    assert prefill.buffer.lookup_dict[R, 0] is held
    decode.buffer(prefill).cancel(R, 0, "done with it")
    await until(lambda: prefill.ended)
    assert ready.request_id == R


async def test_a_prefill_that_runs_longer_than_a_lease_keeps_its_asker(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill = cluster.prefill(kv_lease_s=0.1)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        await peer.lookup()
        prefill.buffer.expect(R, 0)
        await asyncio.sleep(0.3)
        ready = prefill.ready()
        prefill.buffer.park(ready)
        assert await peer.receive() == ready


async def test_early_lookups_are_bounded_and_so_is_what_is_remembered(cluster):
    prefill = cluster.prefill(remembered_max=16)
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        for n in range(16):
            assert isinstance(await peer.lookup(RequestId(f"early-{n}")), NotYet)
        refusal = await peer.lookup(RequestId("one too many"))
        assert isinstance(refusal, Never)
        assert "too many" in refusal.reason
        # What is known already is not refused, nor is a leg of the proxy's.
        assert isinstance(await peer.lookup(RequestId("early-0")), NotYet)
    for n in range(50):
        prefill.buffer.expect(RequestId(f"r{n}"), 0)
        prefill.buffer.drop(RequestId(f"r{n}"), 0, "over")
    assert len(prefill.buffer._over) == len(prefill.buffer._latest) == 16
    assert ("r34", 0) in prefill.buffer._over
    assert ("r33", 0) not in prefill.buffer._over


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_signals_leave_the_table_right(data):
    """Any order of a peer's messages and our own calls: each parked request ends at most once."""
    messages = st.sampled_from([LookupAll(request_id=R, attempt=0), PULL, DONE, ABORT, "park"])
    script = data.draw(st.lists(messages, max_size=12))

    async def play():
        prefill = Prefill()
        try:
            with BareDecode(prefill) as peer:
                await peer.shake_hands()
                prefill.buffer.expect(R, 0)
                is_parked = False
                for message in script:
                    if message != "park":
                        peer.send(message)
                        peer.send(Ping(sequence=1))
                        while not isinstance(await peer.receive(), Pong):
                            pass
                    elif not is_parked:
                        is_parked = True
                        prefill.buffer.park(prefill.ready())
                assert len(prefill.ended) <= int(is_parked)
                is_there = (R, 0) in prefill.buffer.lookup_dict
                assert is_there != bool(prefill.ended)
                prefill.buffer.drop(R, 0, "over")
                assert len(prefill.ended) == int(is_parked)
                left = [entry.state for entry in prefill.buffer.lookup_dict.values()]
                assert left in ([], [SenderState.RECALLED])
        finally:
            await prefill.close()

    asyncio.run(play())


async def test_a_port_in_use_is_a_config_error_and_leaves_no_socket(prefill):
    with zmq.Context() as context:
        for host, port in (("127.0.0.1", prefill.buffer.port), ("no.such.host.invalid", 0)):
            with pytest.raises(zmq.ZMQError):
                bind_router(context, host, port)
            transport = ZmqTransport()
            with pytest.raises(ConfigError, match="cannot bind"):
                transport.bind(host, port, lambda _: None)
            transport.wait_closed()


async def test_a_bug_in_the_handler_does_not_stop_the_link(prefill, peer, monkeypatch):
    def fail(*_):
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(prefill.buffer, "_on_request_message", fail)
        peer.send(LookupAll(request_id=R, attempt=0))
        await answers_to_come(peer)
    prefill.park()
    assert await peer.lookup() == prefill.ready()
    await until(lambda: prefill.counters.num_signals_refused == 0)
