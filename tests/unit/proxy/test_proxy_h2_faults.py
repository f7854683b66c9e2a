"""HTTP/2: what a client may do to its own streams and connection harms no other's."""

import asyncio
import socket
from dataclasses import replace

import h2.connection
import h2.events
import h2.settings
import pytest
import uvloop
from h2_client import H2Client
from raw_http import RawClient, get
from running_proxy import AT_ONCE, RunningProxy

from neuron_di.config import FrontOptions, ProxyOptions
from neuron_di_proxy import front_connection, hypercorn_side, server
from neuron_di_proxy.front import Front

PATIENCE_S = 30
CANCEL = 8


@pytest.fixture
def fronts(monkeypatch):
    """Those of the proxies that are started in this process."""
    made = []

    class WatchedFront(Front):
        def __init__(self, *of_front, **options):
            super().__init__(*of_front, **options)
            made.append(self)

    monkeypatch.setattr(server, "Front", WatchedFront)
    return made


async def until(holds):
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def config_with(**front):
    return ProxyOptions(limits=AT_ONCE, front=FrontOptions(**front))


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("num_turns", range(4))
def test_a_connection_that_just_ends_makes_room(fronts, new_loop, num_turns):
    """At whatever moment another comes: its socket has no number any more."""

    async def scenario():
        async with RunningProxy(config_with(), []) as proxy:
            async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
                client = H2Client(raw)
                client.ask(1, "/live")
                await client.until_over(1)
                hypercorn = fronts[0]._hypercorn
                [held] = hypercorn._resting
                held.writer.transport.abort()
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                was_resting = bool(hypercorn._resting)
                assert hypercorn.end_a_resting_one(64) is was_resting
                assert await client.hear() is False
            await until(lambda: not fronts[0].num_connections)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


async def test_who_wants_to_join_while_making_room_fails_is_refused(fronts, monkeypatch):
    def fail(*_):
        raise ValueError("a bug")

    async with RunningProxy(config_with(connections_max=1), []) as proxy:
        await proxy.http.close()
        monkeypatch.setattr(hypercorn_side.HypercornSide, "end_a_resting_one", fail)
        async with RawClient(proxy.address) as first, RawClient(proxy.address) as second:
            first.send(get("/live"))
            assert (await first.response()).status == 200
            assert await second.reader.read() == b""
        assert fronts[0].num_connections <= 1


async def test_priorities_of_streams_that_never_begin_are_not_kept(fronts, caplog):
    num = 1100  # hypercorn takes a thousand
    async with RunningProxy(config_with(), []) as proxy, RawClient(proxy.address) as raw:
        client = H2Client(raw)
        for stream in range(3, 2 * num + 3, 2):
            client.state.prioritize(stream, weight=7, depends_on=0)
        client.ask(1, "/live")
        await client.until_over(1)
        assert client.statuses[1] == 200
        [held] = fronts[0]._hypercorn._held.values()
        assert len(held.protocol.protocol.priority._streams) <= 2  # the root, and that request's
        client.state.prioritize(2 * num + 3, weight=7, depends_on=1)
        client.ask(2 * num + 5, "/live")
        await client.until_over(2 * num + 5)
    assert "connection_failed" not in caplog.text


async def test_a_cancelled_request_spoils_no_later_head_of_its_connection(fronts):
    """Heads refer to those before them (HPACK): none that was made may be left out."""
    loop = asyncio.get_running_loop()
    async with RunningProxy(config_with(), []) as proxy:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.setblocking(False)
            await loop.sock_connect(sock, proxy.address)
            state = h2.connection.H2Connection()
            state.initiate_connection()
            state.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
            state.increment_flow_control_window((1 << 30) - 65535)

            async def ask(stream, path, *more):
                pseudo = [(":method", "GET"), (":path", path), (":scheme", "http")]
                headers = [*pseudo, (":authority", "a"), *more]
                state.send_headers(stream, headers, end_stream=True)
                await loop.sock_sendall(sock, state.data_to_send())

            for stream in range(1, 180, 2):
                await ask(stream, "/openapi.json")
            await until(lambda: fronts[0]._hypercorn._held)
            [held] = fronts[0]._hypercorn._held.values()
            # The client reads nothing, which is felt by now.
            await until(lambda: held.writer.transport.get_write_buffer_size())
            await ask(181, "/live", ("x-request-id", "the-cancelled"))
            await until(lambda: 181 in held.protocol.protocol.streams)
            for _ in range(20):  # its answer is made meanwhile
                await asyncio.sleep(0.01)
            state.reset_stream(181, CANCEL)
            await ask(183, "/live", ("x-request-id", "the-last"))
            heads = {}
            async with asyncio.timeout(PATIENCE_S):
                while 183 not in heads:
                    data = await loop.sock_recv(sock, 65536)
                    assert data
                    for event in state.receive_data(data):
                        if isinstance(event, h2.events.ResponseReceived):
                            heads[event.stream_id] = dict(event.headers)
                        elif isinstance(event, h2.events.DataReceived):
                            size = event.flow_controlled_length
                            state.acknowledge_received_data(size, event.stream_id)
                    await loop.sock_sendall(sock, state.data_to_send())
    assert heads[183][b"x-request-id"] == b"the-last"
    assert {b"content-type", b"content-length", b"date"} < heads[183].keys()


async def test_a_busy_connection_whose_client_takes_nothing_ends(playing, stack, monkeypatch):
    """Also where a stream waits for a worker: all its streams share the connection."""
    monkeypatch.setattr(hypercorn_side, "unsent_of", lambda _: 7)
    front = FrontOptions(header_timeout_s=0.3)
    held_back = asyncio.Event()

    async def say_nothing(_):
        await held_back.wait()

    playing.decode.script = say_nothing
    config = ProxyOptions(limits=replace(AT_ONCE, send_timeout_s=0.3), front=front)
    proxy = await stack.enter_async_context(RunningProxy(config, playing.proxy.directory.records))
    async with RawClient(proxy.address) as raw, asyncio.timeout(PATIENCE_S):
        client = H2Client(raw)
        client.ask(1, "/v1/completions", b'{"model": "tiny", "prompt": "hi"}')
        while await client.hear():
            pass
    assert 1 not in client.ended
    held_back.set()


@pytest.mark.parametrize("path", ["/livé", "/nothing"])
async def test_a_request_that_cannot_be_taken_ends_its_stream_alone(fronts, path):
    """And nothing stays of it, nor of websockets, which hypercorn refuses."""
    async with RunningProxy(config_with(), []) as proxy, RawClient(proxy.address) as raw:
        client = H2Client(raw)
        last = 201
        for stream in range(1, last, 2):
            if path.isascii():
                client.ask(stream, path, method="CONNECT")
                client.state.end_stream(stream)
            else:
                client.ask(stream, path)
            await client.until_over(stream)
        asked = set(range(1, last, 2))
        assert (client.ended, client.reset) == (
            (asked, set()) if path.isascii() else (set(), asked)
        )
        client.ask(last, "/live")
        await client.until_over(last)
        assert client.statuses[last] == 200
        [held] = fronts[0]._hypercorn._held.values()
        assert held.protocol.protocol.streams.keys() <= {last}


@pytest.mark.parametrize(("limit", "size"), [(4096, 4000), (4096, 4096), (1 << 17, 100_000)])
async def test_a_head_has_the_limit_that_http_1_has(limit, size):
    """And one that is larger ends no other request of its connection."""
    config = config_with(header_bytes_max=limit)
    async with RunningProxy(config, []) as proxy, RawClient(proxy.address) as raw:
        client = H2Client(raw)
        pseudo = {":method": "GET", ":path": "/live", ":scheme": "http", ":authority": "a"}
        client.state.send_headers(1, [*pseudo.items(), ("x", "y" * size)], end_stream=True)
        client.ask(3, "/live")
        for stream in (1, 3):
            await client.until_over(stream)
    assert client.statuses == {1: 200 if size < limit else 431, 3: 200}


async def test_an_idle_connection_is_asked_for_what_is_unsent_once(fronts, monkeypatch):
    asked = []
    unsent_of = front_connection.unsent_of

    def note(transport):
        asked.append(transport)
        return unsent_of(transport)

    monkeypatch.setattr(front_connection, "unsent_of", note)
    async with RunningProxy(config_with(), []) as proxy, RawClient(proxy.address) as client:
        for num_answered in range(1, 3):
            client.send(get("/live"))
            assert (await client.response()).status == 200

            def is_asked():
                fronts[0]._sweep()
                return len(asked) == num_answered  # noqa: B023

            await until(is_asked)
            for _ in range(5):
                assert is_asked()
