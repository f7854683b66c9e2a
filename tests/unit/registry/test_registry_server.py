import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from neuron_di.clock import sleep_s
from neuron_di.errors import ConfigError
from neuron_di.registry import EmbeddedRegistry, RegistryClient, RegistryServer
from neuron_di.wire import (
    REGISTRY_BYTES_MAX,
    GrantLease,
    LeaseGranted,
    PutKey,
    RegistryRefused,
    encode_msgpack,
    registry_answer_decoder,
)

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
async def server(registry):
    async with RegistryServer(registry, LOOPBACK) as server:
        yield server


@pytest.fixture
async def dealer(server):
    """A client that says what it likes."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.address)
    yield socket
    context.destroy(linger=0)


async def ask(dealer, *frames):
    await dealer.send_multipart(frames)
    async with asyncio.timeout(30):
        (answer,) = await dealer.recv_multipart()
    return registry_answer_decoder.decode(answer)


MALFORMED = {
    "empty": [b""],
    "not msgpack": [b"\xc1\xff"],
    "text": [b"GET / HTTP/1.1"],
    "no tag": [msgspec.msgpack.encode({"call": 1, "ttl_s": 5})],
    "unknown tag": [msgspec.msgpack.encode({"type": "shutdown", "call": 1})],
    "missing field": [msgspec.msgpack.encode({"type": "grant_lease", "call": 1})],
    "wrong type": [msgspec.msgpack.encode({"type": "grant_lease", "call": "1", "ttl_s": 5})],
    "too deep": [b"\x91" * 100_000],
    "two frames": [b"", encode_msgpack(GrantLease(call=1, ttl_s=5))],
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_message_is_answered_counted_and_survived(server, dealer, frames):
    answer = await ask(dealer, *frames)
    assert isinstance(answer, RegistryRefused)
    assert answer.call == 0
    assert server.num_malformed == 1
    granted = await ask(dealer, encode_msgpack(GrantLease(call=7, ttl_s=5)))
    assert isinstance(granted, LeaseGranted)
    assert granted.call == 7


async def test_what_the_registry_refuses_is_answered_with_the_reason(server, dealer):
    answer = await ask(dealer, encode_msgpack(GrantLease(call=3, ttl_s=0)))
    assert answer == RegistryRefused(call=3, reason="a lease lasts from 1.0 to 3600.0 s, not 0.0")
    granted = await ask(dealer, encode_msgpack(GrantLease(call=4, ttl_s=5)))
    put = PutKey(call=5, key="/a", value=b"v" * 65537, lease=granted.lease)
    answer = await ask(dealer, encode_msgpack(put))
    assert answer == RegistryRefused(call=5, reason="a value has at most 65536 bytes, not 65537")
    assert server.num_malformed == 0


async def test_an_oversized_message_reaches_nobody(server, dealer):
    await dealer.send(b"x" * (REGISTRY_BYTES_MAX + 1))
    async with RegistryClient(server.address) as client:
        assert await client.grant(10) > 0
    assert server.num_malformed == 0


async def test_a_client_that_does_not_wait_for_its_answer_harms_nobody(server):
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(server.address)
    for call in range(100):
        await socket.send(encode_msgpack(GrantLease(call=call, ttl_s=5)))
    context.destroy(linger=0)
    async with RegistryClient(server.address) as client:
        assert await client.grant(10) > 0


async def test_a_flood_does_not_keep_the_loop_from_all_else(server, monkeypatch):
    """What waits in a socket is received without waiting for anything."""
    num_asked = 20
    turn, answered_in = 0, []
    all_answered = asyncio.Event()
    answer = server._answer

    async def noting(client, frames):
        answered_in.append(turn)
        if len(answered_in) == num_asked:
            all_answered.set()
        return await answer(client, frames)

    monkeypatch.setattr(server, "_answer", noting)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.address)
        for call in range(num_asked):
            socket.send(encode_msgpack(GrantLease(call=call, ttl_s=5)))
        sleep_s(0.5)  # until all wait there, while the loop stands still
        async with asyncio.timeout(30):
            while not all_answered.is_set():
                turn += 1
                await asyncio.sleep(0)
    assert len(set(answered_in)) == num_asked


async def test_of_a_client_that_floods_little_is_kept(server):
    value = PutKey(call=1, key="/a", value=b"v" * 65536, lease=1)
    num_taken = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger, socket.sndhwm = 0, 1
        socket.connect(server.address)
        while num_taken < 900 and socket.poll(500, zmq.POLLOUT):  # nobody reads meanwhile
            socket.send(encode_msgpack(value))
            num_taken += 1
    assert num_taken < 500  # most of them in the system's buffers


async def test_an_address_in_use_is_a_config_error(server, registry):
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:.*in use"):
        async with RegistryServer(registry, server.address):
            pass


async def test_it_listens_on_ipv6(registry):
    async with (
        RegistryServer(registry, "tcp://[::1]:0") as server,
        RegistryClient(server.address) as client,
    ):
        assert server.address.startswith("tcp://[::1]:")
        assert await client.grant(10) > 0


async def test_leases_that_ended_are_swept(server, registry, clock):
    async with RegistryClient(server.address) as client:
        lease = await client.grant(10)
        await client.put("/a", b"1", lease)
        watch = registry.watch("/")
        assert (await anext(watch)).values == {"/a": b"1"}
        clock.s += 1000
        async with asyncio.timeout(30):
            assert (await anext(watch)).key == "/a"
        await watch.aclose()
        assert await client.keep_alive(lease) == 0


async def test_time_in_which_the_process_stood_still_ends_no_lease():
    registry = EmbeddedRegistry()
    lease = await registry.grant(1)
    async with RegistryServer(registry, LOOPBACK):
        await asyncio.sleep(0)
        sleep_s(1.5)
        await asyncio.sleep(0.01)  # the sweep that was due comes first
        assert await registry.keep_alive(lease) == 1
