"""Lanes and outlets over the event loops' own transports: the same bytes, in the same order."""

import asyncio
import os
import socket
import struct
from contextlib import suppress

import pytest
import uvloop
from lane_rig import Rig, chunk_of, chunks_of, event_of, payload_of

from neuron_di_proxy.token_lane import IS_COMPILED, Outlet, PlainOutlet, relay_told

compiled = pytest.mark.skipif(not IS_COMPILED, reason="the extension was not built: no compiler")
TEXTS = [f'"{place}"\n' + "ü" * (place % 700) for place in range(4000)]
PATIENCE_S = 20


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner.run


class Counting:
    """A real transport, and how often it was written to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.is_closing = transport.is_closing
        self._transport = transport
        self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.num_writes += 1
        self._transport.write(data)


class Connection(asyncio.Protocol):
    """An accepted connection with its outlet, and the client's end, which reads when told to."""

    async def open(self, make_outlet=Outlet) -> "Connection":
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        self.client = socket.socket()
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.client.setblocking(False)
        await loop.sock_connect(self.client, listener.getsockname())
        accepted, _ = listener.accept()
        listener.close()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        self.lost = loop.create_future()
        real, _ = await loop.connect_accepted_socket(lambda: self, accepted)
        self.transport = Counting(real)
        self.real = real
        self.outlet = make_outlet(real.get_extra_info("socket").fileno(), self.transport)
        self.inode = os.fstat(self.outlet.fd).st_ino
        return self

    def connection_lost(self, exc: Exception | None) -> None:
        was_its_own = os.fstat(self.outlet.fd).st_ino == self.inode
        self.outlet.close()
        self.lost.set_result(was_its_own)

    async def read(self, num: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        async with asyncio.timeout(PATIENCE_S):
            while len(data) < num:
                data += await loop.sock_recv(self.client, num - len(data))
        return bytes(data)

    def reset(self) -> None:
        """By the client."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()

    async def drained(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.real.get_write_buffer_size():  # noqa: ASYNC110 - the transport's own
                await asyncio.sleep(0)

    async def close(self) -> None:
        self.real.abort()
        await self.lost
        self.client.close()


@compiled
def test_tokens_through_a_full_connection_are_the_same_bytes(run):
    async def check():
        connection = await Connection().open()
        rig = Rig()

        def write(event: bytes) -> None:  # as the reply does
            connection.outlet.write(chunk_of(event))

        lane = rig.lane(outlet=connection.outlet, write=write)
        for index, text in enumerate(TEXTS):
            assert relay_told(payload_of([(7, index, index, text)]), {7: lane}, 1.0)[0] == []
            if index == 0:
                assert connection.transport.num_writes == 0  # it went directly
        expected = chunks_of(TEXTS)
        assert connection.real.get_write_buffer_size() > 0
        assert connection.transport.num_writes > 1
        assert await connection.read(len(expected)) == expected
        assert lane.take() == len(TEXTS)
        num_writes = connection.transport.num_writes
        await connection.drained()
        for index in range(10):  # directly again
            relay_told(payload_of([(7, len(TEXTS) + index, 1, "more")]), {7: lane}, 1.0)
        assert connection.transport.num_writes == num_writes
        expected = chunks_of(["more"] * 10)
        assert await connection.read(len(expected)) == expected
        rig.close()
        await connection.close()

    run(check())


@pytest.mark.parametrize("make_outlet", [Outlet, PlainOutlet])
def test_an_outlet_writes_all_bytes_in_order(run, make_outlet):
    async def check():
        connection = await Connection().open(make_outlet)
        expected = b""
        for place, text in enumerate(TEXTS[:500]):
            data = text.encode() * 20
            if place % 50 == 0:  # others write
                connection.transport.write(b"head")
                connection.outlet.block()
                expected += b"head"
            connection.outlet.write(bytearray(data) if place % 2 else data)
            expected += data
        assert connection.real.get_write_buffer_size() > 0
        assert await connection.read(len(expected)) == expected
        assert connection.outlet.has_written
        await connection.close()

    run(check())


@compiled
def test_nothing_overtakes_what_others_wrote(run):
    async def check():
        connection = await Connection().open()
        rig = Rig()
        lane = rig.lane(
            outlet=connection.outlet, write=lambda event: connection.outlet.write(event)
        )
        connection.transport.write(b"x" * (4 << 20))
        connection.outlet.block()
        relay_told(payload_of([(7, 0, 1, "a"), (7, 1, 1, "b")]), {7: lane}, 1.0)
        expected = b"x" * (4 << 20) + event_of("a") + event_of("b")
        assert await connection.read(len(expected)) == expected
        rig.close()
        await connection.close()

    run(check())


@compiled
def test_the_transport_finds_the_error_of_a_socket(run):
    async def check():
        connection = await Connection().open()
        connection.reset()
        rig = Rig()
        lane = rig.lane(outlet=connection.outlet, write=connection.outlet.write)
        async with asyncio.timeout(PATIENCE_S):
            index = 0
            while not connection.lost.done():
                relay_told(payload_of([(7, index, 1, "x")]), {7: lane}, 1.0)
                index += 1
                await asyncio.sleep(0)
        assert connection.lost.result()
        assert connection.outlet.fd == -1
        rig.close()

    run(check())


@compiled
@pytest.mark.parametrize("num_chars", [1 << 20, (1 << 20) + 7])
@pytest.mark.parametrize("char", ["x", '"', "\x01", "💡"])
def test_a_text_may_be_large(run, num_chars, char):
    async def check():
        connection = await Connection().open()
        rig = Rig()
        lane = rig.lane(outlet=connection.outlet)
        text = char * num_chars
        relay_told(payload_of([(7, 0, 1, text)]), {7: lane}, 1.0)
        assert connection.transport.num_writes == 1  # the rest of it
        expected = chunks_of([text])
        assert await connection.read(len(expected)) == expected
        rig.close()
        await connection.close()

    run(check())


@pytest.mark.parametrize(
    "how", ["abort", "close", "full and close", "full and abort", "end", "reset"]
)
def test_a_connection_has_its_number_until_it_is_lost(run, how):
    """The outlet is closed in connection_lost: in time for what it promises."""

    async def check():
        connection = await Connection().open()
        if how.startswith("full"):
            connection.outlet.write(b"x" * (8 << 20))
        if how.endswith("abort"):
            connection.real.abort()
        elif how.endswith("close"):
            connection.real.close()
        elif how == "end":
            connection.client.shutdown(socket.SHUT_WR)
        else:
            connection.reset()
        async with asyncio.timeout(PATIENCE_S):
            while not connection.lost.done() and connection.client.fileno() >= 0:
                with suppress(BlockingIOError, ConnectionError):
                    connection.client.recv(1 << 20)
                await asyncio.sleep(0)
            assert await connection.lost
        connection.client.close()

    run(check())
