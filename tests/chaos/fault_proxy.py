"""A TCP connection with faults: it stands between two processes and passes bytes on, or not."""

import asyncio
import contextlib
import os
import socket
from typing import Literal, Self

Direction = Literal["up", "down"]  # to the server, to the client

CHUNK_BYTES = 1 << 16
PORTS = range(20_000, 32_768)
PORTS_PER_RUN = 32


class FaultProxy:
    """Listens while entered; each connection is continued to `upstream_port` of this machine.

    A blocked direction keeps its bytes, and the ends of connections too, as a network that
    drops packets does: what TCP would send again arrives when the direction is open again.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0  # of each piece of data, each way
        self.is_garbling = False  # what goes to the client
        self.num_bytes = 0
        self.heal()

    def block(self, *directions: Direction) -> None:
        """Pass nothing on in these directions; without any, in both."""
        for direction in directions or ("up", "down"):
            self._open[direction].clear()

    def heal(self) -> None:
        for is_open in self._open.values():
            is_open.set()
        self.delay_s = 0.0
        self.is_garbling = False

    def reset(self) -> None:
        """Break every connection there is, both ways, by TCP reset."""
        for writer in list(self._writers):
            _reset(writer)

    async def has_passed(self) -> bool:
        """True when anything went through, either way."""
        return self.num_bytes > 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._open["up"].wait()
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:  # nobody listens: the client learns it as it would without us
            _reset(writer)
            self._writers.discard(writer)
            return
        self._writers.add(up_writer)
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, "up"), self._pump(up_reader, writer, "down")
            )
        finally:
            for each in (writer, up_writer):
                self._writers.discard(each)
                each.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        is_open = self._open[direction]
        try:
            while True:
                await is_open.wait()
                data = await reader.read(CHUNK_BYTES)
                await is_open.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not data:
                    break
                if self.is_garbling and direction == "down":
                    data = b"#" * len(data)
                self.num_bytes += len(data)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except (ConnectionError, OSError):
            await is_open.wait()
            _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        with contextlib.suppress(OSError):  # linger 0: close sends RST
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def free_ports(count: int) -> list[int]:
    """Ports below the range that the system takes for outgoing connections, free just now.

    Whoever gets one listens later. So two test runs on one machine look from different places on.
    """
    ports: list[int] = []
    first = os.getpid() * PORTS_PER_RUN % len(PORTS)
    for port in (*PORTS[first:], *PORTS[:first]):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError("too few ports are free")
