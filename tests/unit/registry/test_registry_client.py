import asyncio

import pytest
import zmq
import zmq.asyncio

from neuron_di.errors import (
    ConfigError,
    PeerGone,
    PeerRefused,
    PeerTimeout,
    RemoteProtocolError,
)
from neuron_di.registry import RegistryClient, RegistryServer, Snapshot
from neuron_di.wire import (
    GrantLease,
    KeyPut,
    LeaseGranted,
    encode_msgpack,
    registry_call_decoder,
)

LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
async def free_address():
    """Where nothing listens."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(LOOPBACK)
    address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    context.destroy(linger=0)
    return address


@pytest.fixture
async def router():
    """A registry that says what it likes."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(LOOPBACK)
    yield socket
    context.destroy(linger=0)


async def test_it_does_over_the_link_what_the_registry_does(registry):
    async with (
        RegistryServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        lease = await client.grant(10)
        await client.put("/a", b"\x00\xff", lease)
        assert await anext(registry.watch("/")) == Snapshot({"/a": b"\x00\xff"})
        assert await client.keep_alive(lease) == 10
        await client.revoke(lease)
        await client.revoke(lease)
        assert await client.keep_alive(lease) == 0
        assert await anext(registry.watch("/")) == Snapshot({})
        with pytest.raises(PeerRefused, match="the lease is unknown"):
            await client.put("/a", b"", lease)
        with pytest.raises(PeerRefused, match="a lease lasts"):
            await client.grant(0)
        with pytest.raises(PeerRefused, match="65537"):
            await client.put("/a", b"v" * 65537, await client.grant(10))


async def test_many_calls_at_once_each_get_their_own_answer(registry):
    async with (
        RegistryServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        leases = await asyncio.gather(*(client.grant(10 + index) for index in range(200)))
        remaining = await asyncio.gather(*(client.keep_alive(lease) for lease in leases))
        assert remaining == [10 + index for index in range(200)]


async def test_a_deadline_ends_the_call_when_nothing_listens(free_address):
    async with RegistryClient(free_address, call_timeout_s=0.05) as client:
        for _ in range(3):
            with pytest.raises(PeerTimeout, match="did not answer"):
                await client.grant(10)


async def test_a_deadline_ends_the_call_when_nobody_answers(router):
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    async with RegistryClient(address, call_timeout_s=0.2) as client:
        with pytest.raises(PeerTimeout):
            await client.grant(10)


async def test_odd_answers_are_survived(router):
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    async with RegistryClient(address, call_timeout_s=30) as client:
        grant = asyncio.create_task(client.grant(10))
        name, raw = await router.recv_multipart()
        call = registry_call_decoder.decode(raw).call
        await router.send_multipart([name, b"\xc1"])
        await router.send_multipart([name, encode_msgpack(GrantLease(call=call, ttl_s=1))])
        await router.send_multipart([name, encode_msgpack(LeaseGranted(call=99, lease=1))])
        await router.send_multipart([name, encode_msgpack(LeaseGranted(call=call, lease=5))])
        await router.send_multipart([name, encode_msgpack(LeaseGranted(call=call, lease=6))])
        assert await grant == 5
        assert client.num_malformed == 2

        grant = asyncio.create_task(client.grant(10))
        name, raw = await router.recv_multipart()
        call = registry_call_decoder.decode(raw).call
        await router.send_multipart([name, encode_msgpack(KeyPut(call=call))])
        with pytest.raises(RemoteProtocolError, match="KeyPut"):
            await grant


async def test_closing_ends_the_calls_that_wait(router):
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    async with RegistryClient(address, call_timeout_s=30) as client:
        grant = asyncio.create_task(client.grant(10))
        await router.recv_multipart()
    with pytest.raises(PeerGone):
        await grant


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1"])
async def test_what_is_no_address_is_a_config_error(address):
    with pytest.raises(ConfigError, match="is not the address of a registry"):
        async with RegistryClient(address):
            pass
