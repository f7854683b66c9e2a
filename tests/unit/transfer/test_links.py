"""Links that break, refusals in every state, and who may connect how often."""

import asyncio
import os
import threading

import msgspec
import pytest
from bare_prefill import BarePrefill
from odd_engines import HeldEngine
from transfer_kit import LAYOUT, QUICK, WAIT_S, BareDecode, R, end_of, kv_map_init, until

from neuron_di.clock import Deadline
from neuron_di.errors import ConfigError, KvMissing, PeerGone, PeerTimeout
from neuron_di.transfer import ShmEngine
from neuron_di.transfer.lanes import THREADS_MAX
from neuron_di.types import BlockId, RequestId
from neuron_di.wire import (
    Abort,
    Done,
    Hold,
    KvMap,
    KvMapInit,
    LookupAll,
    Malformed,
    Never,
    NotYet,
    PeerAddress,
    Pull,
    Refused,
    Welcome,
)
from neuron_di.wire.handoff import RECEIVER, ReceiverEvent, ReceiverState

BLOCKS = [BlockId(0), BlockId(1)]
NEVER = Never(request_id=R, attempt=0, reason="why")


@pytest.fixture
async def prefill(cluster):
    return cluster.prefill()


@pytest.fixture
def bare(prefill):
    with BarePrefill(prefill.pool.region()) as bare:
        yield bare


class Receiver:
    """A decode worker's hand-over with a bare prefill worker, brought to a state."""

    def __init__(self, decode, bare, prefill):
        self.decode = decode
        self.bare = bare
        self.buffer = decode.connector.maybe_setup_buffer(bare.address)
        self._prefill = prefill
        self.waiting = self.token = None

    def state(self):
        entry = self.buffer._entries.get((R, 0))
        return ReceiverState.OVER if entry is None else entry.state

    async def bring_to(self, state):
        await self.connect()
        if state is ReceiverState.UNKNOWN:
            return
        lookup = self.buffer.lookup(R, 0, Deadline.after(WAIT_S), self.decode.on_lost)
        self.waiting = asyncio.create_task(lookup)
        await self.bare.hear(LookupAll)
        if state is ReceiverState.ASKING:
            return
        self.bare.send(self._prefill.ready())
        ready = await self.waiting
        await self.bare.hear(Hold)
        self.decode.transfer.is_holding = True
        if state is not ReceiverState.HELD:
            self.token = self.buffer.pull(ready, BLOCKS)
            await self.bare.hear(Pull)
        if state is ReceiverState.DRAINING:
            self.buffer.cancel(R, 0, "cancelled")
        elif state is ReceiverState.OVER:
            self.decode.transfer.let_go()
            await self.bare.hear(Done)
        assert self.state() is state

    async def connect(self):
        connecting = asyncio.create_task(self.buffer.connect())
        await self.bare.hear(KvMapInit)
        await connecting

    def losses(self):
        return [type(error) for _, error in self.decode.lost]


def receiver_of(cluster, bare, prefill, **limits):
    return Receiver(cluster.decode(make_transfer=HeldEngine, **limits), bare, prefill)


# A link that is lost


async def test_lost_while_it_asks(cluster, bare, prefill):
    receiver = receiver_of(cluster, bare, prefill, **QUICK)
    await receiver.bring_to(ReceiverState.ASKING)
    with pytest.raises(PeerGone, match="said nothing"):
        await receiver.waiting
    assert receiver.losses() == []  # it was told already
    assert receiver.buffer._entries == {}


async def test_lost_while_it_waits_for_a_slot(cluster, bare, prefill):
    receiver = receiver_of(cluster, bare, prefill, **QUICK)
    await receiver.bring_to(ReceiverState.HELD)
    await until(lambda: receiver.decode.lost)
    assert receiver.losses() == [PeerGone]
    token = receiver.buffer.pull(prefill.ready(), BLOCKS)  # the engine had admitted it
    assert isinstance(token.error(), PeerGone)


async def test_lost_while_blocks_are_copied(cluster, bare, prefill):
    receiver = receiver_of(cluster, bare, prefill, **QUICK)
    await receiver.bring_to(ReceiverState.PULLING)
    await until(lambda: receiver.decode.lost)
    assert receiver.losses() == [PeerGone]
    assert not receiver.token.is_done(), "the copy may still write"
    receiver.decode.transfer.let_go()
    assert isinstance((await end_of(receiver.token)).error(), KvMissing)
    assert receiver.losses() == [PeerGone]
    assert receiver.buffer._entries == {}


async def test_lost_while_nobody_wants_it_any_more(cluster, bare, prefill):
    receiver = receiver_of(cluster, bare, prefill, **QUICK)
    await receiver.bring_to(ReceiverState.DRAINING)
    await until(lambda: receiver.buffer.is_broken)
    assert not receiver.token.is_done()
    receiver.decode.transfer.let_go()
    assert isinstance((await end_of(receiver.token)).error(), KvMissing)
    assert receiver.losses() == []


# Every answer in every state


ANSWERS = {
    ReceiverEvent.NOT_YET: lambda prefill: NotYet(request_id=R, attempt=0),
    ReceiverEvent.NEVER: lambda prefill: NEVER,
    ReceiverEvent.READY: lambda prefill: prefill.ready(),
}


@pytest.mark.parametrize("event", ANSWERS, ids=lambda event: event.value)
@pytest.mark.parametrize("state", ReceiverState, ids=lambda state: state.value)
async def test_an_answer_in_any_state_does_what_the_table_says(
    cluster, bare, prefill, state, event
):
    receiver = receiver_of(cluster, bare, prefill)
    await receiver.bring_to(state)
    bare.send(ANSWERS[event](prefill))
    bare.send(Never(request_id=RequestId("nobody's"), attempt=0, reason=""))
    num_stale = receiver.decode.counters.num_stale
    after = RECEIVER[state, event].state
    expected = ReceiverState.OVER if after is ReceiverState.UNKNOWN else after
    await until(lambda: receiver.decode.counters.num_stale > num_stale)
    await until(lambda: receiver.state() is expected)
    assert not receiver.buffer.is_broken
    if receiver.waiting is not None and not receiver.waiting.done():
        receiver.waiting.cancel()
    await asyncio.gather(*filter(None, [receiver.waiting]), return_exceptions=True)
    receiver.decode.transfer.let_go()


async def test_never_while_it_waits_for_a_slot(cluster, bare, prefill):
    """The leg hears it, and prefill hears that nothing will be read."""
    receiver = receiver_of(cluster, bare, prefill)
    await receiver.bring_to(ReceiverState.HELD)
    bare.send(NEVER)
    await bare.hear(Abort)
    assert receiver.losses() == [KvMissing]
    token = receiver.buffer.pull(prefill.ready(), BLOCKS)
    assert isinstance(token.error(), KvMissing)
    assert not any(isinstance(message, Pull) for message in bare.heard)


async def test_never_while_blocks_are_copied(cluster, bare, prefill):
    """The leg fails at once; its blocks, and prefill's, wait for the end of the copy."""
    receiver = receiver_of(cluster, bare, prefill)
    await receiver.bring_to(ReceiverState.PULLING)
    bare.send(NEVER)
    await until(lambda: receiver.decode.lost)
    assert receiver.losses() == [KvMissing]
    assert not receiver.token.is_done()
    assert not any(isinstance(message, Abort | Done) for message in bare.heard)
    receiver.decode.transfer.let_go()
    await bare.hear(Abort)
    assert isinstance((await end_of(receiver.token)).error(), KvMissing)
    assert not any(isinstance(message, Done) for message in bare.heard)
    assert receiver.losses() == [KvMissing]


# Several links with one process


async def test_two_buffers_to_the_same_process_do_not_disconnect_each_other(cluster, prefill):
    decode = cluster.decode(make_transfer=HeldEngine)
    first = decode.buffer(prefill)
    address = msgspec.structs.replace(prefill.address, signal_host="localhost")
    second = decode.connector.maybe_setup_buffer(address)
    assert second is not first
    await asyncio.gather(first.connect(), second.connect())
    gone = f"disconnect {prefill.local.incarnation}"
    first.close()
    assert gone not in decode.transfer.calls
    prefill.park()
    ready = await second.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost)
    assert (await end_of(second.pull(ready, BLOCKS))).error() is None
    second.close()
    assert gone in decode.transfer.calls
    assert decode.transfer._peers == {}


async def test_a_broken_link_that_connects_late_does_not_disconnect_its_successor(
    cluster, prefill, monkeypatch
):
    decode = cluster.decode(make_transfer=HeldEngine)
    loop = asyncio.get_running_loop()
    is_connecting, may_connect = asyncio.Event(), asyncio.Event()
    run = loop.run_in_executor

    async def run_late(*call):
        is_connecting.set()
        await may_connect.wait()
        return await run(*call)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_in_executor", run_late)
        old = decode.buffer(prefill)
        await is_connecting.wait()
    old.close()
    new = decode.buffer(prefill)
    await new.connect()
    calls = len(decode.transfer.calls)
    may_connect.set()
    with pytest.raises(PeerGone):
        await old.connect()
    assert decode.transfer.calls[calls:] == []
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_prefill_disconnects_a_process_with_its_last_connection_only(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill = cluster.prefill(make_transfer=HeldEngine, peer_silence_s=0.4)
    with BareDecode(prefill) as first:
        assert isinstance(await first.shake_hands(), Welcome)
        identity = f"{first.incarnation}.2".encode()
        with BareDecode(prefill, identity=identity) as second:
            second.incarnation = first.incarnation
            assert isinstance(await second.shake_hands(), Welcome)
            silent = f"{first.incarnation}.1"

            async def keep_talking():
                while silent in prefill.buffer._peers._peers:
                    await second.answers()

            await asyncio.wait_for(keep_talking(), WAIT_S)
            assert prefill.transfer.calls == []
            await until(lambda: prefill.transfer.calls)
            assert prefill.transfer.calls == [f"disconnect {first.incarnation}"]


# How many, and how often


async def test_no_more_peers_than_the_limit(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.02)
    prefill = cluster.prefill(peers_max=2, peer_silence_s=0.4)
    with BareDecode(prefill) as first, BareDecode(prefill) as second, BareDecode(prefill) as third:
        for peer in (first, second, first):  # who is known already may shake hands again
            assert isinstance(await peer.shake_hands(), Welcome)
        answer = await third.shake_hands()
        assert answer == Refused(reason="prefill-0 talks to 2 workers already", is_busy=True)
        await until(lambda: prefill.buffer.peers == [])
        assert isinstance(await third.shake_hands(), Welcome)


async def test_one_exchange_of_kv_maps_at_a_time(cluster):
    prefill = cluster.prefill(make_transfer=HeldEngine)
    init = kv_map_init(prefill.pool.region())
    prefill.transfer.may_accept.clear()
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        peer.send(init)
        for _ in range(20):
            assert isinstance(await peer.shake_hands(), Welcome)  # which changes nothing
            assert isinstance(await peer.ask(init), Malformed)
        assert len(prefill.buffer._accepting) == 1
        prefill.transfer.may_accept.set()
        assert isinstance(await peer.receive(), KvMap)
        assert prefill.transfer.num_accepted == 1
        assert isinstance(await peer.ask(init), KvMap)


async def test_an_address_that_cannot_be_one_is_peer_gone(cluster):
    decode = cluster.decode()
    address = PeerAddress(
        worker_id="p", incarnation="i", signal_host="not a host", signal_port=1 << 20
    )
    with pytest.raises(PeerGone):
        decode.connector.maybe_setup_buffer(address)
    assert decode.connector.connection_dict == {}


class SlowlyConnected(HeldEngine):
    """Maps the peer's pool when it is told to: many gigabytes take their time."""

    def __init__(self, pool):
        super().__init__(pool)
        self.may_connect = threading.Event()

    def connect(self, peer, region, layout):
        assert self.may_connect.wait(WAIT_S)
        super().connect(peer, region, layout)


async def test_a_link_that_connects_for_longer_than_a_silence(cluster):
    prefill = cluster.prefill(**QUICK)
    decode = cluster.decode(make_transfer=SlowlyConnected, **QUICK)
    decode.buffer(prefill)
    await until(lambda: prefill.connector.connections() == ["decode-0"])
    silence = Deadline.after(2 * QUICK["peer_silence_s"])
    await until(silence.has_passed)
    assert prefill.connector.connections() == ["decode-0"]
    decode.transfer.may_connect.set()
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_a_transfers_time_counts_what_was_posted_before_it(cluster):
    prefill = cluster.prefill()
    bytes_per_s = 2.0 * LAYOUT.block_bytes  # a second for two blocks
    decode = cluster.decode(
        make_transfer=HeldEngine, transfer_timeout_s=10.0, transfer_bytes_per_s=bytes_per_s
    )
    decode.transfer.is_holding = True
    buffer, loop = decode.buffer(prefill), asyncio.get_running_loop()
    pulled, allowed_s = [], []
    for number in range(3):
        request_id = RequestId(f"r{number}")
        ready = prefill.park(request_id)
        await decode.lookup(prefill, request_id)
        pulled.append(buffer.pull(ready, [BlockId(2 * number), BlockId(2 * number + 1)]))
        allowed_s.append(buffer._entries[request_id, 0].late.when() - loop.time())
    assert [round(each) for each in allowed_s] == [11, 12, 13]
    decode.transfer.let_go()
    for token in pulled:
        assert (await end_of(token)).error() is None
    await until(lambda: decode.connector.counters.kv_bytes_in_flight == 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [(ValueError("a bug"), "the transfer engine failed to connect"), (ConfigError("why"), "why")],
)
async def test_a_transfer_engine_that_fails_to_accept_is_told_at_once(cluster, error, words):
    prefill = cluster.prefill(make_transfer=HeldEngine)

    def fail(peer, region, layout):
        raise error

    prefill.transfer.accept = fail
    with BareDecode(prefill) as peer:
        await peer.shake_hands()
        answer = await peer.ask(kv_map_init(prefill.pool.region()))
    assert answer == Refused(reason=words)
    await until(lambda: not prefill.buffer._accepting)  # the answer leaves before the task ends


async def test_peers_that_cannot_be_reached_take_no_threads_of_others(cluster):
    """Layers that came, digests and prompts wait for the loop's own threads, of which few are."""
    may_go_on = threading.Event()

    class Unreached(ShmEngine):
        def connect(self, peer, region, layout):
            may_go_on.wait(WAIT_S)
            raise PeerTimeout("its data port does not answer")

    decode = cluster.decode(make_transfer=Unreached)
    of_loop = min(32, (os.cpu_count() or 1) + 4)
    num_peers = max(of_loop, THREADS_MAX) + 1
    peers = [cluster.prefill(worker_id=f"prefill-{n}") for n in range(num_peers)]
    buffers = [decode.buffer(peer) for peer in peers]
    try:
        await until(lambda: len(decode.lanes.threads._threads) == THREADS_MAX)
        assert await asyncio.wait_for(asyncio.to_thread(bool, 1), WAIT_S)
    finally:
        may_go_on.set()
    ends = await asyncio.gather(*(each.connect() for each in buffers), return_exceptions=True)
    assert {type(end) for end in ends} == {PeerTimeout}
