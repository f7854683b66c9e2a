"""Who is connected to whom, and through which buffer (N-37, N-38, N-42 to N-44, N-47)."""

import asyncio
import gc
import os
import threading
from dataclasses import replace

import msgspec
import pytest
from transfer_kit import (
    LAYOUT,
    NUM_BLOCKS,
    WAIT_S,
    Decode,
    Prefill,
    R,
    end_of,
    new_incarnation,
    until,
)

from neuron_di.clock import Deadline
from neuron_di.errors import PeerRefused, PeerTimeout, StaleIncarnation
from neuron_di.types import BlockId, RequestId


async def test_second_request_to_the_same_pair_opens_no_socket(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    buffer = decode.buffer(prefill)
    prefill.park()
    await decode.hand_over(prefill, [0, 1])
    num_descriptors = len(os.listdir("/proc/self/fd"))
    prefill.park(RequestId("request-2"))
    await decode.hand_over(prefill, [2, 3], RequestId("request-2"))
    assert decode.buffer(prefill) is buffer
    key = ("127.0.0.1", prefill.buffer.port, prefill.local.incarnation)
    assert list(decode.connector.connection_dict) == [key]
    assert len(os.listdir("/proc/self/fd")) == num_descriptors


async def test_one_send_buffer_serves_three_decode_workers(cluster):
    prefill = cluster.prefill()
    decodes = [cluster.decode(worker_id=f"decode-{n}") for n in range(3)]

    async def hand_over(n, decode):
        for turn in range(4):
            request_id = RequestId(f"{n}-{turn}")
            source = (4 * n + turn, n)
            prefill.park(request_id, source)
            token = await decode.hand_over(prefill, [2 * turn, 2 * turn + 1], request_id)
            assert token.error() is None
            assert (decode.pool.tensor()[2 * turn] == source[0]).all()
            assert (decode.pool.tensor()[2 * turn + 1] == source[1]).all()

    await asyncio.gather(*(hand_over(n, decode) for n, decode in enumerate(decodes)))
    await until(lambda: len(prefill.ended) == 12)
    assert prefill.buffer.lookup_dict == {}
    assert prefill.connector.connections() == ["decode-0", "decode-1", "decode-2"]
    assert all(decode.connector.connections() == ["prefill-0"] for decode in decodes)


async def test_one_decode_worker_pulls_from_two_prefill_workers(cluster):
    first, second = cluster.prefill(worker_id="p1"), cluster.prefill(worker_id="p2")
    second.pool.tensor().add_(100)
    decode = cluster.decode()
    for prefill, block_id, value in ((first, 0, 3), (second, 2, 103)):
        prefill.park()
        assert (await decode.hand_over(prefill, [block_id, block_id + 1])).error() is None
        assert (decode.pool.tensor()[block_id] == value).all()
    assert decode.connector.connections() == ["p1", "p2"]


async def test_same_address_with_another_incarnation_makes_another_buffer(cluster):
    old = cluster.prefill()
    port = old.buffer.port
    decode = cluster.decode()
    old_buffer = decode.buffer(old)
    await old_buffer.connect()
    await old.close()
    restarted = cluster.prefill(signal_port=port)
    restarted.pool.tensor().add_(100)
    restarted.park()
    assert (await decode.hand_over(restarted, [0, 1])).error() is None
    assert (decode.pool.tensor()[0] == 103).all()
    assert decode.buffer(restarted) is not old_buffer
    await until(lambda: old_buffer.is_broken)  # it reached the new process, or nobody
    assert not decode.buffer(restarted).is_broken
    assert decode.connector.connections() == ["prefill-0"]


async def test_a_late_leg_for_a_former_process_leaves_the_new_link_alone(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    await decode.buffer(prefill).connect()
    former = msgspec.structs.replace(prefill.address, incarnation=new_incarnation())
    with pytest.raises(StaleIncarnation):
        await decode.connector.maybe_setup_buffer(former).connect()
    assert not decode.buffer(prefill).is_broken
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_a_restarted_prefill_worker_is_stale_for_who_expects_the_old_one(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    address = msgspec.structs.replace(prefill.address, incarnation=new_incarnation())
    buffer = decode.connector.maybe_setup_buffer(address)
    with pytest.raises(StaleIncarnation, match="restarted") as caught:
        await buffer.connect()
    assert caught.value.retryable
    assert buffer.is_broken
    assert decode.buffer(prefill) is not buffer
    await decode.buffer(prefill).connect()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_digest": "other"}, "another model"),
        ({"layout": replace(LAYOUT, head_dim=4)}, "KV layout"),
    ],
)
async def test_another_model_or_layout_is_refused(cluster, fields, reason):
    prefill, decode = cluster.prefill(), cluster.decode(**fields)
    with pytest.raises(PeerRefused, match=reason):
        await decode.buffer(prefill).connect()
    assert prefill.connector.connections() == decode.connector.connections() == []


async def test_a_static_prefill_worker_takes_its_one_partner_only(cluster):
    prefill = cluster.prefill(static_peer="decode-0")
    stranger = cluster.decode(worker_id="decode-1")
    with pytest.raises(PeerRefused, match="bound to decode-0"):
        await stranger.lookup(prefill)
    prefill.park()
    assert (await cluster.decode().hand_over(prefill, [0, 1])).error() is None


async def test_a_static_decode_worker_goes_to_its_one_partner_only(cluster):
    first, second = cluster.prefill(), cluster.prefill(worker_id="prefill-1")
    decode = cluster.decode(static_peer=f"127.0.0.1:{first.buffer.port}")
    with pytest.raises(PeerRefused, match="bound to"):
        decode.buffer(second)
    await decode.buffer(first).connect()
    assert decode.connector.connections() == ["prefill-0"]


async def test_nobody_at_the_address(cluster):
    prefill, decode = cluster.prefill(), cluster.decode(peer_connect_timeout_s=0.2)
    address = prefill.address
    await prefill.close()
    buffer = decode.connector.maybe_setup_buffer(address)
    with pytest.raises(PeerTimeout, match="no answer"):
        await buffer.connect()
    assert decode.connector.maybe_setup_buffer(address) is not buffer


async def test_peers_come_and_go_and_nothing_piles_up(cluster):
    """Thirty decode workers at one prefill worker, thirty prefill workers at one decode worker."""
    prefill, decode = cluster.prefill(), cluster.decode()
    for turn in range(30):
        guest, host = Decode(f"decode-{turn}"), Prefill(f"prefill-{turn}")
        request_id = RequestId(f"request-{turn}")
        prefill.park(request_id)
        host.park(request_id)
        assert (await guest.hand_over(prefill, [0, 1], request_id)).error() is None
        block_ids = [turn % (NUM_BLOCKS - 1), NUM_BLOCKS - 1]
        assert (await decode.hand_over(host, block_ids, request_id)).error() is None
        decode.buffer(host).close()
        await guest.close()
        await host.close()
    await until(lambda: len(prefill.ended) == 30)
    assert decode.connector.connection_dict == {}
    assert decode.transfer._peers == {}
    assert prefill.buffer.lookup_dict == {}


async def test_a_link_that_ends_takes_no_lane_from_one_that_is_connecting(cluster, monkeypatch):
    prefill, decode = cluster.prefill(), cluster.decode()
    first = decode.buffer(prefill)
    await first.connect()
    is_connected, may_tell, connect = threading.Event(), threading.Event(), decode.lanes.connect

    def tell_late(*call):
        lane = connect(*call)
        is_connected.set()
        assert may_tell.wait(WAIT_S)
        return lane

    monkeypatch.setattr(decode.lanes, "connect", tell_late)
    address = msgspec.structs.replace(prefill.address, signal_host="localhost")
    second = decode.connector.maybe_setup_buffer(address)
    await until(is_connected.is_set)
    first.close()
    may_tell.set()
    await second.connect()
    prefill.park()
    ready = await second.lookup(R, 0, Deadline.after(WAIT_S), decode.on_lost)
    assert (await end_of(second.pull(ready, [BlockId(0), BlockId(1)]))).error() is None


async def test_a_silent_decode_worker_is_forgotten_by_prefill(cluster, monkeypatch):
    monkeypatch.setattr("neuron_di.transfer.send_buffer.SWEEP_INTERVAL_S", 0.05)
    prefill, decode = cluster.prefill(peer_silence_s=0.5), cluster.decode(heartbeat_s=0.05)
    guest = Decode("guest")
    await guest.buffer(prefill).connect()
    await decode.buffer(prefill).connect()
    assert prefill.connector.connections() == ["decode-0", "guest"]
    await guest.close()
    await until(lambda: prefill.connector.connections() == ["decode-0"])
    prefill.park()
    assert (await decode.hand_over(prefill, [0, 1])).error() is None


async def test_closing_leaves_no_descriptor_and_no_task():
    async def life():
        prefill, decode = Prefill(), Decode()
        prefill.park()
        assert (await decode.hand_over(prefill, [0, 1])).error() is None
        waiting = asyncio.create_task(decode.lookup(prefill, RequestId("never")))
        await asyncio.sleep(0)
        await decode.close()
        await prefill.close()
        with pytest.raises(Exception, match="closed"):
            await waiting

    await life()  # what is made once, such as the executor's threads, is there after it
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    await life()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_closing_while_connecting_tells_the_waiters(cluster):
    prefill, decode = cluster.prefill(), cluster.decode()
    waiting = [asyncio.create_task(decode.lookup(prefill, RequestId(str(n)))) for n in range(3)]
    await asyncio.sleep(0)
    decode.buffer(prefill).close()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [outcome.code for outcome in outcomes] == ["peer_gone"] * 3
    assert R not in prefill.buffer.lookup_dict
    await asyncio.sleep(0.05)
    assert decode.transfer._peers == {}
