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
from neuron_di.registry import EmbeddedRegistry, RegistryClient, RegistryServer, Snapshot
from neuron_di.registry.link import CALLS_MAX
from neuron_di.wire import (
    RECORD_BYTES_MAX,
    GrantLease,
    KeyPut,
    KeysListed,
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


async def test_of_many_calls_no_more_are_under_way_than_the_registry_has_room_to_answer(router):
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    async with RegistryClient(address, call_timeout_s=30) as client:
        grants = [asyncio.create_task(client.grant(10)) for _ in range(CALLS_MAX + 1)]
        asked = [await router.recv_multipart() for _ in range(CALLS_MAX)]
        assert not await router.poll(100)
        for name, raw in asked:
            call = registry_call_decoder.decode(raw).call
            await router.send_multipart([name, encode_msgpack(LeaseGranted(call=call, lease=call))])
        name, raw = await router.recv_multipart()
        call = registry_call_decoder.decode(raw).call
        await router.send_multipart([name, encode_msgpack(LeaseGranted(call=call, lease=call))])
        assert await asyncio.gather(*grants) == list(range(1, CALLS_MAX + 2))


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
        grants = [asyncio.create_task(client.grant(10)) for _ in range(2 * CALLS_MAX)]
        await router.recv_multipart()
    ends = await asyncio.gather(*grants, return_exceptions=True)
    assert {type(end) for end in ends} == {PeerGone}  # of those without their turn, too


async def test_closing_ends_the_calls_that_nobody_takes(free_address):
    async with RegistryClient(free_address, call_timeout_s=30) as client:
        grants = [asyncio.create_task(client.grant(10)) for _ in range(2 * CALLS_MAX)]
        await asyncio.sleep(0.1)
    ends = await asyncio.gather(*grants, return_exceptions=True)
    assert {type(end) for end in ends} == {PeerGone}


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1"])
async def test_what_is_no_address_is_a_config_error(address):
    with pytest.raises(ConfigError, match="is not the address of a registry"):
        async with RegistryClient(address):
            pass


async def test_a_watch_over_the_link_says_what_there_is_again_and_again(registry):
    async with (
        RegistryServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        watch = client.watch("/a")
        assert await anext(watch) == Snapshot({})
        lease = await client.grant(10)
        await client.put("/a/1", b"one", lease)
        assert await anext(watch) == Snapshot({"/a/1": b"one"})
        await client.put("/b/1", b"other", lease)
        await client.put("/a/2", b"two", lease)
        assert await anext(watch) == Snapshot({"/a/1": b"one", "/a/2": b"two"})
        await client.revoke(lease)
        assert await anext(watch) == Snapshot({})
        await watch.aclose()


async def test_a_watch_reads_more_than_fits_into_one_message(registry):
    values = {f"/a/{number}": bytes([number]) * RECORD_BYTES_MAX for number in range(5)}
    lease = await registry.grant(10)
    for key, value in values.items():
        await registry.put(key, value, lease)
    async with (
        RegistryServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        watch = client.watch("/a")
        assert await anext(watch) == Snapshot(values)
        await watch.aclose()


async def test_a_watch_outlives_the_registry_and_hears_its_successor(registry):
    async with RegistryServer(registry, LOOPBACK) as server:
        address = server.address
        client = await RegistryClient(address, call_timeout_s=0.2).__aenter__()
        watch = client.watch("/")
        lease = await registry.grant(10)
        await registry.put("/a", b"old", lease)
        assert await anext(watch) == Snapshot({"/a": b"old"})
    hearing = asyncio.create_task(anext(watch))
    successor = EmbeddedRegistry()
    async with RegistryServer(successor, address):
        lease = await successor.grant(10)
        await successor.put("/a", b"new", lease)
        while await hearing == Snapshot({}):  # it may have been asked before the key was put
            hearing = asyncio.create_task(anext(watch))
        assert hearing.result() == Snapshot({"/a": b"new"})
        await watch.aclose()
        await client.__aexit__(None, None, None)


async def test_keys_of_wide_characters_are_listed_in_pages_that_fit_a_message(registry):
    async with (
        RegistryServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        lease = await client.grant(10)
        keys = [f"/{index:03}" + "\N{GRINNING FACE}" * 250 for index in range(300)]
        for key in keys:
            await client.put(key, b"", lease)
        assert await anext(client.watch("/")) == Snapshot(dict.fromkeys(keys, b""))


async def test_pages_that_do_not_go_on_are_no_answer(router):
    address = router.getsockopt_string(zmq.LAST_ENDPOINT)
    async with RegistryClient(address) as client:
        listing = asyncio.create_task(client._all("/", ""))
        for _ in range(2):
            name, raw = await router.recv_multipart()
            call = registry_call_decoder.decode(raw).call
            page = KeysListed(call=call, version="v", values={"/a": b""}, is_last=False)
            await router.send_multipart([name, encode_msgpack(page)])
        with pytest.raises(RemoteProtocolError, match="do not go on"):
            await listing


class CountingServer(RegistryServer):
    """Counts what it is asked."""

    num_asked = 0

    async def _answer(self, client, frames):
        self.num_asked += 1
        return await super()._answer(client, frames)


async def test_a_watch_waits_for_changes_and_does_not_look_for_them(registry):
    async with (
        CountingServer(registry, LOOPBACK) as server,
        RegistryClient(server.address) as client,
    ):
        watch = client.watch("/a")
        assert await anext(watch) == Snapshot({})
        hearing = asyncio.create_task(anext(watch))
        async with asyncio.timeout(30):
            while not server._waiting:  # noqa: ASYNC110 - until it has asked
                await asyncio.sleep(0.01)
        await asyncio.sleep(1.0)
        assert server.num_asked == 2  # what there is; then, for what comes
        lease = await registry.grant(10)
        await registry.put("/a/1", b"one", lease)
        assert await hearing == Snapshot({"/a/1": b"one"})
        assert server.num_asked == 2  # that was the answer
        await watch.aclose()
    assert server._waiting == {}


async def test_nothing_new_is_answered_too_before_the_client_gives_up(registry, monkeypatch):
    monkeypatch.setattr("neuron_di.registry.registry_client.WATCH_WAIT_S", 0.1)
    async with (
        CountingServer(registry, LOOPBACK) as server,
        RegistryClient(server.address, call_timeout_s=30) as client,
    ):
        watch = client.watch("/a")
        assert await anext(watch) == Snapshot({})
        hearing = asyncio.create_task(anext(watch))
        async with asyncio.timeout(30):
            while server.num_asked < 4:  # noqa: ASYNC110 - again and again
                await asyncio.sleep(0.01)
        assert not hearing.done()
        assert client.trouble() == ""
        hearing.cancel()
        await asyncio.wait([hearing])


async def test_a_connection_that_breaks_ends_the_wait_at_once(registry):
    async with RegistryServer(registry, LOOPBACK) as server:
        address = server.address
        client = await RegistryClient(address, call_timeout_s=600).__aenter__()
        watch = client.watch("/a")
        assert await anext(watch) == Snapshot({})
        hearing = asyncio.create_task(anext(watch))
        async with asyncio.timeout(30):
            while not server._waiting:  # noqa: ASYNC110 - until it has asked
                await asyncio.sleep(0.01)
    async with asyncio.timeout(30):
        while not client.trouble():  # noqa: ASYNC110 - no answer will come
            await asyncio.sleep(0.01)
    assert client.trouble() == "the registry hung up"
    successor = EmbeddedRegistry()
    lease = await successor.grant(10)
    await successor.put("/a/1", b"one", lease)
    async with RegistryServer(successor, address), asyncio.timeout(30):
        assert await hearing == Snapshot({"/a/1": b"one"})
        assert client.trouble() == ""
        await watch.aclose()
        await client.__aexit__(None, None, None)
