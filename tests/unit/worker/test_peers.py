"""Workers that know their peers: connections ahead of requests, and strangers kept out.

Real workers, registry, sockets and keys (N-43, N-44, N-47).
"""

import asyncio
import gc
import os
from contextlib import AsyncExitStack

import msgspec
import pytest
import zmq
from peers_kit import Town
from worker_kit import collect, decode_leg, is_at_rest, prefill_leg, token_ids, until

from neuron_di.errors import PeerGone
from neuron_di.types import Incarnation
from neuron_di.worker import peers
from neuron_di.worker.peers import PeerConnections


@pytest.fixture
async def town(llama_folder):
    return Town(llama_folder)


@pytest.fixture
async def stack():
    async with AsyncExitStack() as entered:
        yield entered


@pytest.fixture
def num_looks(monkeypatch):
    """How often a decode worker has looked for what is to be done about its connections."""
    look, looks = PeerConnections.look, []

    def counted(self):
        looks.append(1)
        return look(self)

    monkeypatch.setattr(PeerConnections, "look", counted)
    return lambda: len(looks)


async def ask(name, prefill, decode):
    """One request; its token ids."""
    leg = asyncio.create_task(collect(decode.decode.run(decode_leg(name, prefill))))
    first = await collect(prefill.prefill.run(prefill_leg(name)))
    return token_ids(first) + token_ids(await leg)


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_a_pair_is_connected_before_the_first_request(town, stack):
    decode = await stack.enter_async_context(town.living("decode", "d0"))
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    await until(lambda: decode.record().connections == ["p0"])
    await until(lambda: prefill.record().connections == ["d0"])
    assert decode.connector._num_connections == 1
    before = num_descriptors()
    for n in range(3):
        assert len(await ask(f"r{n}", prefill, decode)) == 12
    assert decode.connector._num_connections == 1  # N-43
    assert num_descriptors() == before
    assert prefill.status().num_signals_refused == decode.status().num_signals_refused == 0


async def test_one_prefill_worker_and_three_decode_workers(town, stack):
    """N-44: one SendBuffer, one port; who joins later is let in, too."""
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    decodes = [await stack.enter_async_context(town.living("decode", f"d{n}")) for n in range(3)]
    await until(lambda: prefill.record().connections == ["d0", "d1", "d2"])
    answers = [await ask(f"r{n}", prefill, decode) for n, decode in enumerate(decodes)]
    assert answers[0] == answers[1] == answers[2]
    assert [decode.connector._num_connections for decode in decodes] == [1, 1, 1]


async def test_a_request_that_names_an_unknown_peer_connects_by_itself(town, stack):
    """The decode worker's watch is behind; the prefill worker's is not."""
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    decode = town.make("decode", "d0")
    stack.push_async_callback(decode.close)
    await town.announce(decode.record())
    assert len(await ask("r", prefill, decode)) == 12


async def test_a_request_may_come_before_prefill_knows_who_asks(town, stack):
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    decode = town.make("decode", "d0")
    stack.push_async_callback(decode.close)
    asking = asyncio.create_task(ask("r", prefill, decode))
    door = prefill.connector._transport._door
    await until(lambda: door.num_waiting == 1)
    await town.announce(decode.record())
    assert len(await asking) == 12
    assert prefill.status().num_signals_refused == 0


async def test_a_stranger_is_refused_and_counted(town, stack):
    prefill = await stack.enter_async_context(
        town.living("prefill", "p0", peer_connect_timeout_s=0.2)
    )
    stranger = town.make("decode", "d0")
    stack.push_async_callback(stranger.close)
    buffer = stranger.connector.maybe_setup_buffer(prefill.record().peer_address())
    with pytest.raises(PeerGone, match="the directory there does not know our key"):
        await buffer.connect()
    assert prefill.status().num_signals_refused == 1
    assert prefill.record().connections == []


@pytest.mark.parametrize(
    "fields",
    [
        {"model_digest": "other"},
        {"layout_digest": "other"},
        {"transfer": ["other"]},
        {"state": "draining"},
        {"state": "starting"},
        {"signal_port": 0},
        {"role": "decode"},
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)
async def test_who_does_not_fit_is_not_connected_to(town, stack, fields):
    decode = await stack.enter_async_context(town.living("decode", "d0"))
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    odd = town.make("prefill", "odd")
    stack.push_async_callback(odd.close)
    await town.announce(odd.record(), **fields)
    await until(lambda: decode.record().connections == ["p0"])
    assert prefill.record().connections == ["d0"]
    assert decode.connector._num_connections == 1


async def test_a_peer_that_left_is_let_go_of_once_no_request_uses_it(town, stack, monkeypatch):
    monkeypatch.setattr(peers, "UNUSED_S", 0.0)
    decode = await stack.enter_async_context(town.living("decode", "d0"))
    prefill = town.make("prefill", "p0")
    stack.push_async_callback(prefill.close)
    lease = await town.announce(prefill.record())
    await until(lambda: decode.record().connections == ["p0"])
    leg = asyncio.create_task(collect(decode.decode.run(decode_leg("r", prefill))))
    (buffer,) = decode.connector.connection_dict.values()
    await until(lambda: buffer.is_used)
    await town.announce(prefill.record(), lease, state="draining")
    # It was looked at, too, when this one was connected to.
    await stack.enter_async_context(town.living("prefill", "p1"))
    await until(lambda: "p1" in decode.record().connections)
    assert buffer.is_connected
    assert len(token_ids(await collect(prefill.prefill.run(prefill_leg("r"))))) == 1
    assert len(token_ids(await leg)) == 11
    await town.registry.revoke(lease)
    left = {prefill.record().incarnation}
    await until(lambda: left.isdisjoint(decode._lanes.engines[0]._peers))
    assert [b.peer.worker_id for b in decode.connector.connection_dict.values()] == ["p1"]


async def test_a_broken_connection_is_made_again_while_the_peer_is_listed(town, stack):
    decode = await stack.enter_async_context(town.living("decode", "d0"))
    await stack.enter_async_context(town.living("prefill", "p0"))
    await until(lambda: decode.record().connections == ["p0"])
    (buffer,) = decode.connector.connection_dict.values()
    buffer.close()
    assert decode.record().connections == []
    await until(lambda: decode.record().connections == ["p0"])
    assert decode.connector._num_connections == 2


async def test_who_cannot_be_reached_is_tried_less_and_less_often(town, stack):
    decode = town.make("decode", "d0")
    stack.push_async_callback(decode.close)
    follower = PeerConnections(decode.record(), decode.connector, None)
    peer = Incarnation("p")
    waits = []
    for _ in range(8):
        follower._put_off(peer, "p0", PeerGone("away"))
        retry = follower._retries[peer]
        assert retry.wait_s / 2 <= retry.due.remaining_s() + 0.05 <= retry.wait_s + 0.05
        waits.append(retry.wait_s)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    follower._retries[peer].connected_s = -100.0  # it was well for long
    follower._put_off(peer, "p0", PeerGone("away"))
    assert follower._retries[peer].wait_s == 0.2


async def test_no_sockets_left_is_a_peer_to_be_tried_again(town, stack, num_looks):
    decode = town.make("decode", "d0")
    stack.push_async_callback(decode.close)
    decode.connector._transport._context.set(zmq.MAX_SOCKETS, 1)
    prefill = await stack.enter_async_context(town.living("prefill", "p0"))
    await stack.enter_async_context(peers.following_peers(decode, town.registry))
    before = num_looks()
    await until(lambda: num_looks() >= before + 3)
    with pytest.raises(PeerGone, match="no signal link can be"):
        decode.connector.buffer_for(prefill.record().peer_address())
    assert decode.connector.connection_dict == {}
    assert decode.record().connections == []
    assert prefill.record().connections == []


async def test_a_registry_that_forgot_everybody_ends_no_connection(town, stack, monkeypatch):
    monkeypatch.setattr(peers, "UNUSED_S", 0.0)
    decode = await stack.enter_async_context(town.living("decode", "d0"))
    prefill = town.make("prefill", "p0")
    stack.push_async_callback(prefill.close)
    lease = await town.announce(prefill.record())
    await until(lambda: decode.record().connections == ["p0"])
    await town.registry.revoke(lease)
    # The registry tells of things in their order, and both were looked at together.
    await stack.enter_async_context(town.living("prefill", "p1"))
    await until(lambda: "p1" in decode.record().connections)
    assert decode.record().connections == ["p0", "p1"]
    assert len(await ask("r", prefill, decode)) == 12
    assert decode.connector._num_connections == 2


async def test_connections_are_bounded_and_made_a_few_at_a_time(town, stack, monkeypatch):
    monkeypatch.setattr(peers, "FOLLOWED_MAX", 5)
    monkeypatch.setattr(peers, "CONNECTING_MAX", 2)
    prefills = [await stack.enter_async_context(town.living("prefill", f"p{n}")) for n in range(8)]
    decode = town.make("decode", "d0")
    most = 0
    make = decode.connector.buffer_for

    def counted(peer):
        nonlocal most
        buffer = make(peer)
        open_ones = decode.connector.connection_dict.values()
        most = max(most, sum(not each.is_connected for each in open_ones))
        return buffer

    decode.connector.buffer_for = counted
    stack.push_async_callback(decode.close)
    await town.announce(decode.record())
    await stack.enter_async_context(peers.following_peers(decode, town.registry))
    await until(lambda: len(decode.record().connections) == 5)
    assert most == 2
    # The others work, too: on demand.
    (left,) = [p for p in prefills if p.worker_id not in decode.record().connections][:1]
    assert len(await ask("r", left, decode)) == 12


async def test_different_decode_workers_take_different_ones_of_too_many(town, stack, monkeypatch):
    monkeypatch.setattr(peers, "FOLLOWED_MAX", 4)

    class Listed:
        def workers(self):
            return records

    worker = town.make("prefill", "p")
    decode = town.make("decode", "d0")
    stack.push_async_callback(worker.close)
    stack.push_async_callback(decode.close)
    records = [
        msgspec.structs.replace(worker.record(), incarnation=Incarnation(f"i{n}"))
        for n in range(64)
    ]
    taken = set()
    for n in range(64):
        own = msgspec.structs.replace(decode.record(), incarnation=Incarnation(f"own{n}"))
        wanted = PeerConnections(own, decode.connector, Listed())._wanted()
        assert len(wanted) == 4
        taken |= wanted.keys()
    assert len(taken) > 50


async def test_a_hundred_joins_and_leaves_leave_nothing_behind(town, stack):
    """N-47: fifty prefill workers come and go at one decode worker, and fifty the other way."""
    quick = {"peer_silence_s": 0.4, "heartbeat_s": 0.05}
    gc.collect()
    before = num_maps()  # of tests that came first
    decode = await stack.enter_async_context(town.living("decode", "d0", **quick))
    prefill = await stack.enter_async_context(town.living("prefill", "p0", **quick))
    await until(lambda: decode.record().connections == ["p0"])

    async def come_and_go(n):
        async with (
            town.living("prefill", f"p-{n}", **quick) as host,
            town.living("decode", f"d-{n}", **quick) as guest,
        ):
            await until(lambda: f"p-{n}" in decode.record().connections)
            await until(lambda: f"d-{n}" in prefill.record().connections)
            answers = await asyncio.gather(ask(f"a{n}", host, decode), ask(f"b{n}", prefill, guest))
            assert answers[0] == answers[1]
            await until(lambda: is_at_rest(host))

    async def are_alone():
        await until(lambda: decode.record().connections == ["p0"])
        await until(lambda: prefill.record().connections == ["d0"])
        gc.collect()

    maps = num_maps()  # their two pools, and one's map of the other's
    assert maps == (before[0] + 3, before[1] + 1)
    for n in range(2):  # what is made once, such as an executor's threads, is there after it
        await come_and_go(n)
    await are_alone()
    descriptors, tasks = num_descriptors(), len(asyncio.all_tasks())
    for n in range(2, 50):
        await come_and_go(n)
    await are_alone()
    assert len(decode.connector.connection_dict) == 1
    assert len(decode._lanes.engines[0]._peers) == 1
    assert len(prefill.connector._send_buffer._peers._peers) == 1
    assert prefill.connector._send_buffer.lookup_dict == {}
    assert len(asyncio.all_tasks()) == tasks
    # Fewer, where a socket of the first rounds was still being closed when they were counted.
    await until(lambda: num_descriptors() <= descriptors)
    assert num_maps() == maps


def num_maps():
    """KV pools in this process' memory, and those of them that are another worker's."""
    with open("/proc/self/maps") as lines:
        pools = [line for line in lines if "neuron-di-kv" in line]
    return len(pools), sum(" r--s " in line for line in pools)
