"""When nothing is sent to a socket directly: it is another's, or its connection is ending."""

import asyncio
import fcntl
import os
import socket
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import uvloop
from lane_rig import Rig, chunks_of, payload_of
from raw_http import DEADLINE_S, RawClient, post
from running_proxy import AT_ONCE, RunningProxy
from scripted_worker import ScriptedWorker, finished, play_prefill, token

from neuron_di.config import ProxyOptions
from neuron_di_proxy.front_connection import FrontConnection
from neuron_di_proxy.reply import UNREAD_BYTES_MAX
from neuron_di_proxy.socket_reply import SocketReply
from neuron_di_proxy.token_lane import IS_COMPILED, Outlet, relay_told

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the extension for tokens was not built")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000 04 00 00000000")
PING, PONG = (bytes.fromhex(f"000008 06 {flags} 00000000") + b"are here" for flags in ("00", "01"))
STREAM = {"model": "tiny", "stream": True, "prompt": "hi", "max_tokens": 2000}


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


@pytest.fixture
def pair():
    """Another client's connection, and its other end."""
    ours, other_end = socket.socketpair()
    other_end.setblocking(False)
    yield ours, other_end
    ours.close()
    other_end.close()


class Watch:
    """The connections of a proxy, and those that were lost."""

    def __init__(self, monkeypatch):
        self.made, self.lost = asyncio.Queue(), asyncio.Queue()
        made, lost = FrontConnection.connection_made, FrontConnection.connection_lost

        def note_made(connection, transport):
            made(connection, transport)
            self.made.put_nowait(connection)

        def note_lost(connection, error):
            lost(connection, error)
            self.lost.put_nowait(connection)

        monkeypatch.setattr(FrontConnection, "connection_made", note_made)
        monkeypatch.setattr(FrontConnection, "connection_lost", note_lost)


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


async def until_closed(number):
    async with asyncio.timeout(DEADLINE_S):
        while is_open(number):  # noqa: ASYNC110 - a transport closes it when it pleases
            await asyncio.sleep(0)


def assert_never_sends(outlet, number, pair):
    """Whatever outlet had this number: who has it now is sent nothing."""
    ours, other_end = pair
    taken = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, number)
    try:
        assert taken == number, "it was free"
        assert outlet.fd == -1
        outlet.write(b"of another's answer")
        with pytest.raises(BlockingIOError):
            other_end.recv(1)
    finally:
        os.close(taken)


def test_an_outlet_is_closed_when_its_client_has_left(run, monkeypatch, pair):
    async def check():
        watch = Watch(monkeypatch)
        async with RunningProxy(ProxyOptions(limits=AT_ONCE), []) as proxy:
            async with RawClient(proxy.address):
                connection = await watch.made.get()
                outlet = connection._outlet
                number = outlet.fd
                assert number >= 0
            assert await watch.lost.get() is connection
            await until_closed(number)
            assert_never_sends(outlet, number, pair)

    run(check())


def test_an_outlet_is_closed_when_its_connection_is_handed_over(run, monkeypatch, pair):
    async def check():
        watch = Watch(monkeypatch)
        async with RunningProxy(ProxyOptions(limits=AT_ONCE), []) as proxy:
            async with RawClient(proxy.address) as raw:
                outlet = (await watch.made.get())._outlet
                number = outlet.fd
                assert number >= 0
                raw.send(PREFACE)
                settings = await raw.reader.readexactly(9)
                assert settings[3] == 4, "hypercorn has it"
                assert is_open(number)
                outlet.write(b"of no HTTP/2")
                raw.send(PING)
                async with asyncio.timeout(DEADLINE_S):
                    assert b"of no HTTP/2" not in await raw.reader.readuntil(PONG)
            await until_closed(number)
            assert_never_sends(outlet, number, pair)

    run(check())


def test_a_client_that_reads_nothing_is_left_long_before_its_deadline(run, monkeypatch):
    """It is told by what waits for it, though the tokens take a lane."""
    text = "y" * 9000
    num_tokens = 8 * UNREAD_BYTES_MAX // len(text)  # several times what sockets may hold

    async def decode(leg):
        for index in range(1, num_tokens):
            await leg.send(token(index, text))
        await leg.send(finished(num_tokens))

    async def check():
        watch = Watch(monkeypatch)
        async with AsyncExitStack() as stack:
            workers = [ScriptedWorker("p1", "prefill", play_prefill)]
            workers.append(ScriptedWorker("d1", "decode", decode))
            for worker in workers:
                await stack.enter_async_context(worker)
            config = ProxyOptions(limits=replace(AT_ONCE, send_timeout_s=600.0))
            records = [worker.record for worker in workers]
            proxy = await stack.enter_async_context(RunningProxy(config, records))
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, proxy.address)
            connection = await watch.made.get()
            client.send(post("/v1/completions", STREAM))
            async with asyncio.timeout(DEADLINE_S):
                assert await watch.lost.get() is connection
                await workers[1].legs[0].closed.wait()

    run(check())


class Ending(asyncio.Protocol):
    """An accepted connection with an outlet and a lane, as the front has them."""

    async def open(self):
        loop = asyncio.get_running_loop()
        self.lost = loop.create_future()
        listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.socket()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.client.setblocking(False)
        await loop.sock_connect(self.client, listener.getsockname())
        accepted, _ = listener.accept()
        listener.close()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.transport, _ = await loop.connect_accepted_socket(lambda: self, accepted)
        number = self.transport.get_extra_info("socket").fileno()
        self.outlet = Outlet(number, self.transport)
        reply = SocketReply(self.transport, self.outlet, is_chunked=True, closes=False)
        reply.begin(200, [], length=None)
        self.rig = Rig()
        self.lane = self.rig.lane(outlet=self.outlet, write=reply.write)
        self.texts = []
        self.received = bytearray()
        self.late = []  # how much waited when a token came after the abort
        return self

    def connection_lost(self, exc):
        self.outlet.close()
        self.lost.set_result(None)

    def tell(self):
        text = f"<{len(self.texts)}>" + "x" * 1000
        told = payload_of([(7, len(self.texts), 1, text)])
        assert relay_told(told, {7: self.lane}, 1.0)[0] == []
        self.texts.append(text)

    def tell_late(self):
        self.late.append(self.transport.get_write_buffer_size())
        self.tell()

    def drain(self):
        """Take all that has come. False: it was the end."""
        try:
            while piece := self.client.recv(1 << 20):
                self.received += piece
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    async def until_lost(self):
        """Wait until the connection is, and take all that came before."""
        async with asyncio.timeout(DEADLINE_S):
            await self.lost
            while self.drain():  # noqa: ASYNC110 - it asks a socket
                await asyncio.sleep(0)

    async def close(self):
        self.transport.abort()
        self.client.close()
        self.rig.close()
        await asyncio.sleep(0)


class Link(asyncio.Protocol):
    """A worker's link, of which each word is a token."""

    def __init__(self, tell):
        self._tell = tell

    def data_received(self, data):
        self._tell()


@pytest.mark.parametrize("num_waiting", [1, 81])
def test_after_an_abort_no_token_follows_a_hole(run, num_waiting):
    """What waits in an aborted transport is lost, and its socket is open for a while yet."""

    async def check(stack):
        loop = asyncio.get_running_loop()
        ending = await Ending().open()
        stack.push_async_callback(ending.close)
        their_ends = []
        for _ in range(2):
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            their_ends.append(theirs)
            ours.setblocking(False)
            transport, _ = await loop.connect_accepted_socket(lambda: Link(ending.tell_late), ours)
            stack.callback(transport.abort)
        while ending.transport.get_write_buffer_size() == 0:
            ending.tell()
        for _ in range(num_waiting - 1):
            ending.tell()

        def abort():
            ending.transport.abort()
            ending.drain()  # there is room in its socket
            ending.tell_late()
            for theirs in their_ends:  # before the connection is lost, where the loop reads first
                theirs.send(b"a")

        loop.call_soon(abort)
        await ending.until_lost()
        _, body = ending.received.split(b"\r\n\r\n", 1)
        told = chunks_of(ending.texts)
        assert 0 < len(body) < len(told)
        is_beginning = told.startswith(body)
        assert is_beginning
        assert ending.late

    async def check_and_close():
        async with AsyncExitStack() as stack:
            await check(stack)

    run(check_and_close())
